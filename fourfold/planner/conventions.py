"""Estimates of memory by the rules of thumb that publications use, each under its name.

They count bytes a parameter of whole models and leave out most of what a run holds; fourfold.planner.footprint has the
bill of a run. These are for comparing figures that others give: docs/planner.md says which convention gives which.
GB are 1e9 bytes.
"""

from __future__ import annotations

import math
from collections.abc import Collection, Mapping
from dataclasses import dataclass

from fourfold.planner.adapters import adapter_parameters
from fourfold.planner.architectures import Architecture
from fourfold.planner.linears import linears_between
from fourfold.planner.quantization import QUANTIZED, matrix_bytes


@dataclass(frozen=True, slots=True)
class Convention:
    """Bytes that each trained parameter is taken to have."""

    weights: int
    gradients: int
    masters: int
    moments: int  # of Adam, both
    source: str

    @property
    def bytes(self) -> int:
        """All of them."""
        return self.weights + self.gradients + self.masters + self.moments


CONVENTIONS: Mapping[str, Convention] = {
    "all in 16 bits": Convention(2, 2, 0, 4, "everything in bfloat16, moments too: torchtune's full fine-tuning"),
    "mixed precision without masters": Convention(2, 2, 0, 8, "the source documents' bill of a 7B model"),
    "mixed precision": Convention(2, 2, 4, 8, "Rajbhandari et al. 2020, 'ZeRO', section 3.1: 16 bytes"),
    "mixed precision, float32 gradients too": Convention(
        2, 2 + 4, 4, 8, "Megatron-LM, docs on the distributed optimizer: 20 bytes for float16 parameters and gradients"
    ),
    "float32 masters under autocast": Convention(0, 4, 4, 8, "this package: autocast narrows masters for each product"),
}
SOURCE = "mixed precision without masters"
FROZEN_BYTES = 2  # of a frozen parameter in half precision


def training_bytes(parameters: int, convention: str = SOURCE) -> int:
    """Weights, gradients and optimizer of a model that is trained in full."""
    return parameters * CONVENTIONS[convention].bytes


def four_models(parameters: int, convention: str = SOURCE) -> dict[str, int]:
    """Actor and critic trained in full, reference and reward frozen, all of one size."""
    trained, frozen = training_bytes(parameters, convention), FROZEN_BYTES * parameters
    return {"actor": trained, "critic": trained, "reference": frozen, "reward": frozen}


def weight_bytes(architecture: Architecture, kind: str = "bfloat16") -> int:
    """Frozen weights in half precision, or with the layers' matrices in fewer bits and the rest in half precision."""
    if kind not in QUANTIZED:
        return FROZEN_BYTES * architecture.parameters()
    matrices = linears_between(architecture, 0, architecture.layers)
    rest = architecture.parameters() - sum(each.count * each.numbers for each in matrices)
    quantized = sum(each.count * matrix_bytes(kind, each.outputs, each.inputs) for each in matrices)
    return quantized + FROZEN_BYTES * rest


def activation_bytes(
    architecture: Architecture, rows: int, tokens: int, *, checkpointing: bool, fused: bool = True
) -> int:
    """What a half-precision pass over `rows` rows of `tokens` tokens keeps for its backward pass.

    s b h (34 + 5 a s / h) a layer, the second term gone with fused attention (Korthikanti et al. 2022, equation 2);
    under checkpointing each layer's input, 2 s b h, and one layer's activations at a time.
    """
    hidden = rows * tokens * architecture.hidden
    layer = 34 * hidden + (0 if fused else 5 * rows * architecture.heads * tokens**2)
    return architecture.layers * 2 * hidden + layer if checkpointing else architecture.layers * layer


def adapter_run(
    architecture: Architecture,
    kind: str = "bfloat16",
    *,
    rank: int = 16,
    targets: Collection[str] = (),
    rows: int = 1,
    tokens: int = 2048,
    checkpointing: bool = False,
    frozen_copies: int = 0,
) -> dict[str, int]:
    """PPO by low-rank adapters of actor and critic on one frozen base, which reference and reward share.

    Adapters have all 16 bytes of mixed precision; activations are those of one role's pass. `frozen_copies` are whole
    models beside the base, for a reference or reward model that does not share it and is not offloaded.
    """
    adapters = adapter_parameters(architecture, rank, targets)
    base = weight_bytes(architecture, kind)
    return {
        "base": base,
        "frozen copies": frozen_copies * base,
        "adapters": 2 * training_bytes(adapters, "mixed precision"),
        "activations": activation_bytes(architecture, rows, tokens, checkpointing=checkpointing),
    }


def zero_offload_bytes(parameters: int) -> int:
    """What ZeRO-Offload leaves on the device of a model that is trained in full (Ren et al. 2021, section 3).

    Half-precision weights; gradients go down as they are made, masters and moments lie in host memory.
    """
    return FROZEN_BYTES * parameters


def deepspeed_chat_bytes(actor: Architecture, small: Architecture, rank: int = 128) -> int:
    """PPO of DeepSpeed-Chat on one device, as its script training_scripts/opt/single_gpu/run_6.7b_lora.sh sets it.

    The actor trains adapters of rank 128 on all linear layers, the reference is a copy of it, a small critic is trained
    in full (mixed precision) and a reward model of its size is frozen; no ZeRO, no offload, activations checkpointed.
    """
    frozen = FROZEN_BYTES * (2 * actor.parameters() + small.parameters())
    adapters = adapter_parameters(actor, rank)
    return frozen + training_bytes(adapters + small.parameters(), "mixed precision")


def torchtune_bytes(architecture: Architecture) -> int:
    """What torchtune's PPO keeps on one device (recipe config mistral/7B_full_ppo_low_memory.yaml).

    Four models in bfloat16; gradients are freed within the backward pass, paged moments lie in host memory.
    """
    return 4 * FROZEN_BYTES * architecture.parameters()


def devices_needed(size: float, memory: float) -> int:
    """Devices of `memory` bytes that hold `size` bytes, spread evenly."""
    return math.ceil(size / memory)
