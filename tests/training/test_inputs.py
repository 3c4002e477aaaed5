"""Data of a run: read before a model is loaded, refused all at once, and described at the start."""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any

import pytest

from fourfold.config import RunConfig
from fourfold.data.records import BadRowsError
from fourfold.models.loading import load_base
from fourfold.training.inputs import Inputs, encode_inputs, read_records
from training.runs import Tree, by_function, make_config, merged, run, settings


def write(path: Path, *rows: Any) -> Tree:
    path.write_text("".join((row if isinstance(row, str) else json.dumps(row)) + "\n" for row in rows))
    return {"path": str(path)}


def bad_sets(folder: Path) -> Tree:
    """Three data sets with 2, 12 and 1 rows that cannot be used, and one with another column."""
    return {
        "texts": write(folder / "t.jsonl", {"text": "fine"}, {"text": ""}, "{"),
        "pairs": write(folder / "p.jsonl", *[{"prompt": "a", "chosen": "b", "rejected": "b"}] * 12),
        "prompts": write(folder / "q.jsonl", {"prompt": "fine"}, {"prompt": 3}),
        "prompts_test": write(folder / "r.jsonl", {"review": "fine"}),
    }


def encoded(config: RunConfig) -> tuple[Inputs, list[str]]:
    said: list[str] = []
    return encode_inputs(config, load_base(config), read_records(config), said.append), said


def test_bad_rows_of_all_files_are_one_error_before_a_model_is_loaded(tmp_path: Path) -> None:
    """Each file says how many and which; the model is broken, and nobody gets as far as to notice."""
    tree = merged(settings(tmp_path), {"data": bad_sets(tmp_path)})
    (tmp_path / "llama" / "model.safetensors").unlink()
    with pytest.raises(ValueError, match=r"^4 data sets cannot be used \(15 bad rows in all\)") as caught:
        run(tree)
    said = str(caught.value)
    for part in (
        "data.texts: .*t.jsonl: 2 of 3 rows .*\n.*line 2: 'text' is empty\n.*line 3: bad JSON",
        "data.pairs: .*p.jsonl: 12 of 12 rows (.*\n){10}.*line 10: .*\n  and 2 more",
        "data.prompts: .*q.jsonl: 1 of 2 rows .*\n.*line 2: 'prompt' is a number",
        "data.prompts_test: .*r.jsonl: no column 'prompt'",
    ):
        assert re.search(part, said), part
    assert not (tmp_path / "run").exists(), "mended with other settings, the same folder serves"


def test_one_bad_file_speaks_for_itself(tmp_path: Path) -> None:
    config = make_config(merged(settings(tmp_path), {"data": {"texts": bad_sets(tmp_path)["texts"]}}))
    with pytest.raises(BadRowsError) as caught:
        read_records(config)
    assert caught.value.total == 2


@pytest.mark.parametrize(
    ("changes", "names"),
    [
        ({"stages": ["sft"]}, {"texts", "texts_test"}),
        ({"stages": ["reward"]}, {"texts", "pairs", "pairs_test"}),
        ({"stages": ["reward"], "reward": {"standardise": False}}, {"pairs", "pairs_test"}),
        ({"stages": ["ppo"]}, {"prompts", "prompts_test", "texts_test"}),
        (merged(by_function("pays_for_a"), {"stages": ["reward", "ppo"]}), {"prompts", "prompts_test"}),
    ],
)
def test_only_what_the_stages_need_is_read(tmp_path: Path, changes: Tree, names: set[str]) -> None:
    records = read_records(make_config(merged(settings(tmp_path), changes)))
    assert {name for name, rows in vars(records).items() if rows} == names


def test_what_the_tokenizer_cannot_take_is_one_error_too(tmp_path: Path) -> None:
    changes = {"max_text_tokens": 5, "max_prompt_tokens": 3, "truncation": "error"}
    tree = merged(settings(tmp_path), {"data": changes, "stages": ["sft", "ppo"]})
    with pytest.raises(ValueError, match=r"^4 data sets cannot be used; nothing was trained\n") as caught:
        encoded(make_config(tree))
    keys = re.findall(r"^data\.(\w+): \d+ of \d+ rows have more than", str(caught.value), re.MULTILINE)
    assert keys == ["texts", "texts_test", "prompts", "prompts_test"]


def test_each_data_set_is_described_with_the_rule_for_what_is_too_long(tmp_path: Path) -> None:
    """FAULTS L5: also where nothing is too long."""
    inputs, said = encoded(make_config(merged(settings(tmp_path), {"data": {"max_prompt_tokens": 100}})))
    assert said.pop().startswith("warning: 1 of the 8 prompts of data.prompts_test stand in data.prompts too, so ")
    names = ["texts", "texts_test", "pairs", "pairs_test", "prompts", "prompts_test"]
    assert [line.partition(":")[0] for line in said] == [f"data.{name}" for name in names]
    assert all("truncation 'right'" in line for line in said)
    assert "30 rows" in said[4] and "limit 100, truncation 'right': none is too long" in said[4]
    assert [len(getattr(inputs, name)) for name in names] == [30, 12, 30, 12, 30, 8]
