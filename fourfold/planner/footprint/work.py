"""What is alive while a role works: the fullest stage of its passes in every moment, as items of the bill."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import replace

from fourfold.planner.bill import KINDS, MOMENTS, Item, Moment
from fourfold.planner.footprint.depth import Stages
from fourfold.planner.footprint.form import Form
from fourfold.planner.footprint.held import trained
from fourfold.planner.footprint.passes import Lesson, Texts, learned, sampled, scored
from fourfold.planner.footprint.roles import Cast, Role
from fourfold.planner.scene import WIDTHS, Scene


def texts_of(scene: Scene, rows: int = 0) -> Texts:
    """The rollout, or `rows` of it; a batch in which all are as long as the longest needs no mask."""
    lengths, most = scene.lengths, scene.config.ppo.rollout_batch_size
    padded = lengths.mean_prompt < lengths.prompt or lengths.mean_response < lengths.response
    return Texts(min(rows or most, most), lengths.prompt, lengths.response, padded)


def moments_of(scene: Scene, cast: Cast) -> frozenset[Moment]:
    """The moments that a run of this scene has."""
    full = scene.config.ppo.kl_estimator == "full"
    joint = cast.trained_trunk is not None and not scene.config.trunk.alternate
    gone = set()
    if not full:
        gone.add(Moment("score", "actor"))
    if joint:
        gone |= {Moment("learn", "critic"), Moment("learn", "actor")}
    else:
        gone.add(Moment("learn", "trunk"))
    return frozenset(MOMENTS) - gone


def only(items: Iterable[Item], moments: frozenset[Moment]) -> Iterator[Item]:
    """The items in the moments that there are."""
    for item in items:
        if item.bytes and item.moments & moments:
            yield replace(item, moments=item.moments & moments)


def passes_of(scene: Scene, cast: Cast) -> Iterator[Item]:
    """Of all moments in which a role computes."""
    yield from _generate(scene, cast)
    yield from _score(scene, cast)
    yield from _learn(scene, cast)


def _below(cast: Cast) -> int:
    """Width of the trunk's cached activations."""
    return cast.trunk.compute if cast.trunk is not None else 4


def _fullest(name: str, holder: str, moment: Moment, stages: Stages) -> Iterator[Item]:
    """Items of the stage in which most is alive."""
    stage = max(stages, key=lambda each: sum(stages[each].values()))
    for kind in KINDS:
        size = stages[stage].get(kind, 0)
        if size:
            yield Item(holder, kind, size, frozenset({moment}), why=f"{name}: {stage}")


def _working(scene: Scene, role: Role) -> Role:
    """The policy that tokens are drawn from: in the compute type where the trained one has masters."""
    compute = WIDTHS[scene.compute]
    if role.form.lora is not None:
        return role
    form = replace(role.form, trained=False, table_trained=False)
    head = role.head
    if compute != 4:
        form = replace(form, matrices=compute, table=compute)
        head = replace(head, width=compute, trained=False) if head is not None and head.trained else head
    return replace(role, form=form, head=head)


def _generate(scene: Scene, cast: Cast) -> Iterator[Item]:
    moment = Moment("generate", "actor")
    texts = texts_of(scene, scene.config.sampling.batch_size)
    under = cast.trunk
    role = _working(scene, cast.actor)
    sampling = sampled(role, under, texts, cast.trained_trunk is None)
    micro = texts_of(scene, scene.config.ppo.micro_batch_size)
    ids_below = cast.trained_trunk
    again = scored(cast.actor, micro, _below(cast), ids_below)
    stages = {f"sampling, {name}": kinds for name, kinds in sampling.items()}
    stages |= {f"log-probs again, {name}": kinds for name, kinds in again.items()}
    yield from _fullest(f"{texts.rows} rows", "actor", moment, stages)


def _score(scene: Scene, cast: Cast) -> Iterator[Item]:
    micro = texts_of(scene, scene.config.ppo.micro_batch_size)
    for role in cast.roles()[1:]:
        under: Form | None = None
        if cast.trained_trunk is not None:
            under = cast.trained_trunk if role.name == "critic" else cast.trunk
        if role.name in ("reference", "reward") and role.name in scene.models:
            under = None
        stages = scored(role, micro, _below(cast), under)
        yield from _fullest(f"{micro.rows} rows", role.name, Moment("score", role.name), stages)


def _learn(scene: Scene, cast: Cast) -> Iterator[Item]:
    config = scene.config
    ppo = config.ppo
    micro = texts_of(scene, min(ppo.micro_batch_size, ppo.mini_batch_size))
    kept = not config.memory.optimizer_in_backward and config.memory.optimizer_residency != "offload"
    several = ppo.mini_batch_size > micro.rows
    entropy = "learn" if ppo.entropy_coef else "report"
    for role in (cast.critic, cast.actor):
        lesson = Lesson(present=several and kept, keep=kept, entropy=entropy)
        stages = learned(role, micro, _below(cast), lesson)
        moment = Moment("learn", role.name)
        whole = 4 * role.trained_numbers()
        if several and kept:
            stages = {name: {**kinds, "gradients": kinds.get("gradients", 0) + whole} for name, kinds in stages.items()}
        stages["step"] = {"gradients": whole if kept else 0}
        yield from _fullest(f"{micro.rows} rows", role.name, moment, stages)
