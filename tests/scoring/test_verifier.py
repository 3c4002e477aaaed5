"""Verifiable tasks: questions become prompts, answers are scored by the task's verifier."""

from __future__ import annotations

import importlib.util
import sys
from dataclasses import dataclass
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from fourfold.config import ConfigError
from fourfold.config.loading import check_packages
from fourfold.config.schema import DatasetSection, PartSection
from fourfold.data.records import Message
from fourfold.data.tasks import load_task, read_task_prompts
from fourfold.scoring.sources import text_of
from fourfold.scoring.verifier import Verifier
from tiny import tiny_tokenizer
from training.runs import Tree, by_function, make_config, make_trainer, merged, settings, steps_of

KEY = "reward.parts.sums"
TOKENIZER = tiny_tokenizer(pad_is_eos=False)
REAL = importlib.util.find_spec("reasoning_gym") is not None


@dataclass
class _Sums:
    """As a data set of reasoning-gym: entries by number, and a verifier that gives half marks for a near miss."""

    size: int
    seed: int
    largest: int = 9

    def __post_init__(self) -> None:
        if self.largest < 1:
            raise AssertionError("largest must be positive")

    def __len__(self) -> int:
        return self.size

    def __getitem__(self, number: int) -> dict[str, Any]:
        a, b = (self.seed * 7 + number) % self.largest, (self.seed + 3 * number) % self.largest
        return {"question": f"a {a} plus {b}", "answer": str(a + b), "metadata": {"sum": a + b}}

    def score_answer(self, answer: str | None, entry: dict[str, Any]) -> float:
        if answer is None or not answer.strip().lstrip("-").isdigit():
            return 0.0
        gap = abs(int(answer) - entry["metadata"]["sum"])
        return {0: 1.0, 1: 0.5}.get(gap, 0.0)


def _create(name: str, **given: Any) -> _Sums:
    assert name == "sums"
    return _Sums(**given)


@pytest.fixture
def gym(monkeypatch: pytest.MonkeyPatch) -> None:
    """A package with the two names of reasoning-gym that are used."""
    stand_in = SimpleNamespace(
        factory=SimpleNamespace(DATASETS={"sums": (), "products": ()}), create_dataset=_create, __spec__=object()
    )
    monkeypatch.setitem(sys.modules, "reasoning_gym", stand_in)  # pyright: ignore[reportArgumentType]


def part(**given: Any) -> PartSection:
    return PartSection(**{"source": "verifiable", "task": "sums", "size": 12, **given})


def test_held_out_questions_come_from_the_next_seed_and_are_not_asked_in_training(gym: None) -> None:
    trained, held_out = load_task(part(seed=4), KEY)
    asked = {entry["question"] for entry in trained.entries}
    assert len(trained.entries) == 12 and 0 < len(held_out.entries) <= 12
    assert not asked & {entry["question"] for entry in held_out.entries}
    again, _ = load_task(part(seed=4), KEY)
    other, _ = load_task(part(seed=5), KEY)
    assert again.entries == trained.entries != other.entries


def test_questions_stand_in_their_template(gym: None) -> None:
    section = DatasetSection(path="task:sums", max_rows=3)
    rows = read_task_prompts(part(prompt_template="Q: {question}\nA:"), KEY, section, held_out=False)
    assert [row.prompt for row in rows] == ["Q: a 0 plus 0\nA:", "Q: a 1 plus 3\nA:", "Q: a 2 plus 6\nA:"]
    [first, *_] = read_task_prompts(part(prompt_template="chat"), KEY, section, held_out=False)
    assert first.prompt == (Message("user", "a 0 plus 0"),)


def test_a_task_with_too_few_questions_has_none_to_hold_out(gym: None) -> None:
    section = DatasetSection(path="task:sums")
    with pytest.raises(ValueError, match="every held-out question of 'sums' is also asked in training"):
        read_task_prompts(part(task_settings={"largest": 1}), KEY, section, held_out=True)


@pytest.mark.parametrize(
    ("tag", "response", "score"),
    [
        ("", " 4 ", 1.0),
        ("", "4.", 0.0),
        ("", "5", 0.5),
        ("answer", "<answer>9</answer> no, <answer>\n4</answer>", 1.0),
        ("answer", "4", 0.0),
        ("a.b", "<a.b>4</a.b>", 1.0),
        ("a.b", "<axb>4</axb>", 0.0),
    ],
)
def test_the_answer_is_the_response_or_what_stands_last_in_its_tag(
    gym: None, tag: str, response: str, score: float
) -> None:
    task, _ = load_task(part(answer_tag=tag), KEY)
    [entry, *_] = [entry for entry in task.entries if entry["question"] == "a 1 plus 3"]
    assert task.score(response, entry) == score


def test_a_prompt_is_known_by_what_its_tokens_decode_to_and_others_have_no_score(gym: None) -> None:
    verifier = Verifier(part(), KEY, TOKENIZER)
    question = text_of(TOKENIZER("a 1 plus 3").input_ids, TOKENIZER)
    _, held_out = load_task(part(), KEY)
    unseen = text_of(TOKENIZER(held_out.entries[0]["question"]).input_ids, TOKENIZER)
    right = held_out.entries[0]["answer"]
    assert verifier([question, question, unseen, "the plot"], ["4", "5", right, "4"]) == [1.0, 0.5, 1.0, None]


@pytest.mark.parametrize(
    ("given", "said"),
    [
        ({"task": "sum"}, r"reward\.parts\.sums\.task: reasoning-gym has no data set 'sum'; did you mean 'sums'\?"),
        ({"task": "xyz"}, "it has 2, such as 'products'"),
        ({"task_settings": {"biggest": 3}}, r"task_settings: given .*which 'sums' .*does not take \(TypeError"),
        ({"task_settings": {"largest": 0}}, r"AssertionError: largest must be positive"),
    ],
)
def test_what_the_package_does_not_know_is_refused(gym: None, given: Tree, said: str) -> None:
    with pytest.raises(ValueError, match=said):
        load_task(part(**given), KEY)


def paid_by_sums(folder: Path) -> Tree:
    sums = {"source": "verifiable", "task": "sums", "size": 12, "on_failure": "stop"}
    prompts = {name: {"path": "task:sums"} for name in ("prompts", "prompts_test")}
    changes = {
        "data": {**prompts, "truncation": "drop"},
        "reward": {"source": "combined", "function": None, "parts": {"sums": sums}},
    }
    return settings(folder, merged(by_function("pays_by_hash", steps=2), changes))


@pytest.mark.skipif(REAL, reason="reasoning-gym is installed")
def test_without_the_package_the_error_names_the_extra(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"reward\.parts\.sums\.source = 'verifiable' \(the extra reasoning-gym\)"):
        check_packages(make_config(paid_by_sums(tmp_path)))
    with pytest.raises(ValueError, match=r"pip install 'fourfold\[reasoning-gym\]'"):
        load_task(part(), KEY)


def test_a_run_whose_prompts_and_scores_are_a_task_s(gym: None, tmp_path: Path) -> None:
    trainer = make_trainer(make_config(paid_by_sums(tmp_path)))
    rows = steps_of(trainer)
    assert [row["invalid_scores"] for row in rows] == [0, 0]
    assert trainer.last_evaluation is not None
    assert all(prompt.startswith("a ") for prompt in trainer.last_evaluation.prompts)
    assert all(0.0 <= row["score_mean/sums"] <= 1.0 for row in rows)


@pytest.mark.skipif(not REAL, reason="reasoning-gym is not installed")
def test_the_real_package_scores_its_own_answers_with_one() -> None:
    for task in ("leg_counting", "basic_arithmetic", "word_sorting"):
        for questions in load_task(part(task=task, size=20, seed=1, answer_tag="answer"), KEY):
            scores = [questions.score(f"<answer>{entry['answer']}</answer>", entry) for entry in questions.entries]
            assert scores == [1.0] * len(questions.entries)
            assert all(questions.score("none", entry) == 0.0 for entry in questions.entries)
