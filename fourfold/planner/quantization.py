"""Bytes of matrices that are held in fewer bits: pure arithmetic. fourfold.memory.quantization holds them so."""

from __future__ import annotations

QUANTIZED = ("int8", "int8_dynamic", "nf4")

# By llama.cpp: written with matrices in float16 or Q8_0, or the .gguf file that model.path names, as it is.
BY_LLAMA_CPP = ("llama_cpp", "llama_cpp_q8_0", "gguf")
# Of reward models alone, by ONNX Runtime: in float32, or INT8 with activations of 8 bits.
BY_ONNX = ("onnx", "onnx_int8")
# Bytes a weight of what is written: Q8_0 has a float16 scale for 32 numbers of 8 bits.
GGUF_BYTES = {"llama_cpp": 2.0, "llama_cpp_q8_0": 34 / 32}

# bitsandbytes: a scale for 64 numbers, itself in 8 bits, with one float32 scale for 256 scales and an offset for all.
NF4_BLOCK, NF4_SCALE_BLOCK = 64, 256


def matrix_bytes(kind: str, outputs: int, inputs: int) -> int:
    """Bytes of an [outputs, inputs] matrix with its scales."""
    numbers = outputs * inputs
    if kind != "nf4":
        return numbers + 4 * outputs
    blocks = -(-numbers // NF4_BLOCK)
    return -(-numbers // 2) + blocks + 4 * -(-blocks // NF4_SCALE_BLOCK) + 4


def held_bytes(kind: str, numbers: float, hidden: int, width: int) -> int:
    """About the bytes of `numbers` weights in matrices of decoder layers; `width` bytes each where not quantised."""
    return round(numbers * (matrix_bytes(kind, hidden, hidden) / hidden**2 if kind in QUANTIZED else width))
