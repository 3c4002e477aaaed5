"""ONNX Runtime scores what torch scores; torch's copy goes; what is damaged, missing or too far off is refused."""

from __future__ import annotations

import gc
import importlib.util
import shutil
from pathlib import Path
from typing import Any

import onnx
import onnx.numpy_helper
import pytest
import torch
from torch import Tensor, nn

from fourfold.memory.budget import Budget, OverBudget
from fourfold.models.classifier import TorchClassifier
from fourfold.models.external import External, load_external, relative_gap
from fourfold.models.onnx import BOUNDS, FILE, OnnxClassifier, exported, run_by_onnx
from fourfold.models.roles import checksum
from fourfold.models.text_reader import probe
from models.test_external import config_for
from tiny import tiny_classifier

TEXTS = [
    ("abc", ""),
    ("the sea is wide and blue", ", and never still."),
    ("a", "b"),
    ("what is rain?", " water, mostly."),
]
BOTH = r"on the probe ONNX Runtime scores \S+ what torch scores \S+, \S+ of"


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Classifiers of both kinds, the encoder with two labels, and the cache of what is exported."""
    root = tmp_path_factory.mktemp("onnx")
    tiny_classifier(root / "bert", seed=2, layers=1, labels=("NO", "YES"))
    tiny_classifier(root / "llama", "llama", seed=2, layers=1)
    return root


def loaded(folder: Path, family: str, engine: str) -> External:
    label: dict[str, Any] = {"label": {"YES": 1.0, "NO": -0.5}} if family == "bert" else {}
    return load_external(config_for(folder / family, engine=engine, **label), Budget())


def scores(model: External, texts: list[tuple[str, str]] = TEXTS) -> Tensor:
    prompts, responses = zip(*texts, strict=True)
    return model.scores(model.reader.rows(prompts, responses)[0])


def tensor_bytes() -> int:
    """Bytes of every live tensor of torch, each storage once."""
    gc.collect()
    found = {}
    for each in gc.get_objects():
        if type(each) in (Tensor, nn.Parameter):  # not the exporter's shapes without numbers
            found[each.untyped_storage().data_ptr()] = each.untyped_storage().nbytes()
    return sum(found.values())


@pytest.mark.parametrize(
    ("family", "engine"), [("bert", "onnx"), ("bert", "onnx_int8"), ("llama", "onnx"), ("llama", "onnx_int8")]
)
def test_an_engine_scores_like_torch_within_its_bound(folder: Path, family: str, engine: str) -> None:
    """Batches and lengths that the export has not seen; padded rows as alone; torch's weights are gone afterwards."""
    model = loaded(folder, family, engine)
    expected = scores(model)
    assert isinstance(model.classifier, TorchClassifier)
    weights = sum(p.numel() * p.element_size() for p in model.parameters())
    held = tensor_bytes()
    run_by_onnx(model, folder / "cache", engine)
    assert tensor_bytes() <= held - weights + 1024
    assert isinstance(model.classifier, OnnxClassifier) and not list(model.parameters())
    bound = 1e-5 if engine == "onnx" else 0.1
    assert relative_gap(scores(model), expected) <= bound < BOUNDS[engine] or engine == "onnx"
    if engine == "onnx":
        alone = torch.cat([scores(model, [text]) for text in TEXTS])
        torch.testing.assert_close(alone, expected, rtol=1e-4, atol=1e-5)
    else:
        assert relative_gap(scores(model), expected) > 1e-5, "rounded to 8 bits"
    outside = model.outside_torch
    assert outside is not None and outside.parameters == weights / 4
    assert outside.dtype == ("float32" if engine == "onnx" else "int8")
    names = {path.name.rpartition("-")[0] for path in (folder / "cache").iterdir()}
    assert engine in names and not any(name.startswith(".partial") for name in names)


def test_a_pass_of_the_engine_is_held_to_the_budget(folder: Path) -> None:
    """Its memory is no tensor of torch's: what is resident after a pass says whether there was room."""
    model, budget = loaded(folder, "bert", "onnx"), Budget()
    run_by_onnx(model, folder / "cache", "onnx", budget)
    scores(model)
    budget.bytes = 1
    with pytest.raises(OverBudget, match="GiB are resident"):
        scores(model)


def test_an_export_is_found_again_and_belongs_to_its_weights(folder: Path, tmp_path: Path) -> None:
    model = loaded(folder, "bert", "onnx")
    assert isinstance(model.classifier, TorchClassifier)
    place = exported(model.classifier, model.reader, folder / "cache", "onnx")
    written = (place / FILE).stat().st_mtime_ns
    run_by_onnx(loaded(folder, "bert", "onnx"), folder / "cache", "onnx")
    assert (place / FILE).stat().st_mtime_ns == written
    with torch.no_grad():
        next(model.parameters()).add_(1.0)
    calls: list[Path] = []
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("fourfold.models.onnx._made_whole", lambda target, make: calls.append(target))
        other = exported(model.classifier, model.reader, folder / "cache", "onnx")
    assert calls == [other] and other != place
    stand_ins = [OnnxClassifier(place / FILE, content=content) for content in ("one", "one", "other")]
    one, same, different = (checksum([stand_in]) for stand_in in stand_ins)
    assert one == same != different, "a run does not go on with other weights"


def damaged(folder: Path, target: Path, factor: float) -> Path:
    """The cache with the head's weights in the exported file multiplied."""
    shutil.copytree(folder / "cache", target)
    model = loaded(folder, "bert", "onnx")
    assert isinstance(model.classifier, TorchClassifier)
    head: Any = model.classifier.model
    file = exported(model.classifier, model.reader, target, "onnx") / FILE
    graph = onnx.load(file)
    for tensor in graph.graph.initializer:
        array = onnx.numpy_helper.to_array(tensor)
        if array.size == head.classifier.weight.numel():
            tensor.CopyFrom(onnx.numpy_helper.from_array(array * factor, tensor.name))
            onnx.save(graph, file)
            return file
    raise AssertionError("the head is in the file")


def test_a_file_that_scores_otherwise_is_refused_with_both_numbers(folder: Path, tmp_path: Path) -> None:
    run_by_onnx(loaded(folder, "bert", "onnx"), folder / "cache", "onnx")
    damaged(folder, tmp_path / "cache", 1.5)
    model = loaded(folder, "bert", "onnx")
    rows = probe(model.reader)
    truth = model.scores(rows)
    with pytest.raises(ValueError, match=BOTH) as caught:
        run_by_onnx(model, tmp_path / "cache", "onnx")
    words = str(caught.value).replace(",", "").split()
    said = [float(words[i + 1]) for i, word in enumerate(words) if word == "scores"]
    assert any(said[1] == pytest.approx(float(score), rel=1e-4) for score in truth) and abs(said[0] - said[1]) > 1e-3
    assert "reward.engine = 'torch'" in str(caught.value)


def test_a_file_that_cannot_be_read_is_refused(folder: Path, tmp_path: Path) -> None:
    damaged(folder, tmp_path / "cache", 1.0).write_bytes(b"nothing")
    with pytest.raises(ValueError, match=r"ONNX Runtime cannot read .*remove its folder"):
        run_by_onnx(loaded(folder, "bert", "onnx"), tmp_path / "cache", "onnx")


def test_a_broken_export_leaves_nothing_behind(folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def breaks(classifier: Any, reader: Any, file: Path) -> None:
        file.write_bytes(b"half")
        raise OSError("disk full")

    monkeypatch.setattr("fourfold.models.onnx._export", breaks)
    with pytest.raises(OSError, match="disk full"):
        run_by_onnx(loaded(folder, "bert", "onnx"), tmp_path / "cache", "onnx")
    assert list((tmp_path / "cache").iterdir()) == []


def test_a_missing_package_names_the_extra(folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    real = importlib.util.find_spec
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None if name == "onnxruntime" else real(name))
    with pytest.raises(ValueError, match=r"needs the Python package onnxruntime; try: pip install 'fourfold\[onnx\]'"):
        run_by_onnx(loaded(folder, "bert", "onnx"), tmp_path, "onnx")


def test_threads_are_those_of_torch(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    import onnxruntime

    run_by_onnx(loaded(folder, "bert", "onnx"), folder / "cache", "onnx")
    [place] = [path for path in (folder / "cache").iterdir() if path.name.startswith("onnx-")][:1]
    asked: list[Any] = []
    real = onnxruntime.InferenceSession

    def session(file: str, options: Any, providers: list[str]) -> Any:
        asked.append((options.intra_op_num_threads, providers))
        return real(file, options, providers=providers)

    monkeypatch.setattr(onnxruntime, "InferenceSession", session)
    before = torch.get_num_threads()
    torch.set_num_threads(2)
    OnnxClassifier(place / FILE, content="")
    torch.set_num_threads(before)
    assert asked == [(2, ["CPUExecutionProvider"])]
