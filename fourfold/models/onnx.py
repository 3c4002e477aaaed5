"""ONNX Runtime as the engine of a reward model of another family, with float32 or INT8 weights.

What it saves: INT8 holds a quarter of float32's bytes; beside a GPU it takes none of the GPU's memory. What it costs:
an export, once for each model, and torch's copy while a run is loaded; with gated MLPs (Llama's kind) a slower
product, because there weights alone are in INT8. What it changes: scores, by rounding (onnx) or
by a few per cent (onnx_int8), within the bounds below, which every start checks. What it excludes: other places than
the CPU, where the weights stay for the whole run.
"""

from __future__ import annotations

import hashlib
import importlib.util
import logging
import os
import shutil
import tempfile
import warnings
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import torch
from jaxtyping import Float32
from torch import Tensor, nn

from fourfold.memory.budget import Budget, give_back
from fourfold.models.classifier import TorchClassifier
from fourfold.models.external import External, relative_gap
from fourfold.models.outside import Outside
from fourfold.models.residency import HostResidency
from fourfold.models.roles import checksum
from fourfold.models.text_reader import TextReader, probe

log = logging.getLogger(__name__)

PACKAGES = ("onnx", "onnxruntime", "onnxscript")
FILE = "model.onnx"
# Largest difference from torch's scores on the probe, relative to the largest of them: float32 in another order of
# sums; weights and activations of 8 bits, which docs/memory.md has measured.
BOUNDS = {"onnx": 1e-3, "onnx_int8": 0.2}
# Of what is exported: another one is made anew, whatever a cache holds.
_FORM = "2"
# Protocol buffers end at 2 GiB: weights beyond this lie in a file beside the graph.
_INLINE_BYTES = 1_500_000_000


class OnnxClassifier(nn.Module):
    """A session of ONNX Runtime on the CPU with as many threads as torch has."""

    def __init__(self, file: Path, content: str, budget: Budget | None = None) -> None:
        super().__init__()
        self._budget = budget or Budget()
        # Stands for the weights in checksums, so that a run does not go on with another model.
        self.register_buffer("content", torch.tensor(list(content.encode()), dtype=torch.uint8))
        import onnxruntime

        options = onnxruntime.SessionOptions()
        options.intra_op_num_threads = torch.get_num_threads()
        # Between score phases its threads must neither turn round and round nor keep what a pass has needed.
        options.add_session_config_entry("session.intra_op.allow_spinning", "0")
        options.enable_cpu_mem_arena = False
        options.enable_mem_pattern = False
        try:
            self._session = onnxruntime.InferenceSession(str(file), options, providers=["CPUExecutionProvider"])
        except Exception as error:  # the library's exceptions have no base of their own
            raise ValueError(
                f"reward.engine: ONNX Runtime cannot read {file} ({str(error).splitlines()[0]}); remove its folder, "
                "and the next start exports again"
            ) from error

    def logits(self, inputs: Mapping[str, Tensor]) -> Float32[Tensor, "batch labels"]:
        """What the model says of each row."""
        [found] = self._session.run(None, {name: ids.numpy() for name, ids in inputs.items()})
        self._budget.check()
        return torch.from_numpy(found).float()


class _Positional(nn.Module):
    """The model as the exporter wants it: tensors in the order of `names`, logits out."""

    def __init__(self, model: nn.Module, names: tuple[str, ...]) -> None:
        super().__init__()
        self.model = model
        self.names = names

    def forward(self, *tensors: Tensor) -> Tensor:
        return self.model(**dict(zip(self.names, tensors, strict=True))).logits


def run_by_onnx(external: External, cache: Path, engine: str, budget: Budget | None = None) -> None:
    """From here on ONNX Runtime scores instead of torch, whose copy is given back; ValueError where they differ."""
    if missing := [name for name in PACKAGES if importlib.util.find_spec(name) is None]:
        raise ValueError(
            f"reward.engine = {engine!r} needs the Python package{'s' * (len(missing) > 1)} {', '.join(missing)}; try: "
            "pip install 'fourfold[onnx]', or reward.engine = 'torch'"
        )
    classifier = external.classifier
    assert isinstance(classifier, TorchClassifier)
    rows = probe(external.reader)
    truth = external.readings(rows)
    folder = exported(classifier, external.reader, cache, engine)
    external.classifier = OnnxClassifier(folder / FILE, checksum([classifier]), budget)
    for found, expected in zip(external.readings(rows).T, truth.T, strict=True):
        verify_engine(found, expected, engine, folder)
    external.residency = HostResidency("cpu, onnxruntime")
    external.outside_torch = Outside(
        parameters=sum(p.numel() for p in classifier.parameters()),
        dtype="int8" if engine == "onnx_int8" else "float32",
        where=external.residency.where,
        bytes=sum(file.stat().st_size for file in folder.iterdir()),
    )
    external.take_work()
    # Emptied, not only dropped: the exporter's rules, which live as long as the process, remember the last graph.
    for tensor in (*classifier.parameters(), *classifier.buffers()):
        tensor.data = tensor.new_empty(0)
    give_back()


def verify_engine(scores: Tensor, truth: Tensor, engine: str, folder: Path) -> float:
    """The gap to torch's scores; ValueError beyond the bound of this engine."""
    gap, bound = relative_gap(scores, truth), BOUNDS[engine]
    if not gap <= bound:
        row = int((scores - truth).abs().argmax())
        other = "onnx" if engine == "onnx_int8" else "torch"
        raise ValueError(
            f"reward.engine = {engine!r}: on the probe ONNX Runtime scores {float(scores[row]):.6g} what torch scores "
            f"{float(truth[row]):.6g}, {gap:.2e} of the largest score apart (allowed {bound:.0e}); remove {folder}, "
            f"which the next start makes again, or set reward.engine = {other!r}"
        )
    return gap


def exported(classifier: TorchClassifier, reader: TextReader, cache: Path, engine: str) -> Path:
    """The model's folder in the cache, made where it is missing; named by what it holds."""
    name = f"{engine}-{_digest(classifier, reader)}"
    if not (cache / name).is_dir():
        log.info("exporting the reward model to %s (once)", cache / name)
        if engine == "onnx_int8":
            whole = exported(classifier, reader, cache, "onnx")
            _made_whole(cache / name, lambda partial: _quantise(whole / FILE, partial / FILE))
        else:
            _made_whole(cache / name, lambda partial: _export(classifier, reader, partial / FILE))
    return cache / name


def _digest(classifier: TorchClassifier, reader: TextReader) -> str:
    """Of the weights, the architecture, the inputs, the exporter and the CPU's arithmetic."""
    import transformers

    shape = classifier.model.config.to_json_string(use_diff=False)
    versions = (torch.__version__, transformers.__version__)
    parts = (_FORM, checksum([classifier]), shape, *reader.names, *versions, str(_multiplies_bytes()))
    return hashlib.blake2b("\0".join(parts).encode(), digest_size=8).hexdigest()


def _multiplies_bytes() -> bool:
    """Whether this CPU adds products of bytes up in 32 bits (VNNI); older ones do so in 16, which can be too few."""
    return getattr(torch.cpu, "_is_vnni_supported", lambda: False)()


def _made_whole(folder: Path, make: Callable[[Path], None]) -> None:
    """A folder that is there with all of its files or not at all."""
    folder.parent.mkdir(parents=True, exist_ok=True)
    partial = Path(tempfile.mkdtemp(prefix=".partial-", dir=folder.parent))
    try:
        make(partial)
        os.rename(partial, folder)
    except BaseException as error:
        shutil.rmtree(partial, ignore_errors=True)
        # Another process may have finished first.
        if not (isinstance(error, OSError) and folder.is_dir()):
            raise


def _export(classifier: TorchClassifier, reader: TextReader, file: Path) -> None:
    """Any number of rows of any length."""
    inputs = reader.batch(probe(reader))
    sizes: Any = {0: torch.export.Dim.DYNAMIC, 1: torch.export.Dim.DYNAMIC}
    with warnings.catch_warnings(), torch.no_grad():
        # torch's exporter asks torch's own trees in a way that torch has deprecated.
        warnings.filterwarnings("ignore", message=".*treespec, LeafSpec", category=FutureWarning)
        program = torch.onnx.export(
            _Positional(classifier.model, tuple(inputs)).eval(),
            args=tuple(inputs.values()),
            dynamo=True,
            input_names=list(inputs),
            output_names=["logits"],
            dynamic_shapes=(tuple(sizes for _ in inputs),),
            verbose=False,
        )
    assert program is not None, "with dynamo there is a program"
    size = sum(p.numel() * p.element_size() for p in classifier.parameters())
    program.save(file, external_data=size > _INLINE_BYTES)
    for value in program.model.graph.initializers.values():
        value.const_value = None  # see run_by_onnx


def _quantise(whole: Path, file: Path) -> None:
    """Weights in INT8, one scale an output; activations are rounded to 8 bits as they come.

    Not those of models with gated MLPs, where products of gate and value reach hundreds of times their usual size at
    single tokens: one scale for a whole batch would leave the others nothing (SmolLM2-135M: 0.4 to 0.9 of the largest
    score, with weights alone 0.06). There only weights are in INT8, one scale for 128 of them, and products in float32.
    """
    import onnx
    from onnxruntime.quantization import QuantType, quantize_dynamic
    from onnxruntime.quantization.matmul_nbits_quantizer import MatMulNBitsQuantizer

    large = sum(part.stat().st_size for part in whole.parent.iterdir()) > _INLINE_BYTES
    if _has_gates(onnx.load(whole, load_external_data=False).graph):
        quantizer = MatMulNBitsQuantizer(onnx.load(whole), bits=8, block_size=128, is_symmetric=True)
        quantizer.process()
        model: Any = quantizer.model  # by then one of ONNX Runtime's, around onnx's
        model.save_model_to_file(str(file), use_external_data_format=large)
        return
    quantize_dynamic(
        whole,
        file,
        per_channel=True,
        reduce_range=not _multiplies_bytes(),  # 7 bits, so that sums in 16 bits do not overflow
        weight_type=QuantType.QInt8,
        use_external_data_format=large,
    )


def _has_gates(graph: Any) -> bool:
    """Whether a linear layer reads a product of two tensors that are computed: of a gate and what it lets through."""
    weights = {each.name for each in graph.initializer}
    made = {name: node for node in graph.node for name in node.output}
    linear = [node for node in graph.node if node.op_type in ("MatMul", "Gemm") and node.input[1] in weights]
    sources = [made[node.input[0]] for node in linear if node.input[0] in made]
    return any(node.op_type == "Mul" and not weights & set(node.input) for node in sources)
