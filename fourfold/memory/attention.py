"""Which attention kernel the four roles use, through transformers' attention interface.

"auto" is transformers' own choice, sdpa where a model has it; on a CPU that one's sums run in float32 (wide_attention).

What it saves: a kernel that never forms the [time, time] matrix of weights (sdpa, flash, flex) keeps nothing of it.
What it costs: nothing. What it changes: the order of sums, so all roles have the same one, or the KL between them would
be biased. What it excludes: kernels that the device or the architecture does not have are refused.
"""

from __future__ import annotations

import importlib.util
from typing import TYPE_CHECKING

import torch

from fourfold.memory import wide_attention

if TYPE_CHECKING:
    from transformers import PreTrainedModel

# The flags by which transformers' model classes say what they can do.
_FLAGS = {
    "sdpa": "_supports_sdpa",
    "flash_attention_2": "_supports_flash_attn",
    "flex_attention": "_supports_flex_attn",
}


def on_device(device: torch.device) -> list[str]:
    """The kernels that work here, forward and backward."""
    found = ["eager", "sdpa"]
    if device.type == "cuda":
        found.append("flex_attention")
        if importlib.util.find_spec("flash_attn") is not None:
            found.append("flash_attention_2")
    return found


def check_attention(wanted: str, device: torch.device) -> None:
    """ValueError where this machine does not have the kernel; before a model is loaded."""
    allowed = on_device(device)
    if wanted == "auto" or wanted in allowed:
        return
    reason = {
        "flex_attention": "flex_attention has no backward pass on the CPU",
        "flash_attention_2": (
            "flash_attention_2 runs on CUDA only"
            if device.type != "cuda"
            else "the package flash-attn is not installed; try `pip install 'fourfold[flash]'`"
        ),
    }[wanted]
    raise ValueError(f"memory.attention: given {wanted!r}, but {reason}; allowed here: auto, {', '.join(allowed)}")


def use_attention(model: PreTrainedModel, wanted: str, device: torch.device) -> None:
    """Give a model the kernel; ValueError where its architecture does not have it."""
    if wanted == "auto":
        if device.type == "cpu" and model.config._attn_implementation == "sdpa":
            wide_attention.register()
            model.set_attn_implementation(wide_attention.NAME)
        return
    flag = _FLAGS.get(wanted)
    if flag is not None and not getattr(model, flag):
        can = [name for name in on_device(device) if name == "eager" or getattr(model, _FLAGS[name])]
        raise ValueError(
            f"memory.attention: given {wanted!r}, which {type(model).__name__} does not have; allowed for this model "
            f"here: auto, {', '.join(can)}"
        )
    model.set_attn_implementation(wanted)
