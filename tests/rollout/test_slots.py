"""Slots are used again and prefixes are shared, and no response shows it."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from fourfold.models.loading import Base
from fourfold.rollout import decoder
from fourfold.rollout.sampler import PromptBatch
from rollout.test_local import MANY_EOS, generate, responses
from tiny_roles import MODES, activations_of, forward_shapes, random_prompts, tiny_base

Eighteen = tuple[Base, PromptBatch, list[list[int]]]


def alone(base: Base, prompts: PromptBatch, **settings: Any) -> list[list[int]]:
    """Every row drawn by itself."""
    rows = [slice(row, row + 1) for row in range(len(prompts.tokens))]
    return [
        responses(
            generate(base, PromptBatch(prompts.tokens[r], prompts.prompt_ids[r], prompts.seeds[r]), **settings)[0]
        )[0]
        for r in rows
    ]


def beginning_with(prefix: list[int], tails: list[list[int]]) -> PromptBatch:
    rows = range(len(tails))
    return PromptBatch([[*prefix, *tail] for tail in tails], list(rows), list(rows))


@pytest.fixture(scope="module", params=MODES)
def eighteen(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Eighteen:
    """A model, 18 rows of several lengths, and what comes of each by itself."""
    base = tiny_base(tmp_path_factory.mktemp("eighteen") / "m", mode=request.param, **MANY_EOS)
    prompts = random_prompts([3, 9, 1, 5, 9, 2], responses_per_prompt=3)
    return base, prompts, alone(base, prompts)


@pytest.mark.parametrize("slots", [1, 2, 3, 7, 16])
def test_any_number_of_slots_gives_the_same_responses(eighteen: Eighteen, slots: int) -> None:
    base, prompts, expected_responses = eighteen
    rollout, activations = generate(base, prompts, batch_size=slots)
    assert responses(rollout) == expected_responses
    expected = activations_of(base, rollout).inputs
    torch.testing.assert_close(activations.inputs[activations.mask], expected[activations.mask], rtol=0, atol=1e-5)


def test_a_row_that_waits_takes_the_slot_of_one_that_has_ended(tmp_path: Path) -> None:
    """Rows of 1 to 12 tokens: batch after batch, each as long as its longest row, would take more steps."""
    base = tiny_base(tmp_path / "m", **MANY_EOS)
    prompts = random_prompts([4] * 24)
    with forward_shapes(base.trunk) as trunk:
        rollout, _ = generate(base, prompts, batch_size=4)
    lengths = rollout.lengths.tolist()
    steps = [rows for rows, time in trunk if time == 1]
    assert sum(steps) == sum(lengths) and max(steps) == 4
    assert len(steps) < sum(max(lengths[i : i + 4]) for i in range(0, 24, 4))
    admissions = [rows for rows, time in trunk if time == 4]
    assert sum(admissions) == 24 and len(admissions) > 6, "not only when all slots are empty"


def test_slots_do_not_wait_longer_than_a_step_costs(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    base = tiny_base(tmp_path / "m", **MANY_EOS)
    idle: list[int] = []
    taken_up = decoder.Decoder._take_up

    def watched(self: decoder.Decoder, most: int) -> None:
        idle.append(self._idle - (self._slots - len(self._rows)))  # before the last step
        taken_up(self, most)

    monkeypatch.setattr(decoder.Decoder, "_take_up", watched)
    generate(base, random_prompts([4] * 24), batch_size=4)
    assert len(idle) > 6 and max(idle) < 4


@pytest.mark.parametrize("mode", MODES)
def test_a_row_with_the_prompt_of_the_one_before_takes_a_slot_at_once_and_no_pass(
    tmp_path: Path, mode: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The last token of its prompt goes through the trunk with a step of the others."""
    base = tiny_base(tmp_path / "m", mode=mode, **MANY_EOS)
    prompts = random_prompts([7], responses_per_prompt=14)
    full: list[bool] = []
    draw = decoder.Decoder._draw

    def watched(self: decoder.Decoder, hidden: Tensor) -> list[bool]:
        full.append(len(self._rows) + len(self._joining) == self._slots or self._waiting == 14)
        return draw(self, hidden)

    monkeypatch.setattr(decoder.Decoder, "_draw", watched)
    with forward_shapes(base.trunk or base.policy.branch) as passes:
        rollout, _ = generate(base, prompts, batch_size=3, score_batch_size=14)
    assert len(full) > 8 and all(full)
    steps = [rows for rows, time in passes if time == 1]
    assert len(steps) == len(full) + (1 if base.trunk else 0), "one pass of the first rows that share the prompt"
    assert responses(rollout) == alone(base, prompts)


@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("slots", [3, 12])
def test_a_prompt_is_computed_once_however_many_responses_it_has(tmp_path: Path, mode: str, slots: int) -> None:
    base = tiny_base(tmp_path / "m", mode=mode, **MANY_EOS)
    prompts = random_prompts([7, 5, 6], responses_per_prompt=4)
    part = base.trunk or base.policy.branch
    with forward_shapes(part) as passes:
        rollout, activations = generate(base, prompts, batch_size=slots, score_batch_size=12)
    assert responses(rollout) == alone(base, prompts)
    # The training engine's pass comes last, where there is no trunk; without one the last prompt token is a step.
    longer = [rows * time for rows, time in (passes if base.trunk else passes[:-1]) if time > 1]
    real = 7 + 5 + 6 if base.trunk else 6 + 4 + 5
    assert real <= sum(longer) <= real + 9, "each prompt once, but for padding within a pass"
    steps = sum(rows for rows, time in passes if time == 1)
    assert steps == sum(rollout.lengths.tolist()) + (9 if base.trunk else 0)
    expected = activations_of(base, rollout).inputs
    torch.testing.assert_close(activations.inputs[activations.mask], expected[activations.mask], rtol=0, atol=1e-5)


@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("slots", [2, 5])
def test_a_common_prefix_is_computed_once(tmp_path: Path, mode: str, slots: int) -> None:
    base = tiny_base(tmp_path / "m", mode=mode, **MANY_EOS)
    prefix = torch.randint(4, 90, (40,), generator=torch.Generator().manual_seed(3)).tolist()
    prompts = beginning_with(prefix, [[5], [6, 7], [8, 9, 10], [11], [12, 13]])
    with forward_shapes(base.trunk or base.policy.branch) as passes:
        rollout, activations = generate(base, prompts, batch_size=slots, score_batch_size=5, max_new_tokens=6)
    assert responses(rollout) == alone(base, prompts, max_new_tokens=6)
    prompt_passes = [rows * time for rows, time in (passes if base.trunk else passes[:-1]) if time > 1]
    # Two slots begin with 40 tokens of two rows, which is not worth a pass of its own; later rows copy them.
    assert sum(prompt_passes) < (2 if slots == 2 else 1) * 44 + 20
    expected = activations_of(base, rollout).inputs
    torch.testing.assert_close(activations.inputs[activations.mask], expected[activations.mask], rtol=0, atol=1e-5)


def test_prompts_that_begin_with_each_other_are_kept_apart(tmp_path: Path) -> None:
    """One prompt is the beginning of another; one differs in the last token only."""
    base = tiny_base(tmp_path / "m", **MANY_EOS)
    prompts = PromptBatch([[9, 8, 7], [9, 8], [9], [9, 8, 6], [9, 8, 7]], [0, 1, 2, 3, 0], [1, 2, 3, 4, 5])
    expected = alone(base, prompts)
    for slots in (1, 2, 5):
        assert responses(generate(base, prompts, batch_size=slots)[0]) == expected
