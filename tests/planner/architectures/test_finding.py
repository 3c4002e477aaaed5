"""What a user may call a model."""

from __future__ import annotations

import json
import re
import subprocess
import sys
from pathlib import Path

import pytest

from fourfold.planner.architectures import Architecture, find_architecture
from fourfold.planner.architectures.published import PUBLISHED

CONFIG = dict(PUBLISHED["smollm2-135m"].config)


@pytest.fixture(autouse=True)
def empty_cache(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Path:
    """No model of this machine's own cache is found."""
    monkeypatch.setenv("HF_HOME", str(tmp_path / "home"))
    monkeypatch.delenv("HF_HUB_CACHE", raising=False)
    return tmp_path / "home" / "hub"


def cached(cache: Path, name: str, commits: dict[str, dict], main: str) -> None:
    """A repository as the hub's client lays it down."""
    folder = cache / f"models--{name.replace('/', '--')}"
    for commit, config in commits.items():
        (folder / "snapshots" / commit).mkdir(parents=True)
        (folder / "snapshots" / commit / "config.json").write_text(json.dumps(config))
    if main:
        (folder / "refs").mkdir()
        (folder / "refs" / "main").write_text(main)


def test_a_folder_and_its_config(tmp_path: Path) -> None:
    (tmp_path / "mine").mkdir()
    file = tmp_path / "mine" / "config.json"
    file.write_text(json.dumps(CONFIG))
    for name in (tmp_path / "mine", file):
        found = find_architecture(str(name))
        assert found.architecture == Architecture.from_config(CONFIG)
        assert (found.name, found.source) == (name.name, str(file))


@pytest.mark.parametrize("name", ["llama-2-7b", "Llama-2-7B", "meta-llama/Llama-2-7b-hf"])
def test_a_published_model_by_its_name_or_its_hub_id(name: str) -> None:
    found = find_architecture(name)
    assert found.name == "llama-2-7b" and "meta-llama/Llama-2-7b-hf" in found.source
    assert found.architecture.parameters() == 6_738_415_616


def test_every_published_model_is_found() -> None:
    for name, model in PUBLISHED.items():
        assert find_architecture(name).architecture == find_architecture(model.hub).architecture
        assert find_architecture(name).name == name


def test_a_hub_id_in_the_cache_comes_before_the_table(empty_cache: Path) -> None:
    """A repository may have changed since the table was written."""
    cached(empty_cache, "meta-llama/Llama-2-7b-hf", {"abc": {**CONFIG, "num_hidden_layers": 5}, "def": CONFIG}, "abc")
    found = find_architecture("meta-llama/Llama-2-7b-hf")
    assert found.architecture.layers == 5 and "abc" in found.source
    assert find_architecture("llama-2-7b").architecture.layers == 32


def test_a_hub_id_without_a_branch_main_or_an_owner(empty_cache: Path) -> None:
    cached(empty_cache, "someone/tiny", {"abc": CONFIG}, "")
    assert find_architecture("someone/tiny").architecture.layers == 30
    cached(empty_cache, "distilgpt2", {"abc": {**PUBLISHED["gpt2"].config, "n_layer": 6}}, "abc")
    assert find_architecture("distilgpt2").architecture.layers == 6


def test_an_unknown_name_is_refused_with_those_near_it() -> None:
    with pytest.raises(ValueError, match=r"did you mean 'llama-2-7b'.*allowed: a folder.*opt-66b"):
        find_architecture("lama-2-7b")
    with pytest.raises(ValueError, match=r"did you mean 'qwen2.5-7b'"):
        find_architecture("Qwen/Qwen2.5-7B-Instruct-of-mine")


def test_wrong_paths_and_files_are_named(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match=r"no file or folder './none'"):
        find_architecture("./none")
    (tmp_path / "weights.bin").write_text("x")
    with pytest.raises(ValueError, match=r"holds no config\.json but weights\.bin"):
        find_architecture(str(tmp_path))
    for text, said in (("{", "cannot be read"), ("[1]", "holds a list"), ('{"model_type": "mamba"}', "'mamba'")):
        (tmp_path / "config.json").write_text(text)
        with pytest.raises(ValueError, match=said):
            find_architecture(str(tmp_path))
    (tmp_path / "config.json").write_text(json.dumps({**CONFIG, "hidden_size": "wide"}))
    with pytest.raises(ValueError, match="wide"):
        find_architecture(str(tmp_path))


@pytest.mark.parametrize(
    ("key", "value", "said"),
    [
        ("num_hidden_layers", 0, "layers = 0: allowed are whole numbers from 1 on"),
        ("num_hidden_layers", -2, "num_hidden_layers = -2; allowed are whole numbers from 0 on"),
        ("num_hidden_layers", "two", "num_hidden_layers = 'two'; allowed"),
        ("num_attention_heads", 0, "hidden size 576 is not a multiple of 0 attention heads"),
        ("vocab_size", True, "vocab_size = True; allowed"),
        ("num_key_value_heads", "3", "kv_heads = '3': allowed are whole numbers from 1 on"),
        ("num_key_value_heads", 4, "9 heads and 4 KV heads: allowed is a divisor of the heads"),
        ("head_dim", -1, "head_dim = -1: allowed"),
    ],
)
def test_a_config_with_sizes_that_no_model_has_is_refused(tmp_path: Path, key: str, value: object, said: str) -> None:
    (tmp_path / "config.json").write_text(json.dumps({**CONFIG, key: value}))
    with pytest.raises(ValueError, match=re.escape(said)):
        find_architecture(str(tmp_path))


def test_a_file_in_a_package(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    (tmp_path / "holds_a_model").mkdir()
    (tmp_path / "holds_a_model" / "__init__.py").write_text("raise RuntimeError('imported')")
    (tmp_path / "holds_a_model" / "m.gguf").write_bytes(b"none")
    monkeypatch.syspath_prepend(tmp_path)
    with pytest.raises(ValueError, match=r"holds_a_model.m\.gguf' is no whole GGUF"):
        find_architecture("package:holds_a_model/m.gguf")
    with pytest.raises(ValueError, match=r"no 'n\.gguf'; its \.gguf files: m\.gguf"):
        find_architecture("package:holds_a_model/n.gguf")
    with pytest.raises(ValueError, match=r"'not_there' is not installed"):
        find_architecture("package:not_there/m.gguf")


def test_names_are_found_without_torch_or_numpy() -> None:
    code = (
        "import sys; from fourfold.planner.architectures import find_architecture; find_architecture('gpt2'); "
        "sys.exit(bool({'torch', 'transformers', 'numpy', 'huggingface_hub'} & set(sys.modules)))"
    )
    assert subprocess.run([sys.executable, "-c", code]).returncode == 0
