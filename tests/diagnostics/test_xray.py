"""The token x-ray: which responses are chosen, and that every number on the page is the one in the rollout."""

from __future__ import annotations

import re
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from diagnostics.page_checks import parsed
from diagnostics.shown_run import HOSTILE, STEPS, make_run
from fourfold.batch import Experience
from fourfold.diagnostics.kept import held_out_files, training_files
from fourfold.diagnostics.numbers import short
from fourfold.diagnostics.pages.elements import h, serialised
from fourfold.diagnostics.report_page.xray import Scale, scales_of, xray_section
from fourfold.diagnostics.run_record import RunRecord, read_run
from fourfold.diagnostics.token_texts import TokenText
from fourfold.diagnostics.xray import MOST_TOKENS, Measure, Sample, Xray, XrayStep, choose, make_xray, numbers_of
from test_batch import PARTS, make_batch
from tiny import tiny_tokenizer

KEYS = ("kl", "log_probs", "ref_log_probs", "values", "advantages", "rewards", "returns")
TOKENIZER = tiny_tokenizer(pad_is_eos=False)


@pytest.fixture(scope="module")
def record(tmp_path_factory: pytest.TempPathFactory) -> RunRecord:
    return read_run(make_run(tmp_path_factory.mktemp("xrayed")))


@pytest.fixture(scope="module")
def xray(record: RunRecord) -> Xray:
    return make_xray(record.root, record.config, TOKENIZER, 5)


def html(xray: Xray) -> str:
    return serialised(h("section", xray_section(xray), id="xray"))


def test_numbers_are_those_of_the_rollout(record: RunRecord, xray: Xray) -> None:
    assert [step.step for step in xray.steps] == [0, STEPS] and xray.source == "held out"
    for step in xray.steps:
        batch = held_out_files(record.root).read(step.step)
        for sample in step.samples:
            length = int(batch.lengths[sample.row])
            assert len(sample.tokens) == sample.length == length
            for key in KEYS:
                assert sample.numbers[key] == pytest.approx(getattr(batch, key)[sample.row, :length].tolist()), key
            ids = batch.sequences[sample.row, batch.prompt_length : batch.prompt_length + length].tolist()
            prompt = batch.sequences[sample.row, : batch.prompt_length][batch.prompt_mask[sample.row]].tolist()
            assert "".join(each.text for each in sample.tokens if not each.special) == TOKENIZER.decode(
                ids, skip_special_tokens=True
            )
            assert sample.prompt == TOKENIZER.decode(prompt)
            assert sample.score == pytest.approx(float(batch.scores[sample.row]))
            assert sample.truncated == bool(batch.truncated[sample.row])


def test_both_steps_show_the_same_prompts(xray: Xray) -> None:
    first, last = xray.steps
    assert [each.prompt for each in first.samples] == [each.prompt for each in last.samples]
    assert [each.why for each in first.samples] == [each.why for each in last.samples]


def test_every_number_is_on_the_page(record: RunRecord, xray: Xray) -> None:
    page = html(xray)
    for at, step in enumerate(xray.steps):
        for n, sample in enumerate(step.samples):
            table = re.search(rf'id="numbers-{at}-{n}">(.*?)</table>', page, re.S)
            assert table
            rows = re.findall(r"<tr>(.*?)</tr>", table[1].split("<tbody>")[1], re.S)
            assert len(rows) == len(sample.tokens)
            for t, row in enumerate(rows):
                cells = [re.sub("<[^>]+>", "", cell) for cell in re.findall(r"<td[^>]*>(.*?)</td>", row, re.S)]
                assert cells[1:] == [short(sample.numbers[key][t]) for key in KEYS]


def test_training_rollouts_can_be_looked_at(record: RunRecord) -> None:
    xray = make_xray(record.root, record.config, TOKENIZER, 2, training=True)
    assert xray.source == "training" and [step.step for step in xray.steps] == [STEPS]
    batch = training_files(record.root).read(STEPS)
    assert [each.score for each in xray.steps[0].samples] == pytest.approx(
        [float(batch.scores.max()), float(batch.scores.min())]
    )


def test_parts_of_the_score_are_told(record: RunRecord, tmp_path: Path) -> None:
    batch = held_out_files(record.root).read(STEPS)
    both = torch.stack([batch.scores, -batch.scores], dim=1)
    held_out_files(tmp_path).write(1, replace(batch, score_parts=both, score_weights=torch.ones_like(both)))
    reward = record.config.reward.model_copy(update={"source": "combined", "parts": {"kind": 1, "brief": 2}})
    config = record.config.model_copy(update={"reward": reward})
    [step] = make_xray(tmp_path, config, TOKENIZER, 2).steps
    for sample in step.samples:
        assert sample.parts == pytest.approx({"kind": sample.score, "brief": -sample.score})
    page = html(make_xray(tmp_path, config, TOKENIZER, 2))
    assert f"score {short(sample.score)}, kind {short(sample.score)}, brief {short(-sample.score)};" in page


def test_without_kept_rollouts_the_reason_is_given(record: RunRecord, tmp_path: Path) -> None:
    with pytest.raises(ValueError, match="no rollout has been kept yet"):
        make_xray(tmp_path, record.config, TOKENIZER, 2)
    evaluation = record.config.evaluation.model_copy(update={"keep_rollouts": False})
    with pytest.raises(ValueError, match=r"evaluation\.keep_rollouts = false"):
        make_xray(tmp_path, record.config.model_copy(update={"evaluation": evaluation}), TOKENIZER, 2)
    data = record.config.data.model_copy(update={"prompts_test": None})
    with pytest.raises(ValueError, match=r"no held-out prompts"):
        make_xray(tmp_path, record.config.model_copy(update={"data": data}), TOKENIZER, 2)


@pytest.mark.parametrize("count", [1, 3, 6, 100])
def test_extremes_are_chosen_first(record: RunRecord, count: int) -> None:
    batch = held_out_files(record.root).read(STEPS)
    rows = len(batch.scores)
    found = choose(batch, count)
    assert len(found) == min(count, rows) and set(found) <= set(range(rows))
    scores = batch.scores.tolist()
    assert scores[next(iter(found))] == max(scores)
    if count > 1:
        assert scores[list(found)[1]] == min(scores)
    for row, why in found.items():
        if why == "most KL":
            sums = [float(batch.kl[r, : int(batch.lengths[r])].sum()) for r in range(rows)]
            assert sums[row] == pytest.approx(max(sums))
        if why == "values furthest off":
            off = [_error(batch, r) for r in range(rows)]
            assert off[row] == pytest.approx(max(off))


def _error(batch: Experience, row: int) -> float:
    length = int(batch.lengths[row])
    return sum(abs(float(batch.values[row, t] - batch.returns[row, t])) for t in range(length)) / length


@given(
    middle=st.floats(-5, 5), full=st.floats(0.01, 10), values=st.tuples(st.floats(-20, 20), st.floats(-20, 20)),
    scale=st.sampled_from(["signed", "spread", "surprise"]),
)  # fmt: skip
@settings(deadline=None)
def test_colours_follow_the_numbers(middle: float, full: float, values: tuple[float, float], scale: Any) -> None:
    made = Scale(Measure("x", "x", "", scale), 0, middle if scale == "spread" else 0.0, full)
    low, high = sorted(values)
    shares = made.share(low), made.share(high)
    assert all(-1 <= share <= 1 for share in shares)
    assert shares[0] >= shares[1] if scale == "surprise" else shares[0] <= shares[1]
    assert made.share(made.middle) == 0
    assert abs(made.share(made.middle + full)) == pytest.approx(1)


def test_one_scale_serves_actor_and_reference_and_all_steps(xray: Xray) -> None:
    scales = {each.measure.key: each for each in scales_of(xray)}
    assert list(scales) == ["kl", "log_probs", "values", "advantages", "rewards"]
    assert scales["log_probs"].index == 1, "the style shows the reference beside the actor at this one"
    assert scales["values"].index == 2, "and values beside returns at this one"
    sizes = sorted(-v for step in xray.steps for each in step.samples for key in KEYS[1:3] for v in each.numbers[key])
    assert sizes[-1] >= scales["log_probs"].full >= sizes[len(sizes) // 2]


def sample(tokens: list[TokenText], prompt: str = "p", left_out: int = 0) -> Sample:
    numbers = {key: [0.1 * (t + 1) for t in range(len(tokens))] for key in KEYS}
    numbers |= {key: [-0.5] * len(tokens) for key in ("log_probs", "ref_log_probs")}
    return Sample(0, "highest score", prompt, tokens, numbers, 1.0, {}, len(tokens) + left_out, False, left_out)


def of(samples: list[Sample], like: Xray) -> Xray:
    return Xray("held out", like.measures, [XrayStep(3, samples)])


def test_hostile_tokens_are_text(xray: Xray) -> None:
    plain = parsed(html(of([sample([TokenText("a")] * 3, "p")], xray)))
    page = html(of([sample([TokenText(HOSTILE), TokenText("", "F0 9F"), TokenText("<s>", "", True)], HOSTILE)], xray))
    assert parsed(page).tags.keys() - {"small"} == plain.tags.keys()
    assert "<small>F0 9F</small>" in page and "&lt;s&gt;" in page
    assert not re.search("[\x00\x1b\u202e\u200f\ud800-\udfff]", page)


def test_line_ends_are_marked(xray: Xray) -> None:
    assert "\u21b5\n" in html(of([sample([TokenText("a\n")])], xray))


def test_values_and_returns_are_drawn_along_the_response(xray: Xray) -> None:
    made = sample([TokenText("a")] * 4)
    made = replace(made, numbers={**made.numbers, "values": [0.0, 1.0, 2.0, 4.0], "returns": [4.0, 4.0, 4.0, 0.0]})
    page = html(of([made], xray))
    value, returned = (
        [float(y) for y in re.findall(r"[ML][\d.]+ ([\d.]+)", path)]
        for path in re.findall(r'<path d="([^"]+)" class="line line-[01]"', page)
    )
    assert [value[0] - y for y in value] == pytest.approx([0, 13, 26, 52], abs=0.2)
    assert returned[0] == value[3] and returned[3] == value[0]
    assert "<svg" not in html(of([sample([TokenText("a")])], xray))


def test_a_long_prompt_is_cut_and_can_be_unfolded(xray: Xray) -> None:
    page = html(of([sample([TokenText("a")], "b" * 1000)], xray))
    assert "The whole prompt" in page and page.count("b" * 1000) == 1
    assert "The whole prompt" not in html(of([sample([TokenText("a")], "b" * 100)], xray))


def test_a_long_response_is_cut(record: RunRecord, tmp_path: Path) -> None:
    batch = held_out_files(record.root).read(STEPS)
    rows, wide = len(batch.scores), MOST_TOKENS + 30
    numbers = {
        key: torch.zeros(rows, wide)
        for key in (
            "log_probs",
            "sampler_log_probs",
            "ref_log_probs",
            "kl",
            "values",
            "rewards",
            "advantages",
            "returns",
        )
    }
    ids = torch.full((rows, wide), 50)
    long = replace(
        batch, response_mask=torch.ones(rows, wide, dtype=torch.bool), **numbers,
        sequences=torch.cat([batch.sequences[:, : batch.prompt_length], ids], dim=1),
    )  # fmt: skip
    held_out_files(tmp_path).write(1, long)
    made = make_xray(tmp_path, record.config, TOKENIZER, 1)
    [step] = made.steps
    assert len(step.samples[0].tokens) == MOST_TOKENS and step.samples[0].left_out == 30
    assert "30 more tokens are not shown" in html(
        of([step.samples[0]], make_xray(tmp_path, record.config, TOKENIZER, 1))
    )


def test_numbers_of_several_dimensions_are_weighted_as_they_are_learned_from() -> None:
    """The row whose total is furthest off is shown for it, though single dimensions of another are further off."""
    batch = make_batch(lengths=(2, 2, 2, 2), values=(PARTS + 1,))
    returns = batch.values.clone()
    returns[1, :2] += torch.tensor([5.0, 0.0, 0.0])  # of which nothing is learned
    returns[2, :2] += torch.tensor([0.0, 0.0, 1.0])
    weights = torch.tensor([[0.0, 1.0]]).expand(4, 2)
    scores, kl = torch.tensor([2.0, 1.0, 1.0, 0.0]), torch.eye(4)[:, :1].expand(4, 4).contiguous()
    batch = replace(batch, returns=returns, score_weights=weights, scores=scores, kl=kl)
    assert choose(batch, 4)[2] == "values furthest off"
    for key in ("values", "rewards", "returns"):
        expected = (getattr(batch, key) * torch.tensor([0.0, 1.0, 1.0])).sum(dim=-1)
        torch.testing.assert_close(numbers_of(batch, key), expected)
    assert torch.equal(numbers_of(batch, "kl"), batch.kl)
