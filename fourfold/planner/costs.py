"""What a PPO step costs: work by role and phase, traffic, seconds, what overlaps, and how well the device is used."""

from __future__ import annotations

from collections.abc import Iterable, Mapping

from fourfold.planner.bill import Footprint, Moment, Phase
from fourfold.planner.hierarchy import check_layout
from fourfold.planner.holding import elsewhere, residency, trained_parameters
from fourfold.planner.links import Busy
from fourfold.planner.passes import Pass, passes
from fourfold.planner.scene import Scene
from fourfold.planner.timing import (
    NOTHING,
    SHARES,
    decoding_steps,
    pass_seconds,
    peak_flops,
    reached_flops,
    step_seconds,
)
from fourfold.planner.traffic import FROZEN, flows, optimizer_steps
from fourfold.planner.work import Costs, Flow, Work

WORKING: tuple[Phase, ...] = ("generate", "score", "learn")


def costs(scene: Scene, footprint: Footprint) -> Costs:
    """The costs of one PPO step of one device.

    Steps of checkpointing, evaluation and loading are not among them. ValueError for a layout that makes no sense.
    """
    check_layout(scene)
    work = _work(scene)
    busy: Busy = {(each.moment.phase, each.moment.role): each.seconds for each in work}
    streams = flows(scene, footprint, busy)
    beside = _beside_sampling(scene, work)
    seconds: dict[Phase, float] = {phase: _phase_seconds(scene, phase, work, streams, beside) for phase in WORKING}
    here = sum(each.flops for each in work if not elsewhere(scene, each.moment.role))
    peak = peak_flops(scene.cluster.device, scene.compute)
    utilisation = here / (peak * sum(seconds.values()))
    return Costs(work, streams, seconds, bubble=seconds["score"], hidden=sum(beside.values()), utilisation=utilisation)


def _work(scene: Scene) -> tuple[Work, ...]:
    """Passes by phase and role, with the optimizer's steps in learn; a trunk is one of the roles here."""
    groups: dict[Moment, list[Pass]] = {}
    for one in passes(scene):
        groups.setdefault(Moment(one.phase, one.role), []).append(one)
    steps = optimizer_steps(scene)
    return tuple(_together(scene, moment, made, steps) for moment, made in groups.items())


def _together(scene: Scene, moment: Moment, made: Iterable[Pass], steps: Mapping[str, int]) -> Work:
    """All that a role does in a phase, on one device."""
    rows, share = scene.config.ppo.rollout_batch_size, 1 if elsewhere(scene, moment.role) else scene.layout.devices
    time, moved, flops, tokens = NOTHING, 0.0, 0.0, 0.0
    counted = {"forward": 0.0, "backward": 0.0}
    for one in made:
        seconds, touched = pass_seconds(scene, one)
        time, moved = time + seconds.times(one.times), moved + one.times * touched
        flops, tokens = flops + one.times * one.flops / share, tokens + one.times * one.batch.tokens
        counted[one.direction] += one.times * one.batch.rows / rows
    if moment.phase == "learn" and moment.role in trained_parameters(scene):
        seconds, touched = step_seconds(scene, moment.role)
        often = steps[moment.role]
        time, moved = time + seconds.times(often), moved + often * touched
    return Work(moment, counted["forward"], counted["backward"], round(tokens), flops, moved, time.total, time.bound)


def _phase_seconds(
    scene: Scene, phase: Phase, work: Iterable[Work], streams: Iterable[Flow], beside: Mapping[str, float]
) -> float:
    """Roles one after the other, those on another processor beside them, and the transfers that nothing hides."""
    here = away = 0.0
    for each in work:
        if each.moment.phase == phase:
            left = each.seconds - (beside.get(each.moment.role, 0.0) if phase == "score" else 0.0)
            if _works_alone(scene, each.moment.role):
                away += left
            else:
                here += left
    waited = sum(each.seconds for each in streams if each.phase == phase and not each.hidden)
    return max(here, away) + waited


def _works_alone(scene: Scene, role: str) -> bool:
    """Whether nobody waits until a role has scored: a service always, the host's processor beside sampling."""
    alone = residency(scene, role) == "service" or scene.config.sampling.overlap_scoring
    return alone and elsewhere(scene, role)


def _beside_sampling(scene: Scene, work: Iterable[Work]) -> dict[str, float]:
    """Seconds of scoring that `sampling.overlap_scoring` hides behind sampling, by role.

    All sampling batches but the last can be scored while the next is sampled. Roles on another processor have it for
    themselves; on a GPU the others have the products that decoding, which waits for memory, leaves free; on a CPU
    sampling and scoring share the cores, and nothing is hidden.
    """
    batches, _ = decoding_steps(scene)
    if not scene.config.sampling.overlap_scoring or batches == 1:
        return {}
    device, early = scene.cluster.device, (batches - 1) / batches
    sampling = [each for each in work if each.moment.phase == "generate"]
    products = sum(each.flops for each in sampling) / reached_flops(device, scene.compute, few_rows=True)
    room = {True: early * sum(each.seconds for each in sampling)}
    room[False] = max(room[True] - early * products, 0.0) if SHARES[device.kind].queues else 0.0
    hidden: dict[str, float] = {}
    for each in work:
        role = each.moment.role
        if each.moment.phase == "score" and role in FROZEN:
            away = elsewhere(scene, role)
            hidden[role] = min(early * each.seconds, room[away])
            room[away] -= hidden[role]
    return hidden
