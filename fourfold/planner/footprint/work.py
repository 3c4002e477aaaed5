"""What is alive while a role works: the fullest stage of its passes in every moment, as items of the bill."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace

from fourfold.config.checks.critic import one_pass
from fourfold.planner.bill import KINDS, Item, Kind, Moment, Tier
from fourfold.planner.footprint.depth import BELOW, Line, Stages
from fourfold.planner.footprint.held import trained, trunk_cache
from fourfold.planner.footprint.passes import Below, Lesson, Texts, compared, joint, learned, sampled, scored
from fourfold.planner.footprint.roles import Cast, Role
from fourfold.planner.scene import WIDTHS, Scene

# What a stage is called to people.
SAID = {
    "layers": "in its layers",
    "head": "at its head",
    "heads": "at the heads",
    "forward": "in the forward pass",
    "prompts": "while it reads the prompts",
    "last token": "at the last token",
    "backward, layer -1": "as the backward pass begins, in the uppermost layer",
    "backward, layer 0": "as the backward pass ends, in the lowest layer",
}


def texts_of(scene: Scene, rows: int = 0) -> Texts:
    """The rollout, or `rows` of it; a batch in which all are as long as the longest needs no mask."""
    lengths, most = scene.lengths, scene.config.ppo.rollout_batch_size
    padded = lengths.mean_prompt < lengths.prompt or lengths.mean_response < lengths.response
    return Texts(min(rows or most, most), lengths.prompt, lengths.response, padded)


def _micro(scene: Scene) -> Texts:
    return texts_of(scene, scene.micro_rows)


def passes_of(scene: Scene, cast: Cast) -> Iterator[Item]:
    """Of all moments in which a role computes."""
    yield from _generate(scene, cast)
    yield from _score(scene, cast)
    yield from _learn(scene, cast)


def below_of(cast: Cast, role: Role, *, learns: bool = False) -> Below:
    """What a role's passes over a rollout start from."""
    if role.form.embedding:
        return Below()
    if cast.trained_trunk is None or cast.trunk is None:
        return Below(cached=cast.trunk.compute if cast.trunk is not None else 0)
    trained_below = role.name in ("actor", "critic")  # a critic with a model of its own reads ids
    return Below(trunk=cast.trained_trunk if trained_below else cast.trunk, learns=learns)


def _fullest(
    scene: Scene,
    holder: str,
    moment: Moment,
    what: str,
    stages: Stages,
    more: Mapping[Kind, int] | None = None,
    tier: Tier = "device",
) -> Iterator[Item]:
    """Items of the stage in which most is alive, with `more` that is alive in all of them."""
    device = {stage: kinds for stage, kinds in stages.items() if stage != BELOW}
    stage = max(device, key=lambda each: sum(line.bytes for line in device[each].values()))
    where = SAID.get(stage, stage)
    for kind in KINDS:
        line, beside = device[stage].get(kind, Line(0)), (more or {}).get(kind, 0)
        slope = f"; {line.a_layer:,} bytes for each layer" if line.a_layer else ""
        said = f"; {beside:,} of them of earlier passes" if beside else ""
        if line.bytes + beside:
            why = f"{what}, {where}{slope}{said}"
            whose = "trunk" if kind == "trunk cache" else holder
            yield Item(whose, kind, line.bytes + beside, frozenset({moment}), tier, why)
    for kind, line in stages.get(BELOW, {}).items():
        below: Tier = "disk" if scene.on_cpu else "host"
        yield Item(holder, kind, line.bytes, frozenset({moment}), below, f"{what}: what waits for the backward pass")


def _working(scene: Scene, role: Role) -> Role:
    """The policy that tokens are drawn from: in the compute type where the trained one has masters."""
    compute = WIDTHS[scene.compute]
    if role.form.lora is not None:
        return role
    form, head = replace(role.form, trained=False, table_trained=False), role.head
    if compute != 4:
        form = replace(form, matrices=compute, table=compute)
        head = replace(head, width=compute, trained=False) if head is not None and head.trained else head
    return replace(role, form=form, head=head)


def _generate(scene: Scene, cast: Cast) -> Iterator[Item]:
    moment, texts = Moment("generate", "actor"), texts_of(scene, scene.config.sampling.batch_size)
    role, micro = _working(scene, cast.actor), _micro(scene)
    under = cast.trunk
    if cast.trained_trunk is not None and scene.compute == "float32":
        under = replace(cast.trained_trunk, trained=False)
    stages = sampled(role, under, texts)
    again = scored(cast.actor, micro, below_of(cast, cast.actor))
    packed = packed_head_bytes(scene, cast.actor, role)
    both = {
        f"{texts.rows} rows sampled, {SAID[name]}": _with(kinds, "weights", packed) for name, kinds in stages.items()
    }
    both |= {f"log-probs of {micro.rows} rows, {SAID.get(name, name)}": kinds for name, kinds in again.items()}
    if cast.trunk is not None and cast.trained_trunk is None:
        cached = trunk_cache(cast.trunk, texts_of(scene))
        both = {name: _with(kinds, "trunk cache", cached) for name, kinds in both.items()}
    yield from _fullest(scene, "actor", moment, "the actor", both)
    if scene.config.sampling.overlap_scoring:
        rows = texts_of(scene, min(texts.rows, micro.rows))
        asked = [role for role in cast.frozen() if on_device(scene, role) and not role.step_0]
        for name in ("reference", "reward"):
            roles = [role for role in asked if role.name == name]
            if roles:
                beside = _one_after_the_other(cast, roles, rows)
                yield from _fullest(scene, name, moment, f"{rows.rows} rows beside sampling", beside)


def _with(kinds: dict[Kind, Line], kind: Kind, size: int) -> dict[Kind, Line]:
    line = kinds.get(kind, Line(0))
    return {**kinds, kind: line._replace(bytes=line.bytes + size)}


def packed_head_bytes(scene: Scene, actor: Role, working: Role) -> int:
    """Of the copy of the language head that a CPU multiplies by while tokens are drawn (models/packed.py)."""
    head, narrowed = working.head, actor.form.matrices != 4  # what is trained without masters here is not packed
    if head is None or not scene.on_cpu or not scene.cluster.device.multiplies(scene.compute):
        return 0
    if head.product == 4 or head.width != head.product or (actor.head is not None and actor.head.trained and narrowed):
        return 0
    return head.numbers * head.product


def _one_after_the_other(cast: Cast, roles: Sequence[Role], texts: Texts) -> Stages:
    """The stages of passes of models of one name, of which one works at a time."""
    found: Stages = {}
    for number, role in enumerate(roles, start=1):
        stages = scored(role, texts, below_of(cast, role) if role.of_the_base else Below())
        which = ", policy of step 0" if role.step_0 else f", model {number}" if number > 1 else ""
        found |= {f"{SAID.get(stage, stage)}{which}": kinds for stage, kinds in stages.items()}
    return found


def on_device(scene: Scene, role: Role) -> bool:
    """Whether a role computes on the device, in this process."""
    if role.name in ("actor", "critic"):
        return True
    by_torch = role.name != "reference" or role.step_0 or scene.config.reference.engine == "torch"
    return by_torch and getattr(scene.config, role.name).residency not in ("cpu", "service")


def _score(scene: Scene, cast: Cast) -> Iterator[Item]:
    micro = _micro(scene)
    ahead = scene.config.sampling.overlap_scoring
    what = f"{micro.rows} rows"
    asked = [role for role in cast.frozen() if role.step_0 or not ahead]
    for name in ("critic", "reference", "reward"):
        roles = [role for role in (cast.critic, *asked) if role.name == name and _is_here(scene, role)]
        if roles:
            stages = _one_after_the_other(cast, roles, micro)
            tier: Tier = "device" if any(on_device(scene, role) for role in roles) else "host"
            yield from _fullest(scene, name, Moment("score", name), what, stages, tier=tier)
    if scene.config.ppo.kl_estimator != "full":
        return
    if cast.reference is None:  # log V minus the actor's entropy
        stages = scored(cast.actor, micro, below_of(cast, cast.actor))
        yield from _fullest(scene, "actor", Moment("score", "actor"), what, stages)
    elif on_device(scene, cast.reference):
        own = below_of(cast, cast.reference) if cast.reference.of_the_base else Below()
        stages = compared(cast.actor, cast.reference, micro, (below_of(cast, cast.actor), own))
        what = f"{micro.rows} rows, actor and reference"
        yield from _fullest(scene, "actor", Moment("score", "actor"), what, stages)


def _is_here(scene: Scene, role: Role) -> bool:
    return role.name == "critic" or getattr(scene.config, role.name).residency != "service"


def _learn(scene: Scene, cast: Cast) -> Iterator[Item]:
    config, ppo = scene.config, scene.config.ppo
    micro = texts_of(scene, min(scene.micro_rows, ppo.mini_batch_size))
    keep = not config.memory.optimizer_in_backward and config.memory.optimizer_residency != "offload"
    several = ppo.mini_batch_size > micro.rows and keep
    lesson = Lesson(several, keep, "learn" if ppo.entropy_coef else "report")
    size = {each.name: 4 * each.numbers for each in trained(cast)}
    waits = size["critic"] if scene.compute == "float16" else 0  # both step together (docs/decisions/0009)
    what = f"{micro.rows} rows"
    if cast.trained_trunk is not None and one_pass(config):
        whole = size["actor"] + size["critic"] + 2 * size["trunk"]
        stages = joint(cast.actor, cast.critic, cast.trained_trunk, micro, lesson)
        stages = {**stages, "the steps": {"gradients": Line(whole)}}
        more: dict[Kind, int] = {"gradients": whole} if several else {}
        yield from _fullest(scene, "trunk", Moment("learn", "trunk"), what, _unless_steps(stages, several), more)
        return
    for role in (cast.critic, cast.actor):
        learns = role.name == "actor"
        stages = learned(role, micro, below_of(cast, role, learns=learns), lesson)
        whole = size[role.name] + (size.get("trunk", 0) if learns else 0)
        stages = {**stages, **_steps(scene, role, whole if keep else 0)}
        more = {"gradients": (whole if several else 0) + (waits if learns else 0)}
        more |= _gradients_below(scene, role)
        yield from _fullest(scene, role.name, Moment("learn", role.name), what, _unless_steps(stages, several), more)


def _unless_steps(stages: Stages, several: bool) -> Stages:
    """Gradients that are there in every stage are not counted once more in the step."""
    if not several:
        return stages
    return {
        name: {kind: line for kind, line in kinds.items() if kind != "gradients" or "step" not in name}
        for name, kinds in stages.items()
    }


def _steps(scene: Scene, role: Role, gradients: int) -> Stages:
    """The optimizer's step: all gradients, and what of parked states comes in for it, a parameter at a time."""
    memory = scene.config.memory
    largest = role.largest()
    kinds: dict[Kind, Line] = {"gradients": Line(gradients)}
    if memory.optimizer_residency == "park":
        kinds["optimizer"] = Line(8 * largest)
    if memory.optimizer_residency == "offload" and scene.on_cpu:
        masters = 4 if role.form.compute != 4 else 0
        kinds["buffers"] = Line(2 * largest * (4 + 8 + masters))
    return {"the step": kinds}


def _gradients_below(scene: Scene, role: Role) -> dict[Kind, int]:
    """Gradients on their way below the device: two that wait, and on a CPU the buffer that sums go through."""
    if scene.config.memory.optimizer_residency != "offload":
        return {}
    return {"buffers": 4 * role.largest() * (1 if scene.on_cpu else 2)}
