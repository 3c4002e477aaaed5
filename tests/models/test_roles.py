"""What the four roles read out of a batch: the index law, the scored position, frozen copies and shared tensors."""

from __future__ import annotations

import copy
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from transformers import AutoModelForCausalLM

from fourfold.algorithms.masking import last_index
from fourfold.batch import Rollout
from fourfold.models.assembly import FourModels, assemble, record_for
from fourfold.models.heads import LanguageHead, ScalarHead
from fourfold.models.roles import (
    Activations,
    Policy,
    Scorer,
    checksum,
    copy_policy,
    freeze,
    make_trainable,
    scorer_on,
)
from fourfold.models.split import Part, cut
from fourfold.models.storage import save_role
from tiny import EOS, FAMILIES, tiny_directory, tiny_model
from tiny_roles import MODES, activations_of, oracle_log_probs, tiny_base, tiny_config, tiny_rollout

LENGTHS = [(3, 4), (6, 1), (1, 5), (4, 2)]
LAST_CUT = 3


def whole(base_path: Path) -> Any:
    return AutoModelForCausalLM.from_pretrained(base_path)


def random_scorer(policy: Policy, seed: int = 0) -> Scorer:
    scorer = scorer_on(policy)
    generator = torch.Generator().manual_seed(seed)
    for parameter in scorer.head.parameters():
        parameter.data.copy_(torch.randn(parameter.shape, generator=generator))
    return scorer


def column_scorer() -> Scorer:
    """A scorer whose value at a position is the first number of its activation: its layers add nothing."""
    model = tiny_model("gpt2")
    branch = cut(model, 2, 4, compute_dtype=torch.float32)
    body: Any = branch.body
    for block in body.h:
        for projection in (block.attn.c_proj, block.mlp.c_proj):
            nn.init.zeros_(projection.weight)
            nn.init.zeros_(projection.bias)
    body.ln_f = nn.Identity()
    head = ScalarHead(32)
    head.linear.weight.data[0, 0] = 1.0
    return Scorer(branch, head)


def carrying(numbers: Tensor, mask: Tensor) -> Activations:
    """Activations whose first number is given."""
    inputs = torch.zeros(*mask.shape, 32)
    inputs[..., 0] = numbers
    return Activations(inputs, mask)


def columns(mask: Tensor) -> Tensor:
    return torch.arange(mask.shape[1]).expand(mask.shape)


# --- index law --------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("family", ["llama", "gpt2", "gemma"])
@pytest.mark.parametrize("temperature", [1.0, 0.7])
@torch.no_grad()
def test_log_probs_are_those_of_the_whole_model_one_position_before(
    tmp_path: Path, family: str, mode: str, temperature: float
) -> None:
    """FAULTS A14, B11, B12: token t is predicted at position P + t - 1, whatever the padding."""
    base = tiny_base(tmp_path / "m", family, mode)
    rollout = tiny_rollout(LENGTHS)
    log_probs, entropy = base.policy.log_probs(activations_of(base, rollout), rollout, temperature, entropy="report")
    expected = oracle_log_probs(whole(tmp_path / "m"), rollout, temperature)
    torch.testing.assert_close(log_probs, expected, rtol=0, atol=1e-5)
    assert (log_probs[rollout.response_mask] < 0).all()
    assert not log_probs[~rollout.response_mask].any()
    assert (entropy[rollout.response_mask] > 0).all()
    assert not entropy[~rollout.response_mask].any()


@pytest.mark.parametrize("left", [0, 2])
@torch.no_grad()
def test_a_query_of_3_and_a_response_of_4_read_4_positions(left: int) -> None:
    """FAULTS B11: of [1, 2, 3 | 4, 5, 6, 7] the columns before 4, 5, 6 and 7; two left pads shift them by two."""
    rollout = tiny_rollout([(3, 4), (3 + left, 1)]).select(torch.tensor([0]))
    policy = Policy(column_scorer().branch, LanguageHead.of(tiny_model("gpt2")))
    hidden = policy.hidden_before(carrying(columns(rollout.attention_mask), rollout.attention_mask), rollout)
    assert hidden[:, 0].tolist() == [left + column for column in (2, 3, 4, 5)]


@torch.no_grad()
def test_values_are_read_where_the_logits_are() -> None:
    """FAULTS B7, B11: V of the state before each token, and of the state after the last."""
    rollout = tiny_rollout(LENGTHS)  # prompts padded to 6
    values, last = column_scorer().values_and_last(
        carrying(columns(rollout.attention_mask), rollout.attention_mask), rollout
    )
    assert values.tolist() == [[5, 6, 7, 8, 0], [5, 0, 0, 0, 0], [5, 6, 7, 8, 9], [5, 6, 0, 0, 0]]
    assert last.tolist() == [9, 6, 10, 7]


@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("family", ["llama", "gpt2"])
@torch.no_grad()
def test_values_and_scores_of_a_row_do_not_depend_on_its_padding(tmp_path: Path, family: str, mode: str) -> None:
    """FAULTS A14, B8: alone, beside a longer prompt or response; against the whole model's hidden states."""
    base = tiny_base(tmp_path / "m", family, mode)
    scorer = random_scorer(base.policy)
    model = whole(tmp_path / "m")
    body = model.transformer if family == "gpt2" else model.model
    rollout = tiny_rollout(LENGTHS)
    activations = activations_of(base, rollout)
    values, last = scorer.values_and_last(activations, rollout)
    scores = scorer.scores(activations)
    torch.testing.assert_close(scores, last, rtol=0, atol=1e-6)
    for row, (prompt, response) in enumerate(LENGTHS):
        alone = rollout.sequences[row, rollout.attention_mask[row]]
        hidden = body(alone[None]).last_hidden_state[0]
        expected = hidden @ scorer.head.linear.weight[0] + scorer.head.linear.bias[0]
        torch.testing.assert_close(values[row, :response], expected[prompt - 1 : -1], rtol=0, atol=1e-5)
        torch.testing.assert_close(scores[row], expected[-1], rtol=0, atol=1e-5)
        assert not values[row, response:].any()


# --- which position is scored -----------------------------------------------------------------------------------------


@pytest.mark.parametrize("side", ["left", "right"])
@torch.no_grad()
def test_the_score_is_that_of_the_eos_token(side: str) -> None:
    """FAULTS A7: a scorer that returns the token it stands on; 4 pads that look like EOS, 3 tokens and EOS."""
    real = [9, 8, 7, EOS]
    padding = [EOS] * 4
    ids = torch.tensor([padding + real if side == "left" else real + padding, [11, 12, 13, 14, 15, 16, 17, 18]])
    mask = torch.tensor([[side == "right"] * 4 + [side == "left"] * 4, [True] * 8])
    ids[0, mask[0]] = torch.tensor(real)
    assert column_scorer().scores(carrying(ids, mask)).tolist() == [EOS, 18]


@torch.no_grad()
def test_the_scored_position_is_that_of_the_last_real_token() -> None:
    """FAULTS B7: [pad, pad, token, EOS, pad] is scored at 3, though pad may be EOS too."""
    mask = torch.tensor([[0, 0, 1, 1, 0], [1, 1, 1, 1, 1], [1, 0, 0, 0, 0], [0, 0, 0, 0, 1]], dtype=torch.bool)
    assert last_index(mask).tolist() == [3, 4, 0, 4]
    assert column_scorer().scores(carrying(columns(mask), mask)).tolist() == [3, 4, 0, 4]


def test_scale_and_shift_standardise_a_score_and_are_not_trained() -> None:
    scorer = column_scorer()
    scorer.head.scale.fill_(0.5)
    scorer.head.shift.fill_(-1.0)
    make_trainable(scorer, with_language_head=False)
    mask = torch.ones(1, 5, dtype=torch.bool)
    assert scorer.scores(carrying(columns(mask), mask)).item() == 0.5 * 4 - 1
    assert {name for name, _ in scorer.head.named_parameters()} == {"linear.weight", "linear.bias"}


# --- frozen copies ----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("family", FAMILIES)
def test_a_frozen_copy_computes_bit_for_bit_what_the_trained_role_computes(
    family: str, dtype: torch.dtype, mode: str
) -> None:
    """KL is exactly 0 at step 0, also where masters are float32 and the copy is bfloat16."""
    model = tiny_model(family)
    start = LAST_CUT if mode == "trunk" else 0
    actor = Policy(cut(model, start, 4, compute_dtype=dtype), LanguageHead.of(model))
    reference = copy_policy(actor, share_head=False)
    reward = random_scorer(actor)
    critic = copy.deepcopy(reward)
    freeze(reference)
    freeze(reward)
    for role in (actor, critic):
        make_trainable(role, with_language_head=mode == "none")
    rollout = tiny_rollout([(3, 4), (5, 2)])
    inputs = rollout.sequences
    if mode == "trunk":
        inputs = torch.randn(*inputs.shape, 32, generator=torch.Generator().manual_seed(1)).to(dtype)
    activations = Activations(inputs, rollout.attention_mask)
    trained, _ = actor.log_probs(activations, rollout, 1.0)
    frozen, _ = reference.log_probs(activations, rollout, 1.0)
    assert trained.requires_grad and not frozen.requires_grad
    assert torch.equal(trained, frozen)
    assert torch.equal(critic.branch(inputs, activations.mask), reward.branch(inputs, activations.mask))
    # A product with one column takes another kernel where its weight wants gradients.
    torch.testing.assert_close(
        critic.values(activations, rollout), reward.values(activations, rollout), rtol=0, atol=1e-5
    )
    assert {p.dtype for p in reference.parameters() if p.ndim >= 2} == {dtype}
    assert {p.dtype for p in actor.parameters()} == {torch.float32}


@pytest.mark.parametrize("mode", MODES)
def test_only_actor_and_critic_get_gradients(tmp_path: Path, mode: str) -> None:
    models = four_models(tmp_path, mode)
    rollout = tiny_rollout(LENGTHS)
    activations = activations_of(models.base, rollout)
    loss = torch.zeros(())
    for policy in (models.actor, models.reference):
        loss = loss + policy.log_probs(activations, rollout, 1.0)[0].sum()
    for scorer in (models.critic, models.reward):
        assert isinstance(scorer, Scorer)
        loss = loss + scorer.values(activations, rollout).sum() + scorer.scores(activations).sum()
    loss.backward()
    frozen = [module for module in (models.reference, models.reward, models.base.trunk) if module is not None]
    assert all(p.grad is None for module in frozen for p in module.parameters())
    for trained in (models.actor.branch, models.critic):
        assert all(p.grad is not None for p in trained.parameters())
    assert (models.actor.head.weight.grad is None) == (mode == "trunk")


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_the_checksum_notices_one_changed_bit(dtype: torch.dtype) -> None:
    part = cut(tiny_model("gpt2"), 0, 2, compute_dtype=dtype).to(dtype)
    before = checksum([part])
    assert checksum([copy.deepcopy(part)]) == before
    body: Any = part.body
    weight = body.h[1].mlp.c_fc.weight.data
    bits = weight.view(torch.int32 if dtype == torch.float32 else torch.int16)
    bits[3, 5] ^= 1
    assert checksum([part]) != before
    bits[3, 5] ^= 1
    assert checksum([part]) == before


def test_the_checksum_covers_buffers_and_every_module() -> None:
    scorer = column_scorer()
    part = scorer.branch
    before = checksum([part, scorer])
    scorer.head.shift += 1e-3
    assert checksum([part, scorer]) != before


# --- shared and separate tensors --------------------------------------------------------------------------------------


def four_models(path: Path, mode: str, family: str = "llama") -> FourModels:
    base = tiny_base(path / "m", family, mode)
    config = tiny_config(path / "m", mode)
    save_role(path / "reward", random_scorer(base.policy), record_for(config, "scorer"))
    return assemble(config, base, None, path / "reward")


def unique_bytes(*modules: nn.Module | None) -> int:
    parameters = [p for module in modules if module is not None for p in module.parameters()]
    return sum({p.untyped_storage().data_ptr(): p.untyped_storage().nbytes() for p in parameters}.values())


def size(module: nn.Module) -> int:
    return sum(p.numel() * p.element_size() for p in module.parameters())


@pytest.mark.parametrize("family", ["llama", "gpt2"])
def test_a_shared_trunk_is_there_once(tmp_path: Path, family: str) -> None:
    """FAULTS D7 (its kind): one copy of the trunk and of the language head, a branch of its own for each role."""
    models = four_models(tmp_path, "trunk", family)
    trunk, head = models.base.trunk, models.actor.head
    assert trunk is not None
    assert models.reference.head.weight is head.weight
    roles = (models.actor, models.critic, models.reference, models.reward)
    tied = 0 if family == "llama" else size(head)  # GPT-2's head is its embedding, which the trunk holds
    scalar = (32 + 1) * 4
    expected = size(trunk) + size(head) - tied + 4 * size(models.actor.branch) + 2 * scalar
    assert unique_bytes(trunk, *roles) == expected


@pytest.mark.parametrize("family", ["llama", "gpt2"])
def test_separate_models_share_no_tensor(tmp_path: Path, family: str) -> None:
    models = four_models(tmp_path, "none", family)
    roles = [models.actor, models.critic, models.reference, models.reward]
    assert models.base.trunk is None and None not in roles
    seen = [{p.untyped_storage().data_ptr() for p in role.parameters()} for role in roles if role is not None]
    assert len(set.union(*seen)) == sum(map(len, seen))
    model = whole(tmp_path / "m")
    policies = unique_bytes(models.actor, models.reference)
    assert policies == 2 * sum(p.numel() * 4 for p in model.parameters())


@pytest.mark.parametrize("mode", MODES)
@torch.no_grad()
def test_reference_log_probs_have_the_policys_shape_and_value(tmp_path: Path, mode: str) -> None:
    """FAULTS D5, C9: at step 0 the reference is the actor to the bit, tempered like it."""
    models = four_models(tmp_path, mode)
    rollout = tiny_rollout(LENGTHS)
    activations = activations_of(models.base, rollout)
    actor, _ = models.actor.log_probs(activations, rollout, 0.7)
    reference, _ = models.reference.log_probs(activations, rollout, 0.7)
    assert actor.shape == reference.shape == rollout.response_mask.shape
    assert torch.equal(actor, reference)


@pytest.mark.parametrize("mode", MODES)
@torch.no_grad()
def test_a_model_may_have_more_rows_than_its_tokenizer(tmp_path: Path, mode: str) -> None:
    """FAULTS L8: the rows stay, the pad id is one of them in all four models, and KL at step 0 is 0."""
    tiny_directory(tmp_path / "m", vocab_size=192)
    models = four_models(tmp_path, mode)
    assert len(models.base.tokenizer) == 160
    for policy in (models.actor, models.reference):
        assert policy.head.weight.shape[0] == 192
    assert models.base.pad_id < 160
    rollout = tiny_rollout(LENGTHS, pad_id=models.base.pad_id)
    activations = activations_of(models.base, rollout)
    actor, _ = models.actor.log_probs(activations, rollout, 1.0)
    assert torch.equal(actor, models.reference.log_probs(activations, rollout, 1.0)[0])
    torch.testing.assert_close(actor, oracle_log_probs(whole(tmp_path / "m"), rollout), rtol=0, atol=1e-5)
    assert isinstance(models.reward, Scorer) and torch.isfinite(models.reward.scores(activations)).all()


def test_rows_of_activations_and_their_bytes() -> None:
    rollout: Rollout = tiny_rollout(LENGTHS)
    activations = carrying(columns(rollout.attention_mask), rollout.attention_mask)
    some = activations.select(torch.tensor([2, 0]))
    assert torch.equal(some.inputs, activations.inputs[[2, 0]]) and torch.equal(some.mask, activations.mask[[2, 0]])
    assert activations.bytes == 4 * 11 * 32 * 4


def test_a_new_scorer_says_0_everywhere_and_owns_its_branch() -> None:
    model = tiny_model("llama")
    policy = Policy(cut(model, LAST_CUT, 4, compute_dtype=torch.float32), LanguageHead.of(model))
    scorer = scorer_on(policy)
    mask = torch.ones(2, 4, dtype=torch.bool)
    assert scorer.scores(Activations(torch.randn(2, 4, 32), mask)).tolist() == [0.0, 0.0]
    assert isinstance(scorer.branch, Part)
    assert not {p.data_ptr() for p in scorer.branch.parameters()} & {p.data_ptr() for p in policy.parameters()}
