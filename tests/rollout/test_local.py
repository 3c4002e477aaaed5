"""The sampler draws from the policy it is given, and says so truthfully."""

from __future__ import annotations

import copy
from pathlib import Path
from typing import Any

import pytest
import torch
from scipy.stats import chisquare
from transformers import AutoModelForCausalLM

from fourfold.batch import Rollout
from fourfold.models.heads import LanguageHead
from fourfold.models.loading import Base
from fourfold.models.roles import Activations, Policy, make_trainable
from fourfold.models.split import cut
from fourfold.rollout.sampler import PromptBatch
from tiny import EOS, tiny_model, tiny_tokenizer
from tiny_roles import MODES, activations_of, forward_shapes, oracle_log_probs, random_prompts, tiny_base, tiny_sampler

LENGTHS = [3, 9, 1, 5, 9, 2]
# With one token in five ending a response, rows end at many different lengths.
MANY_EOS: dict[str, Any] = {"sampling__extra_eos_token_ids": list(range(4, 36))}


def generate(base: Base, prompts: PromptBatch | None = None, **settings: Any) -> tuple[Rollout, Activations]:
    return tiny_sampler(base, **settings).generate(prompts or random_prompts(LENGTHS), policy_version=3)


def responses(rollout: Rollout) -> list[list[int]]:
    tail = rollout.sequences[:, rollout.prompt_length :]
    return [ids[mask].tolist() for ids, mask in zip(tail, rollout.response_mask, strict=True)]


# --- log-probs and activations ----------------------------------------------------------------------------------------


@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("family", ["llama", "gpt2"])
@pytest.mark.parametrize("temperature", [1.0, 0.5])
def test_sampler_trainer_and_whole_model_agree_on_log_probs(
    tmp_path: Path, family: str, mode: str, temperature: float
) -> None:
    """FAULTS A5, A6, A10, H14: one token at a time with caches, one pass over the cache, one pass of the whole model.

    The log-probs are those of the tempered distribution.
    """
    base = tiny_base(tmp_path / "m", family, mode, **MANY_EOS)
    rollout, activations = generate(base, temperature=temperature, max_new_tokens=20)
    assert len(set(rollout.lengths.tolist())) > 2
    expected = oracle_log_probs(AutoModelForCausalLM.from_pretrained(tmp_path / "m"), rollout, temperature)
    mask = rollout.response_mask
    torch.testing.assert_close(rollout.log_probs, expected, rtol=0, atol=1e-4)
    torch.testing.assert_close(rollout.sampler_log_probs, expected, rtol=0, atol=1e-4)
    assert not rollout.log_probs[~mask].any() and not rollout.sampler_log_probs[~mask].any()
    again, _ = base.policy.log_probs(activations, rollout, temperature)
    torch.testing.assert_close(again, rollout.log_probs, rtol=0, atol=5e-6)


@pytest.mark.parametrize("family", ["llama", "gpt2", "mistral"])
def test_cached_activations_are_those_of_a_full_pass_last_token_included(tmp_path: Path, family: str) -> None:
    base = tiny_base(tmp_path / "m", family, **MANY_EOS)
    rollout, activations = generate(base)
    assert torch.equal(activations.mask, rollout.attention_mask)
    expected = activations_of(base, rollout).inputs
    torch.testing.assert_close(activations.inputs[activations.mask], expected[activations.mask], rtol=0, atol=1e-5)
    assert torch.isfinite(activations.inputs).all()
    last = rollout.prompt_length + rollout.lengths - 1
    assert activations.inputs[torch.arange(len(last)), last].abs().amax(dim=1).min() > 0.01


def test_without_a_trunk_the_roles_read_the_ids(tmp_path: Path) -> None:
    base = tiny_base(tmp_path / "m", mode="none", **MANY_EOS)
    rollout, activations = generate(base)
    assert torch.equal(activations.inputs, rollout.sequences)
    assert torch.equal(activations.mask, rollout.attention_mask)


def test_a_rollout_holds_the_prompts_it_was_given(tmp_path: Path) -> None:
    base = tiny_base(tmp_path / "m", **MANY_EOS)
    prompts = random_prompts(LENGTHS, responses_per_prompt=2)
    rollout, _ = generate(base, prompts)
    for row, tokens in enumerate(prompts.tokens):
        assert rollout.sequences[row, : rollout.prompt_length][rollout.prompt_mask[row]].tolist() == tokens
        assert rollout.prompt_mask[row].tolist() == [False] * (9 - len(tokens)) + [True] * len(tokens)
    assert rollout.prompt_id.tolist() == [0, 0, 1, 1, 2, 2, 3, 3, 4, 4, 5, 5]
    assert rollout.policy_version.tolist() == [3] * 12
    assert rollout.response_mask[:, -1].any(), "no wider than the longest response"
    unused = rollout.sequences[~rollout.attention_mask]
    assert (unused == base.pad_id).all()


# --- what a response depends on ---------------------------------------------------------------------------------------


@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("family", ["llama", "gpt2"])
def test_a_response_depends_on_prompt_and_seed_alone(tmp_path: Path, family: str, mode: str) -> None:
    """Not on the batch size, the order of the rows, or what stands beside it (float32)."""
    base = tiny_base(tmp_path / "m", family, mode, **MANY_EOS)
    prompts = random_prompts(LENGTHS, responses_per_prompt=2)
    rollout, activations = generate(base, prompts)
    expected = responses(rollout)
    for size in (1, 5):
        other, its_activations = generate(base, prompts, batch_size=size)
        assert responses(other) == expected
        torch.testing.assert_close(other.log_probs, rollout.log_probs, rtol=0, atol=1e-5)
        assert other.truncated.tolist() == rollout.truncated.tolist()
        torch.testing.assert_close(
            its_activations.inputs[activations.mask], activations.inputs[activations.mask], rtol=0, atol=1e-5
        )
    order = [7, 2, 11, 0, 1, 10, 3, 9, 8, 4, 5, 6]
    shuffled = PromptBatch(
        [prompts.tokens[i] for i in order], [prompts.prompt_ids[i] for i in order], [prompts.seeds[i] for i in order]
    )
    assert responses(generate(base, shuffled, batch_size=5)[0]) == [expected[i] for i in order]
    alone = PromptBatch(prompts.tokens[2:3], prompts.prompt_ids[2:3], prompts.seeds[2:3])
    assert responses(generate(base, alone)[0]) == expected[2:3]


def test_seeds_make_the_responses_to_one_prompt_differ(tmp_path: Path) -> None:
    base = tiny_base(tmp_path / "m")
    prompts = random_prompts([4], responses_per_prompt=8)
    drawn = responses(generate(base, prompts)[0])
    assert len(set(map(tuple, drawn))) == 8
    assert responses(generate(base, prompts)[0]) == drawn
    same = PromptBatch(prompts.tokens, prompts.prompt_ids, [7] * 8)
    assert len(set(map(tuple, responses(generate(base, same)[0])))) == 1


def test_sampling_leaves_the_global_generator_alone(tmp_path: Path) -> None:
    base = tiny_base(tmp_path / "m")
    torch.manual_seed(1)
    before = torch.random.get_rng_state()
    generate(base)
    assert torch.equal(torch.random.get_rng_state(), before)


def test_a_low_temperature_takes_the_likeliest_token(tmp_path: Path) -> None:
    base = tiny_base(tmp_path / "m", mode="none")
    prompts = random_prompts([3, 3])
    model: Any = AutoModelForCausalLM.from_pretrained(tmp_path / "m")
    ids = torch.tensor(prompts.tokens)
    greedy = model.generate(
        ids, attention_mask=torch.ones_like(ids), do_sample=False, max_new_tokens=6, eos_token_id=None, pad_token_id=0
    )[:, 3:]
    assert responses(generate(base, prompts, temperature=1e-4, max_new_tokens=6)[0]) == greedy.tolist()


# --- the distribution -------------------------------------------------------------------------------------------------


def small_base(mode: str) -> tuple[Base, Any]:
    """A vocabulary of 8 tokens, none of which ends a response but token 7."""
    model = tiny_model("llama", vocab_size=8, layers=2, hidden=16, seed=3)
    whole = copy.deepcopy(model)
    depth = 1 if mode == "trunk" else 0
    trunk = cut(model, 0, 1, compute_dtype=torch.float32) if depth else None
    policy = Policy(cut(model, depth, 2, compute_dtype=torch.float32), LanguageHead.of(model))
    return Base(tiny_tokenizer(False), model.config, trunk, policy, trunk is not None, frozenset({7}), 0), whole


@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("temperature", [1.0, 0.6])
@torch.no_grad()
def test_responses_follow_the_exact_distribution(mode: str, temperature: float) -> None:
    """6,000 responses of up to two tokens against the 7 * 8 + 1 probabilities of the whole model."""
    base, model = small_base(mode)
    prompt, rows = [4, 5, 6], 6000
    prompts = PromptBatch([prompt] * rows, [0] * rows, list(range(rows)))
    rollout, _ = generate(base, prompts, max_new_tokens=2, temperature=temperature, score_batch_size=rows)
    first = torch.softmax(model(torch.tensor([prompt])).logits[0, -1].double() / temperature, dim=-1)
    second = torch.softmax(
        model(torch.tensor([[*prompt, token] for token in range(8)])).logits[:, -1].double() / temperature, dim=-1
    )
    expected: dict[tuple[int, ...], float] = {(7,): float(first[7])}
    expected |= {(a, b): float(first[a] * second[a, b]) for a in range(7) for b in range(8)}
    counts = dict.fromkeys(expected, 0)
    for response in responses(rollout):
        counts[tuple(response)] += 1
    rare = [pair for pair in expected if expected[pair] * rows < 5]
    observed = [counts[pair] for pair in expected if pair not in rare] + [sum(counts[pair] for pair in rare)]
    theory = [expected[pair] * rows for pair in expected if pair not in rare] + [sum(expected[p] for p in rare) * rows]
    if not rare:
        observed, theory = observed[:-1], theory[:-1]
    assert sum(theory) == pytest.approx(rows)
    assert chisquare(observed, theory).pvalue > 0.001
    uniform = [rows / len(observed)] * len(observed)
    assert chisquare(observed, uniform).pvalue < 1e-9, "the distribution must be far from uniform to test anything"


def test_log_probs_are_processed_not_raw() -> None:
    """FAULTS A10: logits [0, 1, 2] at T = 0.5 give -0.1429 for token 2, not -0.4076 / 0.5."""
    base, _ = small_base("none")
    with torch.no_grad():
        base.policy.head.bias = torch.nn.Parameter(torch.tensor([0.0, 1.0, 2.0] + [-torch.inf] * 5))
        base.policy.head.weight.zero_()
    rollout, _ = generate(base, PromptBatch([[4]] * 60, [0] * 60, range(60)), max_new_tokens=1, temperature=0.5)
    for token, expected in enumerate([-4.1429, -2.1429, -0.1429]):
        drawn = rollout.sequences[:, -1] == token
        assert drawn.any()
        for log_probs in (rollout.sampler_log_probs, rollout.log_probs):
            torch.testing.assert_close(log_probs[drawn], torch.full_like(log_probs[drawn], expected), rtol=0, atol=1e-4)
    assert int(rollout.sequences[:, -1].max()) == 2, "a token of probability 0 is never drawn"


# --- where a response ends --------------------------------------------------------------------------------------------


@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("pad_is_eos", [False, True])
def test_every_eos_id_ends_its_row_and_counts(tmp_path: Path, mode: str, pad_is_eos: bool) -> None:
    """FAULTS B9; pad == eos changes nothing, because masks are never rebuilt from ids."""
    base = tiny_base(tmp_path / "m", mode=mode, pad_is_eos=pad_is_eos, **MANY_EOS)
    rollout, _ = generate(base, random_prompts(LENGTHS, responses_per_prompt=6), max_new_tokens=6)
    ends = set()
    for tokens, truncated in zip(responses(rollout), rollout.truncated.tolist(), strict=True):
        assert not base.eos_ids & set(tokens[:-1])
        assert (tokens[-1] in base.eos_ids) == (not truncated)
        assert not truncated or len(tokens) == 6
        ends.add(tokens[-1])
    assert len(ends & base.eos_ids) > 5
    assert 0 < int(rollout.truncated.sum()) < 36


def test_an_eos_at_the_limit_is_no_truncation(tmp_path: Path) -> None:
    base = tiny_base(tmp_path / "m", **MANY_EOS)
    rollout, _ = generate(base, random_prompts([3], responses_per_prompt=40), max_new_tokens=1)
    assert rollout.response_mask.all() and rollout.response_mask.shape == (40, 1)
    ended = torch.isin(rollout.sequences[:, -1], torch.tensor(sorted(base.eos_ids)))
    assert torch.equal(rollout.truncated, ~ended)
    assert ended.any() and not ended.all()


def test_prompts_that_hold_eos_and_pad_are_kept_whole(tmp_path: Path) -> None:
    base = tiny_base(tmp_path / "m", pad_is_eos=True)
    prompts = PromptBatch([[EOS, 9, EOS, EOS], [8, EOS]], [0, 1], [1, 2])
    rollout, _ = generate(base, prompts, max_new_tokens=5)
    assert rollout.prompt_mask.tolist() == [[True] * 4, [False, False, True, True]]
    expected = oracle_log_probs(AutoModelForCausalLM.from_pretrained(tmp_path / "m"), rollout)
    torch.testing.assert_close(rollout.log_probs, expected, rtol=0, atol=1e-4)


def test_a_stop_string_ends_a_row_with_the_token_that_completes_it(tmp_path: Path) -> None:
    base = tiny_base(tmp_path / "m", mode="none")
    prompts = random_prompts(LENGTHS, responses_per_prompt=3)
    free, _ = generate(base, prompts, max_new_tokens=10)
    decoded = [base.tokenizer.decode(tokens) for tokens in responses(free)]
    stop = next(text[2:5] for text in decoded if len(text) > 8)  # crosses the tokens' borders
    stopped, _ = generate(base, prompts, max_new_tokens=10, stop_strings=(stop, "never in any text"))
    ended = 0
    for tokens, whole, truncated in zip(responses(stopped), responses(free), stopped.truncated.tolist(), strict=True):
        assert tokens == whole[: len(tokens)]
        assert stop not in base.tokenizer.decode(tokens[:-1])
        if stop in base.tokenizer.decode(tokens):
            assert not truncated
            ended += 1
        else:
            assert tokens == whole
    assert ended >= 1


def test_a_stop_string_in_the_prompt_ends_nothing(tmp_path: Path) -> None:
    base = tiny_base(tmp_path / "m", mode="none")
    tokens = base.tokenizer("the end").input_ids
    rollout, _ = generate(base, PromptBatch([tokens], [0], [1]), max_new_tokens=4, stop_strings=("the end",))
    assert rollout.lengths.tolist() == [4]


# --- work and memory --------------------------------------------------------------------------------------------------


def test_finished_rows_leave_the_batch_and_every_token_passes_the_trunk_once(tmp_path: Path) -> None:
    base = tiny_base(tmp_path / "m", **MANY_EOS)
    prompts = random_prompts([4] * 10)
    with forward_shapes(base.trunk) as trunk, forward_shapes(base.policy.branch) as branch:
        rollout, _ = generate(base, prompts, score_batch_size=10)
    lengths = rollout.lengths.tolist()
    assert len(set(lengths)) > 2
    # Rows that still run when token t is drawn; a token's own trunk pass comes before its row leaves.
    running = [sum(length > t for length in lengths) for t in range(max(lengths))]
    assert trunk == [(10, 4), *((rows, 1) for rows in running)]
    # The last token of a prompt is left to the branch's first step.
    assert branch[:-1] == [(10, 3), *((rows, 1) for rows in running)]
    assert branch[-1] == (10, 4 + max(lengths) - 1), "the training engine's pass, which needs no last token"
    assert sum(rows * time for rows, time in trunk) == int(rollout.attention_mask.sum())


def test_the_batch_size_bounds_every_pass(tmp_path: Path) -> None:
    base = tiny_base(tmp_path / "m", **MANY_EOS)
    with forward_shapes(base.trunk) as trunk, forward_shapes(base.policy.branch) as branch:
        generate(base, random_prompts([4] * 10), batch_size=4, score_batch_size=3)
    assert max(rows for rows, _ in trunk) == 4
    admitted = [rows for rows, time in trunk if time == 4]
    assert admitted[0] == 4 and sum(admitted) == 10
    assert [rows for rows, _ in branch[-4:]] == [3, 3, 3, 1]


def test_generate_keeps_no_graph(tmp_path: Path) -> None:
    base = tiny_base(tmp_path / "m")
    make_trainable(base.policy, with_language_head=False)
    rollout, activations = generate(base)
    assert not any(t.requires_grad for t in (rollout.log_probs, rollout.sampler_log_probs, activations.inputs))
