"""The bill against numbers worked out by hand: weights, gradients, states, caches, and what a layer keeps."""

from __future__ import annotations

import subprocess
import sys
from dataclasses import replace

import pytest

from fourfold.planner.architectures import Architecture, find_architecture
from fourfold.planner.architectures.decoder import Experts
from fourfold.planner.bill import Footprint, Moment
from fourfold.planner.footprint import footprint
from fourfold.planner.footprint.passes import Below, Lesson, Texts, learned, sampled
from fourfold.planner.footprint.roles import cast_of
from fourfold.planner.hardware.machine import Device
from planner.small_scenes import CPU, GPU, architecture, scene

CRITIC, ACTOR, SAMPLING = Moment("learn", "critic"), Moment("learn", "actor"), Moment("generate", "actor")
# Of scenes.architecture(): projections 16 x 8 x (2 + 2 + 1 + 1), a gated MLP 3 x 16 x 24, two norms.
LAYER = 16 * 8 * 6 + 3 * 16 * 24 + 2 * 16
TABLE = 100 * 16
POLICY = 4 * LAYER + 2 * TABLE + 16  # with embedding, language head and final norm
DEEP = architecture(layers=8)  # enough layers that their slope is taken from two runs of fewer
SCORER = 4 * LAYER + TABLE + 16 + 17  # with embedding, norm, and a head of 16 weights and a bias


def of(bill: Footprint, holder: str, kind: str, moment: Moment, tier: str = "device") -> int:
    return sum(
        item.bytes
        for item in bill.items
        if (item.holder, item.kind, item.tier) == (holder, kind, tier) and moment in item.moments
    )


# --- what is held -----------------------------------------------------------------------------------------------------


def test_four_separate_models_in_float32() -> None:
    bill = footprint(scene())
    assert of(bill, "actor", "weights", CRITIC) == 4 * POLICY
    assert of(bill, "critic", "weights", CRITIC) == 4 * SCORER
    assert of(bill, "reward", "weights", CRITIC) == 4 * SCORER
    # Published weights are bfloat16, which holds the reference's matrices exactly; head and norms stay float32.
    vectors = (2 * 4 + 1) * 16
    matrices = POLICY - TABLE - vectors
    assert of(bill, "reference", "weights", CRITIC) == 2 * matrices + 4 * (TABLE + vectors)
    assert of(bill, "actor", "optimizer", SAMPLING) == 8 * POLICY
    assert of(bill, "critic", "optimizer", SAMPLING) == 8 * SCORER


PARTS = ['reward.source="combined"', 'critic.init="actor"', 'reward.parts.short.source="function"']
PARTS += [
    'reward.parts.short.function="m:f"',
    'reward.parts.tone.source="http"',
    'reward.parts.tone.url="http://a:1/x"',
]


def test_parts_without_a_model_hold_nothing_and_each_model_of_a_part_its_own() -> None:
    """Rules, functions and services cost no bytes; a classifier's are added to those of the run's own reward model."""
    function = footprint(scene('reward.source="function"', 'reward.function="m:f"', 'critic.init="actor"'))
    assert footprint(scene(*PARTS)).items == function.items
    own = footprint(scene(*PARTS, 'reward.parts.liked.source="trained"', 'reward.parts.liked.checkpoint="unused"'))
    alone = footprint(scene())
    assert of(own, "reward", "weights", CRITIC) == of(alone, "reward", "weights", CRITIC) == 4 * SCORER
    judge = architecture(layers=2)
    one = 4 * (2 * LAYER + TABLE + 16 + 17)
    for count, model in ((1, "a/b"), (2, "a/c")):  # two labels of one model, and two models
        classifiers = [
            f"reward.parts.{name}.{key}"
            for name, of_part in (("tone", "a/b"), ("other", model))
            for key in ('source="model"', f'model="{of_part}"', f"label.{name}=1.0")
        ]
        both = scene(
            *PARTS[:4], *classifiers, 'reward.parts.liked.source="trained"', 'reward.parts.liked.checkpoint="unused"'
        )
        theirs = {"reward.parts.tone": judge, "reward.parts.other": judge}
        found = footprint(replace(both, models={**both.models, **theirs}))
        assert of(found, "reward", "weights", CRITIC) == 4 * SCORER + count * one
    # They work one after the other: no more is alive in the moment of scoring than in the fullest of them.
    kinds = ("activations", "buffers", "logits")
    moment = Moment("score", "reward")
    assert [of(found, "reward", kind, moment) for kind in kinds] == [of(own, "reward", kind, moment) for kind in kinds]


def test_in_half_precision_masters_and_moments_stay_float32_and_the_sampler_has_a_copy() -> None:
    bill = footprint(scene('precision.compute="bfloat16"'))
    assert of(bill, "actor", "masters", CRITIC) == 4 * POLICY
    vectors = (2 * 4 + 1) * 16
    sampling = Moment("generate", "actor")
    assert of(bill, "actor", "weights", sampling) == 2 * (POLICY - vectors) + 4 * vectors
    assert not of(bill, "actor", "weights", CRITIC), "every rollout makes the copy anew"
    assert of(bill, "reward", "weights", CRITIC) == 2 * (SCORER - vectors - 17) + 4 * (vectors + 17)
    assert of(bill, "actor", "optimizer", CRITIC) == 8 * POLICY


def test_over_a_trunk_roles_hold_their_own_layers_alone() -> None:
    bill = footprint(scene('sharing.mode="trunk"', "trunk.branch_layers=1"))
    own = LAYER + 16
    assert of(bill, "trunk", "weights", CRITIC) == 4 * (3 * LAYER + TABLE) + 4 * TABLE
    assert of(bill, "actor", "weights", CRITIC) == 4 * own
    assert of(bill, "critic", "weights", CRITIC) == 4 * (own + 17)
    # The rollout's 8 x 16 tokens, and those of the micro-batch: here all; a third time selected to be learned from.
    cache = 8 * 16 * 16 * 4
    assert of(bill, "trunk", "trunk cache", Moment("score", "critic")) == 2 * cache
    assert of(bill, "trunk", "trunk cache", CRITIC) == 3 * cache


def test_adapters_are_all_that_is_trained() -> None:
    bill = footprint(scene('sharing.mode="adapters"', "adapters.rank=2"))
    inputs_and_outputs = (16 + 16) + 2 * (16 + 8) + (16 + 16) + 3 * (16 + 24)
    adapters = 4 * 2 * inputs_and_outputs
    assert of(bill, "base", "weights", CRITIC) == 4 * POLICY
    assert of(bill, "actor", "weights", CRITIC) == 4 * adapters
    assert of(bill, "critic", "optimizer", CRITIC) == 8 * (adapters + 17)


def test_gradients_of_one_role_at_a_time_and_of_both_in_float16() -> None:
    several = "ppo.micro_batch_size=4"
    bill = footprint(scene(several))
    assert of(bill, "critic", "gradients", CRITIC) == 4 * SCORER
    assert of(bill, "actor", "gradients", ACTOR) == 4 * POLICY
    both = footprint(scene(several, 'precision.compute="float16"'))
    assert of(both, "actor", "gradients", ACTOR) == 4 * (POLICY + SCORER)


@pytest.mark.parametrize(("device", "tier"), [(CPU, "disk"), (GPU, "host")])
def test_what_is_parked_lies_below_the_device(device: Device, tier: str) -> None:
    settings = ('reference.residency="park"', 'memory.optimizer_residency="park"')
    kept, parked = footprint(scene(device=device)), footprint(scene(*settings, device=device))
    whole = of(kept, "reference", "weights", CRITIC)
    assert of(parked, "reference", "weights", CRITIC) == 0
    assert of(parked, "reference", "weights", Moment("score", "reference")) == whole
    assert of(parked, "reference", "weights", CRITIC, tier) == whole
    assert of(parked, "actor", "optimizer", SAMPLING) == 0
    assert of(parked, "actor", "optimizer", SAMPLING, tier) == 8 * POLICY


def test_a_role_on_the_host_computes_there_with_a_copy_of_what_is_shared() -> None:
    trunk = ('sharing.mode="trunk"', "trunk.branch_layers=1")
    bill = footprint(scene(*trunk, 'reward.residency="cpu"', device=GPU))
    assert not [item for item in bill.items if item.holder == "reward" and item.tier == "device"]
    own = LAYER + 16 + 17
    assert of(bill, "reward", "weights", CRITIC, "host") == 4 * (own + 3 * LAYER + 2 * TABLE)
    assert of(bill, "reward", "activations", Moment("score", "reward"), "host") > 0


def test_a_role_at_a_service_is_nowhere() -> None:
    bill = footprint(scene('reward.residency="service"', 'service.url="http://127.0.0.1:1"'))
    assert not [item for item in bill.items if item.holder == "reward"]


def test_another_reference_brings_its_own_weights_and_reads_ids() -> None:
    of_another = 4 * (2 * LAYER + 2 * TABLE + 16)
    still = footprint(scene('sharing.mode="trunk"', "trunk.branch_layers=1"))  # whose reference is the actor at step 0
    for log_step_0, beside in (("false", 0), ("true", of(still, "reference", "weights", CRITIC))):
        settings = ("trunk.branch_layers=1", 'reference.model="other"', f"reference.log_step_0={log_step_0}")
        given = scene('sharing.mode="trunk"', *settings)
        models = {**given.models, "reference": architecture(layers=2)}
        bill = footprint(type(given)(given.config, models, given.cluster, given.lengths))
        assert of(bill, "reference", "weights", CRITIC) == of_another + beside


def test_a_uniform_prior_costs_no_weights_and_one_that_moves_what_the_actor_does() -> None:
    for sharing in ('"none"', '"trunk"', '"adapters"'):
        given = (f"sharing.mode={sharing}", 'precision.compute="bfloat16"', "reference.log_step_0=false")
        uniform = footprint(scene(*given, 'reference.prior="uniform"'))
        assert not [item for item in uniform.items if item.holder == "reference"]
        moving = footprint(scene(*given, 'reference.prior="moving"'))
        assert of(moving, "reference", "weights", CRITIC) == of(moving, "actor", "masters", CRITIC) > 0
        both = footprint(scene(*given[:2], 'reference.prior="uniform"'))
        still = footprint(scene(*given[:2]))
        assert of(both, "reference", "weights", CRITIC) == of(still, "reference", "weights", CRITIC) > 0


# --- what passes ------------------------------------------------------------------------------------------------------


def test_the_cache_has_room_for_all_tokens_from_the_prompts_on() -> None:
    role = cast_of(scene(model=DEEP)).actor
    stages = sampled(role, None, Texts(8, 6, 10, padded=False))
    keys = 8 * (6 + 10) * 8 * 4  # rows, tokens, one head of 8, float32
    for stage in ("prompts", "last token"):
        assert stages[stage]["KV cache"].bytes == 8 * 2 * keys
        assert stages[stage]["KV cache"].a_layer == 2 * keys


def layer_slope(*overrides: str) -> int:
    """Bytes that another layer keeps for the backward pass of the critic."""
    role = cast_of(scene(*overrides, model=DEEP)).critic
    return learned(role, Texts(8, 6, 10, padded=False), Below(), Lesson(False, True))["head"]["activations"].a_layer


TOKENS = 8 * (6 + 10 - 1)


def test_what_a_llama_layer_keeps_in_float32() -> None:
    """Of each norm its input, normed and weighted numbers; queries, keys, values and their sums; four of the MLP."""
    norms = 2 * (3 * 16 + 1)
    attention = 16 + 8 + 8 + 16 + 2  # logsumexp: one number a head
    assert layer_slope() == 4 * TOKENS * (norms + attention + 4 * 24)


def test_in_bfloat16_norms_keep_their_input_wide_and_every_product_a_cast_of_its_own() -> None:
    """Llama's norm gives float32, because its weight is: queries, keys, values, gate and up each cast that again."""
    attention_norm = 4 * 16 + 2 * 16 + 4 * 1 + 3 * 2 * 16
    mlp_norm = 4 * 16 + 2 * 16 + 4 * 1 + 2 * 2 * 16
    attention = 2 * (16 + 8 + 8 + 16) + 4 * 2
    mlp = 2 * 4 * 24
    assert layer_slope('precision.compute="bfloat16"') == TOKENS * (attention_norm + mlp_norm + attention + mlp)


def test_a_checkpointed_layer_keeps_its_input() -> None:
    assert layer_slope('memory.checkpointing="layers"') == 4 * TOKENS * 16


def test_offloaded_activations_lie_below_the_device() -> None:
    assert layer_slope("memory.activation_offload=true") == 0
    bill = footprint(scene("memory.activation_offload=true"))
    moved = of(bill, "critic", "activations", CRITIC, "disk")
    assert moved > 4 * layer_slope()


def test_padding_costs_a_mask_and_repeated_keys() -> None:
    """One mask in numbers a layer; transformers repeats grouped keys and values for it."""
    role = cast_of(scene(model=DEEP)).critic
    padded = learned(role, Texts(8, 6, 10, padded=True), Below(), Lesson(False, True))["head"]["activations"].a_layer
    assert padded - layer_slope() == 4 * 8 * 15 * 15 + 4 * TOKENS * 2 * 8


@pytest.mark.parametrize("name", ["llama-2-7b", "gemma-2-9b", "opt-6.7b", "mixtral-8x7b", "deepseek-v2-lite", "gpt2"])
def test_every_family_has_a_bill_with_all_its_parameters(name: str) -> None:
    """Experts, latent attention, windows and OPT, which no run of ours loads, in a plan all the same."""
    model = find_architecture(name).architecture
    bill = footprint(scene('precision.compute="bfloat16"', model=model, rows=2, prompt=16, response=16, device=GPU))
    assert of(bill, "actor", "masters", CRITIC) == 4 * model.parameters()
    assert of(bill, "actor", "optimizer", CRITIC) == 8 * model.parameters()
    cached = of(bill, "actor", "KV cache", SAMPLING)
    assert cached == 0 or 2 * model.cache_bytes(31, 2) <= cached <= 2.2 * model.cache_bytes(32, 2)


def test_experts_are_passed_by_the_tokens_that_they_are_given() -> None:
    """Of 4 experts that hold four times the weights, each token passes through 1: as many activations as one MLP's."""
    one = architecture(layers=8, experts=Experts(1, 1, 24), intermediate=0)
    four = architecture(layers=8, experts=Experts(4, 1, 24), intermediate=0)

    def kept(model: Architecture) -> int:
        role = cast_of(scene(model=model)).critic
        return learned(role, Texts(8, 6, 10, padded=False), Below(), Lesson(False, True))["head"]["activations"].a_layer

    router = 4 * TOKENS * 3  # three more chances a token
    assert kept(four) - kept(one) == router
    held = [of(footprint(scene(model=each)), "critic", "weights", CRITIC) for each in (one, four)]
    assert held[1] - held[0] == 8 * 4 * 3 * (3 * 16 * 24 + 16)


def test_the_bill_is_made_without_torch() -> None:
    code = "import sys; import fourfold.planner.footprint; sys.exit('torch' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code]).returncode == 0
