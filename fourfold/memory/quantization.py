"""Frozen linear layers whose weights are held in 8 or 4 bits, by the field's libraries.

int8: torchao, one float32 scale an output row. int8_dynamic: the same weights, and every row of activations is rounded
to 8 bits before an integer product. nf4: bitsandbytes' 4-bit NormalFloat with double quantisation (Dettmers et al.
2023, "QLoRA"). What it saves: of half-precision matrices a half, or three quarters. What it costs: widening them for
each product. What it changes: the weights; models/quantized.py measures by how much and refuses too much.

The layers hold the libraries' codes and scales as plain parameters and lend them to the libraries' kernels. So they are
counted, parked, streamed, copied and checksummed as any other weight; and bitsandbytes never repacks them: its own
module does so on CPUs with AVX512-BF16 in a forward pass without gradients, and gradients through it are wrong from
there on.
"""

from __future__ import annotations

import contextlib
import importlib
import importlib.util
import logging
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator
from functools import cache
from typing import Any, ClassVar

import torch
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from fourfold.algorithms.products import linear, matmul, product_dtype
from fourfold.planner.quantization import NF4_BLOCK, NF4_SCALE_BLOCK

LIBRARIES = {"int8": "torchao", "int8_dynamic": "torchao", "nf4": "bitsandbytes"}
# Largest |W' - W| / |W|: normally distributed weights are at 0.004 and 0.09.
WEIGHT_BOUNDS = {"int8": 0.05, "int8_dynamic": 0.05, "nf4": 0.2}
# Said at import about kernels that are not used here: of other GPUs, of an extra package, of torch.compile.
IRRELEVANT = {
    "torchao": "Failed to load ",
    "torch.utils._pytree": "is an Enum subclass",
    "bitsandbytes.backends.cpu.ops": "Failed to load CPU gemm_4bit_forward",
}


@cache
def quiet_imports() -> None:
    """Drop what the libraries log at import about kernels that are not used here, and nothing else."""
    for logger, text in IRRELEVANT.items():
        logging.getLogger(logger).addFilter(lambda record, text=text: text not in record.msg)


def library(kind: str, module: str = "") -> Any:
    """The library of a kind, or a module of it; ValueError names the extra that brings it."""
    name = LIBRARIES[kind]
    if importlib.util.find_spec(name) is None:
        raise ValueError(
            f"weights in {kind!r} need the Python package {name}; try: pip install 'fourfold[{name}]', or 'auto'"
        )
    quiet_imports()
    return importlib.import_module(f"{name}.{module}" if module else name)


class _Product(torch.autograd.Function):
    """y = x W^T + b by a layer's kernel; dx = dy W with W widened again, so no widened copy waits for it.

    The rounding of activations is passed straight through (Bengio et al. 2013): it has no useful derivative.
    """

    @staticmethod
    def forward(ctx: Any, x: Tensor, layer: QuantizedLinear) -> Tensor:
        ctx.layer = layer
        return layer.product(x)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor, None]:
        [grad] = grads
        return matmul(grad, ctx.layer.dequantized(grad.dtype)), None


class QuantizedLinear(nn.Linear, ABC):
    """A frozen linear layer of another one's weights [outputs, inputs], held in fewer bits."""

    kind: ClassVar[str]

    def __init__(self, linear: nn.Module) -> None:
        nn.Module.__init__(self)  # no float weight is made
        weight = _matrix(linear)
        self.out_features, self.in_features = weight.shape
        self.dtype = weight.dtype
        self.exact = False  # whether products are those of the widened weights
        self.register_parameter("bias", _bias(linear))
        for name, tensor in self.quantized(weight).items():
            self.register_parameter(name, nn.Parameter(tensor, requires_grad=False))

    @abstractmethod
    def quantized(self, weight: Tensor) -> dict[str, Tensor]:
        """Codes and scales by name."""

    @abstractmethod
    def dequantized(self, dtype: torch.dtype) -> Tensor:
        """The numbers that the codes stand for."""

    @abstractmethod
    def product(self, x: Tensor) -> Tensor:
        """x W^T + b by the library's kernel, without gradient."""

    @property
    def weight(self) -> Tensor:  # pyright: ignore[reportIncompatibleVariableOverride]
        """The dequantised weight in the type that it had: made anew by each call."""
        return self.dequantized(self.dtype)

    def bias_as(self, x: Tensor) -> Tensor | None:
        """The bias in the type of the activations."""
        bias = _bias(self)
        return None if bias is None else bias.to(x.dtype)

    def forward(self, input: Tensor) -> Tensor:
        """[..., inputs] to [..., outputs]; under autocast in its type, as nn.Linear."""
        device = input.device.type
        if torch.is_autocast_enabled(device):
            input = input.to(torch.get_autocast_dtype(device))
        if self.exact:
            # Checkpointed: of all the widened weights, one is in memory.
            return checkpoint(self._exact_product, input, use_reentrant=False)
        return _Product.apply(input, self)

    def _exact_product(self, x: Tensor) -> Tensor:
        return linear(x, self.dequantized(x.dtype), self.bias_as(x))


class Int8Linear(QuantizedLinear):
    """8-bit weights with a scale an output row."""

    kind = "int8"
    codes: nn.Parameter  # int8 [outputs, inputs]
    scales: nn.Parameter  # float32 [outputs, 1]

    @staticmethod
    def config() -> Any:
        """torchao's recipe."""
        return library("int8", "quantization").Int8WeightOnlyConfig(set_inductor_config=False)

    def quantized(self, weight: Tensor) -> dict[str, Tensor]:
        """Symmetric rounding of each row to 255 steps."""
        holder = nn.Linear(1, 1, bias=False, device="meta")
        holder.weight = nn.Parameter(weight.detach(), requires_grad=False)
        library(self.kind, "quantization").quantize_(holder, self.config())
        held: Any = holder.weight
        self.activations = held.act_quant_kwargs  # how activations are rounded, where they are
        return {"codes": held.qdata, "scales": held.scale}

    def _tensor(self, dtype: torch.dtype) -> Any:
        kind = library(self.kind, "quantization").Int8Tensor
        return kind(self.codes, self.scales, [1, self.in_features], dtype, act_quant_kwargs=self.activations)

    def dequantized(self, dtype: torch.dtype) -> Tensor:
        """codes * scales."""
        return self._tensor(dtype).dequantize()

    def product(self, x: Tensor) -> Tensor:
        """x W^T + b."""
        wide = x.to(product_dtype(x.device.type, x.dtype))
        return nn.functional.linear(wide, self._tensor(wide.dtype), self.bias_as(wide)).to(x.dtype)


class Int8DynamicLinear(Int8Linear):
    """The same weights; activations are rounded to 8 bits row by row, and the product is one of integers."""

    kind = "int8_dynamic"

    @staticmethod
    def config() -> Any:
        """torchao's recipe."""
        return library("int8_dynamic", "quantization").Int8DynamicActivationInt8WeightConfig(set_inductor_config=False)


class NF4Linear(QuantizedLinear):
    """4-bit NormalFloat weights in blocks of 64, whose scales are held in 8 bits."""

    kind = "nf4"
    codes: nn.Parameter  # uint8 [numbers / 2, 1]
    scales: nn.Parameter  # uint8 [blocks]
    scales_of_scales: nn.Parameter  # float32 [blocks / 256]
    offset: nn.Parameter  # float32 []: the scales' mean

    def quantized(self, weight: Tensor) -> dict[str, Tensor]:
        """QLoRA's two rounds of quantisation."""
        functional = library("nf4", "functional")
        codes, state = functional.quantize_4bit(
            weight.contiguous(), blocksize=NF4_BLOCK, compress_statistics=True, quant_type="nf4"
        )
        assert state.state2.blocksize == NF4_SCALE_BLOCK
        return {
            "codes": codes,
            "scales": state.absmax,
            "scales_of_scales": state.state2.absmax,
            "offset": state.offset.float(),
        }

    def _state(self, dtype: torch.dtype, *shape: int) -> Any:
        functional = library("nf4", "functional")
        return functional.QuantState(
            absmax=self.scales,
            shape=torch.Size(shape),
            dtype=dtype,
            blocksize=NF4_BLOCK,
            quant_type="nf4",
            code=_nf4_numbers(self.codes.device),
            offset=self.offset,
            state2=functional.QuantState(
                absmax=self.scales_of_scales,
                dtype=torch.float32,
                blocksize=NF4_SCALE_BLOCK,
                code=_scale_numbers(self.codes.device),
            ),
        )

    def dequantized(self, dtype: torch.dtype) -> Tensor:
        """NormalFloat numbers * scales.

        As one row: bitsandbytes 0.50 takes wrong scales on CPUs with AVX512 where rows do not end with a block.
        """
        numbers = self.out_features * self.in_features
        flat = library("nf4", "functional").dequantize_4bit(self.codes, self._state(dtype, 1, numbers))
        return flat.view(self.out_features, self.in_features)

    def product(self, x: Tensor) -> Tensor:
        """x W^T + b; on a CPU bitsandbytes' kernel is no other, but for its scales."""
        if x.device.type == "cpu":
            return linear(x, self.dequantized(x.dtype), self.bias_as(x))
        state = self._state(x.dtype, self.out_features, self.in_features)
        return library("nf4").matmul_4bit(x, self.codes, quant_state=state, bias=self.bias_as(x))


@cache
def _nf4_numbers(device: torch.device) -> Tensor:
    """The 16 numbers that 4 bits stand for."""
    return library("nf4", "functional").get_4bit_type("nf4", device=device)


@cache
def _scale_numbers(device: torch.device) -> Tensor:
    """The 256 numbers that a scale's 8 bits stand for."""
    return library("nf4", "functional").create_dynamic_map().to(device)


KINDS: dict[str, type[QuantizedLinear]] = {each.kind: each for each in (Int8Linear, Int8DynamicLinear, NF4Linear)}


def _is_transposed(module: nn.Module) -> bool:
    """GPT-2's Conv1D keeps [inputs, outputs]."""
    return type(module).__name__ == "Conv1D"


def _matrix(linear: nn.Module) -> Tensor:
    """The weight as [outputs, inputs]."""
    weight = linear.get_parameter("weight").detach()
    return weight.t().contiguous() if _is_transposed(linear) else weight


def _bias(linear: nn.Module) -> nn.Parameter | None:
    return dict(linear.named_parameters(recurse=False)).get("bias")


@torch.no_grad()
def quantize(modules: nn.Module, kind: str, *, but: Callable[[str], bool] = lambda name: False) -> None:
    """Replace the linear layers inside, `but` for some names, by quantised ones: one after the other, so that of one
    at a time both are there."""
    for name, child in list(modules.named_modules()):
        plain = isinstance(child, nn.Linear) and not isinstance(child, QuantizedLinear)
        if (plain or _is_transposed(child)) and not but(name):
            made = KINDS[kind](child)
            _check(made, _matrix(child), name)
            _replace(modules, name, made)


def _check(made: QuantizedLinear, weight: Tensor, name: str) -> None:
    """Codes that stand for other numbers are a fault of a library on this machine, or weights beyond its reach."""
    before = weight.float()
    error = float((made.dequantized(torch.float32) - before).norm() / before.norm().clamp(min=1e-30))
    if not error <= WEIGHT_BOUNDS[made.kind]:
        raise ValueError(
            f"weights in {made.kind!r}: those of {name} are off by {error:.2g} of their norm (allowed "
            f"{WEIGHT_BOUNDS[made.kind]:g}); this model does not bear it; try 'int8' or 'auto'"
        )


@torch.no_grad()
def dequantize(modules: nn.Module, dtype: torch.dtype = torch.float32) -> None:
    """Replace the quantised layers inside by plain ones with the numbers that the codes stand for."""
    for name, child in list(modules.named_modules()):
        if isinstance(child, QuantizedLinear):
            plain = nn.Linear(1, 1, bias=False, device="meta")
            plain.out_features, plain.in_features = child.out_features, child.in_features
            plain.weight = nn.Parameter(child.dequantized(dtype), requires_grad=False)
            plain.register_parameter("bias", _bias(child))
            _replace(modules, name, plain)


def _replace(modules: nn.Module, name: str, new: nn.Module) -> None:
    parent, _, last = name.rpartition(".")
    setattr(modules.get_submodule(parent), last, new)


def kind_of(module: nn.Module) -> str:
    """The kind of the quantised layers inside; empty where there are none."""
    return next((each.kind for each in module.modules() if isinstance(each, QuantizedLinear)), "")


def stands_for(modules: nn.Module) -> dict[int, tuple[str, int]]:
    """Of every tensor of a quantised layer, by its id: the kind, and how many weights it stands for."""
    return {
        id(p): (layer.kind, layer.in_features * layer.out_features if name == "codes" else 0)
        for layer in modules.modules()
        if isinstance(layer, QuantizedLinear)
        for name, p in layer.named_parameters()
        if name != "bias"
    }


@contextlib.contextmanager
def exact_products(module: nn.Module) -> Iterator[None]:
    """Within, the quantised layers multiply with their widened weights by torch, derivatives too: the yardstick."""
    layers = [each for each in module.modules() if isinstance(each, QuantizedLinear)]
    for layer in layers:
        layer.exact = True
    try:
        yield
    finally:
        for layer in layers:
            layer.exact = False
