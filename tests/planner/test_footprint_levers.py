"""More to hold is never less, and every declared lever lowers, or at least never raises, what it says it saves."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterable

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from fourfold.planner.architectures import find_architecture
from fourfold.planner.bill import TIERS, Footprint, Item, Moment
from fourfold.planner.footprint import footprint, passes
from fourfold.planner.footprint.roles import cast_of
from fourfold.planner.lever import Lever
from fourfold.planner.levers import LEVERS, lever
from fourfold.planner.rounded_roles import REFERENCES, REWARDS
from fourfold.planner.scene import Scene
from planner.scenes import A100
from planner.small_scenes import CPU, GPU, architecture, scene

SHARING = (('sharing.mode="none"',), ('sharing.mode="trunk"',), ('sharing.mode="adapters"',))
TRAINED = ('sharing.mode="trunk"', "trunk.train=true")
Saved = Callable[[Footprint], int]


def overrides(given: Iterable[tuple[str, object]]) -> list[str]:
    return [f"{key}={json.dumps(value)}" for key, value in given]


@settings(max_examples=25, deadline=None)
@given(
    sharing=st.sampled_from(SHARING),
    rows=st.integers(1, 6),
    prompt=st.integers(1, 12),
    response=st.integers(2, 12),
    layers=st.integers(3, 9),
    more=st.sampled_from(["rows", "prompt", "response", "layers"]),
)
def test_more_is_never_less(sharing: str, rows: int, prompt: int, response: int, layers: int, more: str) -> None:
    size = {"rows": rows, "prompt": prompt, "response": response, "layers": layers}

    def bill(size: dict[str, int]) -> Footprint:
        model = architecture(layers=size["layers"])
        return footprint(
            scene(*sharing, model=model, rows=size["rows"], prompt=size["prompt"], response=size["response"])
        )

    less, greater = bill(size), bill({**size, more: size[more] + 1})
    for moment in less.moments:
        for tier in TIERS:
            assert less.held(moment, tier) <= greater.held(moment, tier), f"{moment} on the {tier}"


@settings(max_examples=20, deadline=None)
@given(
    layers=st.integers(3, 14), every=st.integers(1, 3), kind=st.sampled_from(["none", "layers", "attention"]),
    sharing=st.sampled_from([*SHARING, TRAINED]), half=st.booleans(), offload=st.booleans(),
)  # fmt: skip
def test_many_layers_follow_from_few(
    layers: int, every: int, kind: str, sharing: tuple[str, ...], half: bool, offload: bool
) -> None:
    """Two runs of a few layers and a straight line give what a run of all layers does, stage by stage."""
    given = [*sharing, f'precision.compute="{"bfloat16" if half else "float32"}"']
    given += [f'memory.checkpointing="{kind}"', f"memory.checkpoint_every={every}"] if kind != "none" else []
    given += ["memory.activation_offload=true"] if offload else []
    follows_from_few(scene(*given, model=architecture(layers=layers), rows=3))


def test_a_fullest_moment_that_moves_with_depth_bends_the_line() -> None:
    """Few rows of a model with a large vocabulary, and nothing kept of its layers."""
    model = find_architecture("smollm2-135m").architecture
    given = [*TRAINED, 'precision.compute="bfloat16"', "trunk.branch_layers=4", "ppo.micro_batch_size=1"]
    given += ['memory.checkpointing="layers"', "memory.activation_offload=true"]
    follows_from_few(scene(*given, model=model, rows=32, prompt=256, response=256, device=A100))


def follows_from_few(what: Scene) -> None:
    by_line = footprint(what)
    with pytest.MonkeyPatch.context() as patch:
        forget()
        patch.setattr(passes, "at_depth", lambda run, layers, period=1: run(layers))
        by_all_layers = footprint(what)
    forget()
    for moment in by_all_layers.moments:
        for tier in TIERS:
            assert by_line.held(moment, tier) == by_all_layers.held(moment, tier), f"{moment} on the {tier}"


def forget() -> None:
    for each in (passes._scored, passes._sampled, passes.learned, passes.joint, passes.compared):
        each.cache_clear()


# --- levers -----------------------------------------------------------------------------------------------------------


def peak(*phases: str) -> Saved:
    return lambda bill: max(bill.held(moment) for moment in bill.moments if not phases or moment.phase in phases)


def always(wanted: Callable[[Item], bool]) -> Saved:
    """Bytes of some items at the moment in which most of them is there."""
    return lambda bill: max(
        sum(item.bytes for item in bill.items if item.tier == "device" and moment in item.moments and wanted(item))
        for moment in bill.moments
    )


def of_role(role: str) -> Saved:
    return always(lambda item: item.holder == role)


def but_in_score(role: str) -> Saved:
    def held(bill: Footprint) -> int:
        moment = Moment("learn", "actor")
        return sum(i.bytes for i in bill.items if i.holder == role and i.tier == "device" and moment in i.moments)

    return held


FROZEN = always(lambda item: item.holder in ("trunk", "base", "reference", "reward") and item.kind == "weights")
SAVES: dict[str, Saved] = {
    "trunk": peak(),
    "trained trunk": peak("generate", "score"),  # in learn one pass has the activations of both
    "adapters": peak(),
    "adapters over a trunk": peak(),
    "checkpointing": peak("learn"),
    "checkpointing attention": peak("learn"),
    "checkpointing every second layer": peak("learn"),
    "activation offload": peak("learn"),
    "micro-batches": always(lambda item: item.kind in ("activations", "logits")),
    "park reference": but_in_score("reference"),
    "park reward": but_in_score("reward"),
    "stream reference": of_role("reference"),
    "stream reward": of_role("reward"),
    "service reference": of_role("reference"),
    "service reward": of_role("reward"),
    "park optimizer": peak("generate", "score", "learn"),
    "offload optimizer": peak("generate", "score", "learn"),
    "optimizer in backward": always(lambda item: item.kind == "gradients"),
    "overlap scoring": peak("score"),
    "sampling batches": peak("generate"),
    "adamw_8bit": always(lambda item: item.kind == "optimizer"),
    "bfloat16": FROZEN,
    "float16": FROZEN,
    "half-precision frozen roles": FROZEN,
    "int8 base": FROZEN,
    "int8 dynamic base": FROZEN,
    "nf4 base": FROZEN,
    **dict.fromkeys(REFERENCES, of_role("reference")),
    **dict.fromkeys(REWARDS, of_role("reward")),
    "llama.cpp reference": of_role("reference"),
    "sdpa attention": peak("learn"),
    "flash attention": peak("learn"),
    "flex attention": peak("learn"),
    "ONNX int8 reward": of_role("reward"),
    "reference on the CPU": of_role("reference"),
    "reward on the CPU": of_role("reward"),
    "paged_adamw": always(lambda item: item.kind == "optimizer"),
    "paged_adamw_8bit": always(lambda item: item.kind == "optimizer"),
}
# What saves nothing of what is named above on a float32 run: the reference is held in bfloat16 there already. A reward
# model of which only the name is known has no bytes in the bill, and moments that page stay in it.
NOTHING_HERE = {"overlap scoring", "int8 reference", "int8 dynamic reference", "ONNX int8 reward", "paged_adamw"}
# What has to be on for a lever to be felt: the log-probs of a whole micro-batch would be the fullest of generate.
BESIDE = {
    "sampling batches": ["ppo.micro_batch_size=1"],
    "ONNX int8 reward": ['reward.model="unused"'],
}


def test_every_lever_is_here() -> None:
    assert SAVES.keys() == {each.name for each in LEVERS}


@pytest.mark.parametrize("each", LEVERS, ids=lambda each: each.name)
def test_a_lever_lowers_what_it_says_it_saves(each: Lever) -> None:
    model = architecture(layers=6, hidden=128, heads=4, kv_heads=2, head_dim=32, intermediate=256, vocabulary=64)
    sizes = ["ppo.rollout_batch_size=8", "ppo.mini_batch_size=8", "ppo.micro_batch_size=8"]
    url = ['service.url="http://127.0.0.1:1"'] if "service" in each.name else []
    base = [*sizes, *BESIDE.get(each.name, []), *overrides({"sharing.mode": "none", **each.baseline}.items())]
    where = GPU if each.only_on == "cuda" else CPU
    without = footprint(scene(*base, model=model, prompt=16, response=32, device=where))
    having = [*base, *overrides(each.settings.items()), *url]
    having = footprint(scene(*having, model=model, prompt=16, response=32, device=where))
    saved = SAVES[each.name]
    assert saved(having) <= saved(without)
    if each.name not in NOTHING_HERE:
        assert saved(having) < saved(without), "it acts"


def test_a_streamed_role_has_two_layers_in_its_moment() -> None:
    each, model = lever("stream reward"), architecture(layers=10)
    bill = footprint(scene(*overrides(each.settings.items()), model=model))
    [streamed] = [i for i in bill.items if i.holder == "reward" and i.kind == "weights" and i.tier == "device"]
    layer = 16 * 8 * 6 + 3 * 16 * 24 + 2 * 16
    assert streamed.moments == {Moment("score", "reward")}
    assert streamed.bytes == 4 * (2 * layer + 100 * 16 + 16 + 17)


@pytest.mark.parametrize(
    "levers",
    [
        ('memory.checkpointing="layers"',),
        ('memory.checkpointing="layers"', "memory.checkpoint_every=2"),
        ('memory.checkpointing="attention"',),
        ("memory.activation_offload=true",),
    ],
    ids=" ".join,
)
def test_what_levers_do_to_backward_passes_leaves_the_others_as_they_are(levers: tuple[str, ...]) -> None:
    """So these are run once for all such settings; run with them they come out the same."""
    deep, texts = architecture(layers=16), passes.Texts(4, 8, 8, True)
    cast, plain = cast_of(scene(*levers, model=deep)), cast_of(scene(model=deep))
    assert cast.actor != plain.actor
    for role in (cast.actor, cast.critic):
        inner = passes._scored.__wrapped__(role, texts, passes.Below())
        assert inner == passes.scored(role, texts, passes.Below())
    assert passes._sampled.__wrapped__(cast.actor, None, texts) == passes.sampled(plain.actor, None, texts)
