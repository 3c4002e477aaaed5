"""Configurations: read strictly, every problem listed, saved so that they load to the same."""

from __future__ import annotations

import importlib.util
import re
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from fourfold.config import ConfigError, RunConfig, check_packages, check_paths, dump_toml, load_config
from fourfold.config.loading import parse_config

MINIMAL = """
output = "runs/x"
[model]
path = "owner/model"
[data]
texts.path = "texts.jsonl"
pairs.path = "pairs.csv"
prompts.path = "prompts.parquet"
"""


def load(tmp_path: Path, extra: str = "", *overrides: str) -> RunConfig:
    path = tmp_path / "run.toml"
    path.write_text(MINIMAL + extra)
    return load_config(path, overrides)


def problems(tmp_path: Path, extra: str = "", *overrides: str) -> tuple[str, ...]:
    with pytest.raises(ConfigError) as caught:
        load(tmp_path, extra, *overrides)
    assert all(problem in str(caught.value) for problem in caught.value.problems)
    return caught.value.problems


def test_defaults_come_first_then_file_then_overrides(tmp_path: Path) -> None:
    config = load(tmp_path, "[ppo]\nsteps = 7\nkl_coef = 0.2\n", "ppo.kl_coef=0.3", "ppo.kl_coef=0.1")
    assert (config.ppo.num_epochs, config.ppo.steps, config.ppo.kl_coef) == (4, 7, 0.1)


@pytest.mark.parametrize(
    ("override", "key", "value"),
    [
        ("ppo.steps=4", "ppo.steps", 4),
        ("ppo.kl_coef=1", "ppo.kl_coef", 1.0),
        ("output=runs/a=b", "output", "runs/a=b"),
        ("output = '4'", "output", "4"),
        ('stages=["sft"]', "stages", ("sft",)),
        ("critic.betas=[0, 0.5]", "critic.betas", (0.0, 0.5)),
        ("data.texts.columns.text=review", "data.texts.columns", {"text": "review"}),
        ("data.texts_test.path=x.csv", "data.texts_test.path", "x.csv"),
        ("ppo.whiten_advantages=false", "ppo.whiten_advantages", False),
        ("critic.learning_rate=0", "critic.learning_rate", 0.0),
        ("sampling.stop_strings=['\\n']", "sampling.stop_strings", ("\\n",)),
    ],
)
def test_overrides_are_toml_or_plain_text(tmp_path: Path, override: str, key: str, value: Any) -> None:
    found: Any = load(tmp_path, "", override)
    for part in key.split("."):
        found = getattr(found, part)
    assert found == value and type(found) is type(value)


@pytest.mark.parametrize(
    ("override", "message"),
    [
        ('ppo.steps="4"', 'ppo.steps: given "4" (text); allowed: integer > 0'),
        ("ppo.steps=four", 'ppo.steps: given "four" (text); allowed: integer > 0'),
        ("ppo.steps=4.0", "ppo.steps: given 4.0 (number); allowed: integer > 0"),
        ("ppo.steps=true", "ppo.steps: given true (true or false); allowed: integer > 0"),
        ("ppo.steps=0", "ppo.steps: given 0 (integer); allowed: integer > 0"),
        ("ppo.whiten_advantages=1", "ppo.whiten_advantages: given 1 (integer); allowed: true or false"),
        ("output=5", "output: given 5 (integer); allowed: text"),
        ("ppo.gamma=1.5", "ppo.gamma: given 1.5 (number); allowed: number >= 0 and <= 1"),
        ("ppo.gamma=nan", "ppo.gamma: given nan; allowed: finite numbers only"),
        ("ppo.kl_coef=inf", "ppo.kl_coef: given inf; allowed: finite numbers only"),
        ("sampling.temperature=-inf", "sampling.temperature: given -inf; allowed: finite numbers only"),
        ("ppo.kl_controller=adaptve", "ppo.kl_controller: given \"adaptve\" (text); allowed: 'fixed' or 'adaptive'"),
        (
            "ppo.betas=[0.9]",
            "ppo.betas: given [0.9] (list); allowed: list of 2: number >= 0 and <= 1, number >= 0 and <= 1",
        ),
        (
            "ppo.length_range=[1, -2]",
            "ppo.length_range: given -2 (integer) at place 2 of the list; allowed: list of 2: ",
        ),
        (
            "stages=['sft', 'rl']",
            "stages: given \"rl\" (text) at place 2 of the list; allowed: list of 'sft', 'reward' or 'ppo'",
        ),
        ("ppo.kl_coeff=1", "ppo.kl_coeff: unknown key (given 1 (integer)); nearest known key: ppo.kl_coef"),
        ("kl_coef=1", "kl_coef: unknown key (given 1 (integer)); nearest known key: ppo.kl_coef"),
        ("data.text.path=a", "data.text: unknown key (given {'path': 'a'} (table)); nearest known key: data.texts"),
        ("data.texts.pth=a", 'data.texts.pth: unknown key (given "a" (text)); nearest known key: data.texts.path'),
        ("qqqq=1", "qqqq: unknown key (given 1 (integer)); nearest known key: "),
        ("data.texts=3", "data.texts: given 3 (integer); allowed: a table with the keys path, columns, max_rows"),
        ("seed=2026-01-01", "seed: given the date 2026-01-01; no setting is a date or time"),
        ("sampling.top_k=5", "sampling: top_p = 1.0, top_k = 5: truncated sampling draws from another distribution"),
        ("ppo.learning_rate=-1", "ppo.learning_rate: given -1 (integer); allowed: number >"),
    ],
)
def test_an_error_says_key_given_and_allowed(tmp_path: Path, override: str, message: str) -> None:
    found = problems(tmp_path, "", override)
    assert len(found) == 1
    assert found[0].startswith(message)


def test_every_problem_is_listed(tmp_path: Path) -> None:
    found = problems(tmp_path, "[ppo]\nsteps = 'x'\ngamma = nan\n[sampling]\ntemperature = 0\nfoo = 1\n", "seed=-1")
    assert sorted(problem.partition(":")[0] for problem in found) == [
        "ppo.gamma", "ppo.steps", "sampling.foo", "sampling.temperature", "seed",
    ]  # fmt: skip


def test_missing_settings_are_named(tmp_path: Path) -> None:
    path = tmp_path / "run.toml"
    path.write_text("[data.texts]\nmax_rows = 1\n")
    with pytest.raises(ConfigError) as caught:
        load_config(path)
    assert [p.partition(":")[0] for p in caught.value.problems] == ["output", "model", "data.texts.path"]
    assert "no default" in caught.value.problems[0]


@pytest.mark.parametrize("override", ["ppo.steps", "=3", "ppo..steps=3", "output.x=3"])
def test_a_bad_override_is_shown(tmp_path: Path, override: str) -> None:
    with pytest.raises(ConfigError) as caught:
        load(tmp_path, "", override)
    assert override in str(caught.value)


def test_an_override_cannot_smuggle_in_other_keys(tmp_path: Path) -> None:
    assert load(tmp_path, "", "output=1\nseed = 9").seed == 0


def test_unreadable_files_are_explained(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"absent\.toml: 1 problem\n  no such file; `fourfold init`"):
        load_config(tmp_path / "absent.toml")
    with pytest.raises(ConfigError, match=r"a folder; allowed: a TOML file of settings$"):
        load_config(tmp_path)
    path = tmp_path / "run.toml"
    path.write_text('output = "x"\nseed = = 3\n')
    with pytest.raises(ConfigError, match=r"not valid TOML: .*\(at line 2, column 8\): seed = = 3"):
        load_config(path)
    path.write_bytes(b'output = "\xff"\n')
    with pytest.raises(ConfigError, match="byte 10 is not UTF-8"):
        load_config(path)


def test_a_run_without_held_out_data_is_allowed(tmp_path: Path) -> None:
    """FAULTS N2."""
    config = load(tmp_path)
    assert config.data.prompts_test is None
    assert parse_config(_tree(dump_toml(config)), "dump") == config


def _tree(text: str) -> dict[str, Any]:
    import tomllib

    return tomllib.loads(text)


PPO_ONLY = ["data={prompts = {path = 'prompts.parquet'}}", "stages=['ppo']"]
FUNCTION = [*PPO_ONLY, "reward.source=function", "reward.function=a.b:c", "critic.init=actor"]
EVALUATED = "[data.prompts_test]\npath='t.csv'\n"


@pytest.mark.parametrize(
    ("extra", "overrides"),
    [
        ("", []),
        (EVALUATED, ["evaluation.judge=vader", "checkpoint.best_metric=eval_judge_mean", "evaluation.every=5"]),
        ("", ["sharing.mode=none"]),
        ("", [*FUNCTION, "reward.retries=0", "reward.on_failure=drop"]),
        ("", [*PPO_ONLY, "reward.source=checkpoint", "reward.checkpoint=runs/rm"]),
        ("", ["stages=['reward', 'ppo']"]),
        ("", ["stages=['reward', 'ppo']", "reward.init=sft"]),
        ("", ["ppo.kl_coef=0", "ppo.kl_loss_coef=0.1", "ppo.kl_loss_estimator=k3", "ppo.target_kl=0"]),
        ("", ["ppo.kl_controller=adaptive", "ppo.kl_target=3", "tracking.trackers=['tensorboard']"]),
        ("", ["data.texts.columns.text='a \\\\ \"b\" é \\n'", "ppo.length_penalty=1", "ppo.length_range=[2, 9]"]),
    ],
)
def test_what_is_saved_loads_to_the_same(tmp_path: Path, extra: str, overrides: list[str]) -> None:
    config = load(tmp_path, extra, *overrides)
    path = tmp_path / "resolved.toml"
    path.write_text(dump_toml(config))
    again = load_config(path)
    assert again == config
    assert dump_toml(again) == dump_toml(config)


def test_a_default_that_falls_back_is_not_written_down(tmp_path: Path) -> None:
    """ "sft" given where there is no sft is an error, so a saved default would not load to the same."""
    for overrides, saved in (
        (["stages=['reward', 'ppo']"], False),
        (["stages=['reward', 'ppo']", "reward.init=base"], True),
        ([], True),
    ):
        assert ("init" in _tree(dump_toml(load(tmp_path, "", *overrides)))["reward"]) == saved


finite = st.floats(min_value=0, max_value=1e300, exclude_min=True, allow_nan=False)


@given(
    text=st.text(st.characters(codec="utf-8"), min_size=1),
    stops=st.lists(st.text(st.characters(codec="utf-8"), min_size=1)),
    number=finite,
    fraction=st.floats(0, 1),
    count=st.integers(0, 2**62),
)
@settings(max_examples=50, deadline=None)
def test_any_text_and_number_survives(text: str, stops: list[str], number: float, fraction: float, count: int) -> None:
    tree = _tree(MINIMAL)
    tree["output"] = text
    tree["seed"] = count
    tree["data"]["texts"]["columns"] = {"text": text}
    tree["sampling"] = {"stop_strings": stops, "temperature": max(number, 0.001)}
    tree["ppo"] = {"gamma": fraction, "target_kl": number, "eps": number}
    config = parse_config(tree, "test")
    assert parse_config(_tree(dump_toml(config)), "dump") == config
    assert config.output == text and config.ppo.gamma == fraction and config.sampling.temperature == max(number, 0.001)


def test_paths_are_checked_apart(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    config = load(tmp_path, "", "model.path=./models/tiny", "output=run.toml/x")
    with pytest.raises(ConfigError) as caught:
        check_paths(config)
    keys = [problem.partition(":")[0] for problem in caught.value.problems]
    assert keys == ["model.path", "data.texts.path", "data.pairs.path", "data.prompts.path", "output"]
    for name in ("texts.jsonl", "pairs.csv", "prompts.parquet"):
        (tmp_path / name).touch()
    (tmp_path / "models" / "tiny").mkdir(parents=True)
    with pytest.raises(ConfigError, match=r"holds no config\.json"):
        check_paths(load(tmp_path, "", "model.path=./models/tiny"))
    (tmp_path / "models" / "tiny" / "config.json").touch()
    check_paths(load(tmp_path, "", "model.path=./models/tiny"))
    check_paths(load(tmp_path, "", "data.texts.path=imdb:train", "model.path=owner/model"))
    (tmp_path / "prompts.parquet").rename(tmp_path / "PROMPTS.Parquet")
    check_paths(load(tmp_path, "", "data.prompts.path=PROMPTS.Parquet"))


@pytest.mark.parametrize(
    ("override", "message"),
    [
        ("model.path=x.gguf", "model.path: no file 'x.gguf'"),
        ("model.path=package:no_such_package_here/x.gguf", "needs the Python package 'no_such_package_here'"),
        ("model.path=package:json/absent.gguf", "no file 'absent.gguf' in "),
        ("model.path=package:json/decoder.py", ""),
        ("model.path=/a/b/c", "model.path: no folder '/a/b/c'"),
        ("data.texts.path=./texts.txt", "allowed: files that end in .jsonl, .parquet, .csv, or a hub id"),
        ("data.texts.path=~/no-such-file.jsonl", "data.texts.path: no file '~/no-such-file.jsonl'"),
        ("data.texts.path=imdb", "data.texts.path: 'imdb'; allowed: files .*, or a hub id with its split, such as"),
        ("data.pairs.path=owner/set", "data.pairs.path: 'owner/set'; allowed: files .*, or a hub id with its split"),
        ("data.pairs.path=owner/set:", "data.pairs.path: 'owner/set:'; allowed"),
        ("data.pairs.path=:train", "data.pairs.path: ':train'; allowed"),
        ("data.pairs.path=owner/set:train", ""),
    ],
)
def test_a_path_that_is_not_there(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, override: str, message: str) -> None:
    monkeypatch.chdir(tmp_path)
    for name in ("texts.jsonl", "pairs.csv", "prompts.parquet"):
        (tmp_path / name).touch()
    config = load(tmp_path, "", override)
    if not message:
        check_paths(config)
        return
    with pytest.raises(ConfigError) as caught:
        check_paths(config)
    [problem] = caught.value.problems
    assert re.search(message, problem), problem


def test_only_a_model_that_is_converted_needs_the_cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    for name in ("texts.jsonl", "pairs.csv", "prompts.parquet", "x.gguf"):
        (tmp_path / name).touch()
    check_paths(load(tmp_path, "", "model.cache=pairs.csv/x"))
    with pytest.raises(ConfigError, match=r"model\.cache: 'pairs\.csv/x' cannot be made.* is not a folder") as caught:
        check_paths(load(tmp_path, "", "model.cache=pairs.csv/x", "model.path=x.gguf"))
    assert len(caught.value.problems) == 1


def test_reward_checkpoint_must_be_a_folder(tmp_path: Path) -> None:
    config = load(tmp_path, "", *PPO_ONLY, "reward.source=checkpoint", f"reward.checkpoint={tmp_path / 'rm'}")
    with pytest.raises(ConfigError, match=r"reward\.checkpoint: no folder"):
        check_paths(config)


OWN_MODEL = [*PPO_ONLY, "reward.source=model", "critic.init=actor"]


def test_roles_with_models_of_their_own_need_their_folders(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    for name in ("texts.jsonl", "pairs.csv", "prompts.parquet"):
        (tmp_path / name).touch()
    (tmp_path / "bare").mkdir()
    given = [*OWN_MODEL, "data.prompts.path=prompts.parquet"]
    check_paths(load(tmp_path, "", *given, "reward.model=owner/judge", "reference.model=owner/larger"))
    with pytest.raises(ConfigError, match=r"reward\.model: no folder './none'") as caught:
        check_paths(load(tmp_path, "", *given, "reward.model=./none", "reference.model=bare", "model.path=a/b"))
    assert [problem.split(":")[0] for problem in caught.value.problems] == ["reward.model", "reference.model"]
    cached = load(tmp_path, "", *given, "reward.model=owner/judge", "reward.engine=onnx", "model.cache=pairs.csv/x")
    with pytest.raises(ConfigError, match=r"model\.cache: 'pairs\.csv/x' cannot be made"):
        check_paths(cached)


def test_an_engine_needs_its_packages(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    config = load(tmp_path, "", *OWN_MODEL, "reward.model=owner/judge", "reward.engine=onnx_int8")
    check_packages(config)
    real = importlib.util.find_spec
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None if name == "onnxscript" else real(name))
    with pytest.raises(ConfigError, match=r"reward\.engine = 'onnx_int8' \(the extra onnx\), but .* onnxscript is not"):
        check_packages(config)


def test_missing_packages_are_found_at_start(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """FAULTS N4: a log backend that is not installed is an error before anything runs."""
    hub = ["data.texts.path=imdb:train", "data.pairs.path=owner/set:train"]
    config = load(tmp_path, EVALUATED, "tracking.trackers=['tensorboard']", "evaluation.judge=vader", *hub)
    monkeypatch.setattr(sys, "path", [])
    for name in [name for name in sys.modules if name.split(".")[0] in ("tensorboard", "vaderSentiment", "datasets")]:
        monkeypatch.delitem(sys.modules, name)
    with pytest.raises(ConfigError, match="tensorboard is not installed") as caught:
        check_packages(config)
    assert len(caught.value.problems) == 3
    assert (
        "data.texts.path = 'imdb:train' and data.pairs.path = 'owner/set:train', read from the hub, but the Python "
        "package datasets is not installed; try: pip install datasets"
    ) in caught.value.problems
    check_packages(load(tmp_path))


def test_packages_of_fewer_bits_are_found_at_start(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    config = load(tmp_path, "", "precision.frozen=int8_dynamic", "precision.reward=nf4", "ppo.optimizer=adamw_8bit")
    monkeypatch.setattr("fourfold.config.paths.importlib.util.find_spec", lambda name: None)
    with pytest.raises(ConfigError) as caught:
        check_packages(config)
    nf4, int8 = sorted(caught.value.problems, key=lambda problem: "torchao" in problem)
    assert "precision.reward = 'nf4' and ppo.optimizer = 'adamw_8bit'" in nf4 and "bitsandbytes is not" in nf4
    assert "precision.frozen = 'int8_dynamic', but the Python package torchao is not installed" in int8


def test_torch_is_not_imported() -> None:
    code = "import sys, fourfold.config, fourfold.config.template; sys.exit('torch' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code], check=False).returncode == 0


def extended(tmp_path: Path, text: str) -> Path:
    """A file `levers/mine.toml` with this text, beside the minimal one as `run.toml` in the folder above."""
    (tmp_path / "run.toml").write_text(MINIMAL + "[ppo]\nsteps = 7\nkl_coef = 0.2\n")
    path = tmp_path / "levers" / "mine.toml"
    path.parent.mkdir()
    path.write_text(text)
    return path


def test_a_file_stands_on_top_of_the_one_that_it_extends(tmp_path: Path) -> None:
    path = extended(tmp_path, 'extends = "../run.toml"\noutput = "runs/mine"\n[ppo]\nsteps = 9\n')
    config = load_config(path, ["ppo.num_epochs=1"])
    assert (config.output, config.model.path) == ("runs/mine", "owner/model")
    assert (config.ppo.steps, config.ppo.kl_coef, config.ppo.num_epochs) == (9, 0.2, 1)
    saved = tmp_path / "saved.toml"
    saved.write_text(dump_toml(config))
    assert "extends" not in saved.read_text()
    assert load_config(saved) == config


@pytest.mark.parametrize(
    ("value", "said"),
    [
        ("3", "given 3 (integer); allowed: the path of another file"),
        ('""', "allowed: the path of another file"),
        ('"run.toml"', "no file"),
        ('"mine.toml"', "comes back to itself"),
    ],
)
def test_a_file_that_extends_nothing_good_is_refused(tmp_path: Path, value: str, said: str) -> None:
    path = extended(tmp_path, f"extends = {value}\n")
    with pytest.raises(ConfigError, match="extends") as caught:
        load_config(path)
    assert said in str(caught.value)


def test_files_that_extend_each_other_are_refused(tmp_path: Path) -> None:
    path = extended(tmp_path, 'extends = "../other.toml"\n')
    (tmp_path / "other.toml").write_text('extends = "levers/mine.toml"\n')
    with pytest.raises(ConfigError, match="comes back to itself"):
        load_config(path)


def test_extends_is_a_key_of_files_only(tmp_path: Path) -> None:
    assert any("extends: unknown key" in problem for problem in problems(tmp_path, "", "extends=run.toml"))
