"""The model, what the roles share of it, and what is held how in memory."""

from __future__ import annotations

from typing import Annotated, Literal

from pydantic import Field

from fourfold.config.sections.base import Count, NonNegativeFloat, PositiveFloat, PositiveInt, Section


class ModelSection(Section):
    path: str = Field(
        description="Causal language model: a Hugging Face directory, a hub id, a .gguf file, or "
        "'package:MODULE/FILE' for a file inside an installed Python package."
    )
    cache: str = Field(
        default="~/.cache/fourfold/models", description="Folder for converted models (GGUF to bf16 safetensors)."
    )


class TrunkSection(Section):
    branch_layers: PositiveInt = Field(
        default=4, description="Upper layers that every role owns; the layers below form the shared frozen trunk."
    )


class SharingSection(Section):
    mode: Literal["trunk", "adapters", "none"] = Field(
        default="trunk",
        description="'trunk': the lower layers are shared and frozen, their activations cached. "
        "'adapters': all layers are shared and frozen, every role has low-rank adapters on them. "
        "'none': four separate models, actor and critic trained in full.",
    )


class AdaptersSection(Section):
    rank: PositiveInt = Field(default=16, description="Rank of the adapters (LoRA's r).")
    alpha: PositiveFloat = Field(
        default=32.0, description="Their product is multiplied by alpha / rank (rslora: alpha / sqrt(rank))."
    )
    targets: tuple[str, ...] = Field(
        default=(),
        description="Names of the linear layers to adapt, such as ['q_proj', 'v_proj']; none: all of a decoder layer.",
        strict=False,
    )
    layers: Count = Field(
        default=0,
        description="Upper layers that have adapters; those below form a trunk whose activations are cached. 0: all.",
    )
    dora: bool = Field(default=False, description="DoRA: the adapters turn the weights, their lengths are own numbers.")
    rslora: bool = Field(default=False, description="Scale by alpha / sqrt(rank), which suits high ranks.")


class PrecisionSection(Section):
    compute: Literal["auto", "float32", "bfloat16", "float16"] = Field(
        default="auto",
        description="Type of the matrix products of trained roles; 'auto' takes bfloat16 where the hardware multiplies "
        "it, else float32. Trained weights and Adam states are float32 always; log-softmax, KL and GAE run in float32. "
        "float16 scales losses.",
    )
    frozen: Literal["auto", "float32", "bfloat16", "float16"] = Field(
        default="auto",
        description="How what the roles share is held: a trunk, which computes in it and whose cached activations have "
        "it, or the base of adapters, whose matrices are widened for each product. 'auto': as compute.",
    )
    reference: Literal["auto", "float32", "bfloat16", "float16"] = Field(
        default="auto",
        description="How the reference's own weights are held and computed. 'auto': exactly as the actor's, so that "
        "KL is 0 at the start; another type biases every KL by what pre-flight measures.",
    )
    reward: Literal["auto", "float32", "bfloat16", "float16"] = Field(
        default="auto",
        description="How the reward model's own weights are held and computed in ppo. 'auto': as compute.",
    )
    loss_scale: Annotated[float, Field(ge=1, allow_inf_nan=False)] = Field(
        default=65536.0,
        description="First loss scale of float16; it halves when gradients overflow and doubles after 200 steps "
        "without.",
    )
    max_reference_bias: PositiveFloat = Field(
        default=0.05,
        description="Largest mean absolute difference, in nats a token, between the reference as it is held and in the "
        "actor's numerics; pre-flight measures it, and beyond it the run is refused.",
    )

    @property
    def reference_differs(self) -> bool:
        """Whether the reference computes otherwise than the actor (of settings whose `compute` is resolved)."""
        return self.reference not in ("auto", self.compute)


class MemorySection(Section):
    checkpointing: Literal["none", "layers", "attention"] = Field(
        default="none",
        description="What backward passes of trained roles compute again instead of keeping: whole decoder layers, or "
        "attention only. Updates stay the same bit for bit.",
    )
    checkpoint_every: PositiveInt = Field(
        default=1, description="Every how many of a role's decoder layers are checkpointed, the first one included."
    )
    optimizer_residency: Literal["keep", "park"] = Field(
        default="keep",
        description="'park': Adam's moments lie in host memory (a run on the CPU: on disk, in the run's folder) except "
        "those of the one parameter that is being stepped. Updates stay the same bit for bit.",
    )
    optimizer_in_backward: bool = Field(
        default=False,
        description="Step each parameter as soon as its gradient is there, and free the gradient: at most a few exist. "
        "Needs max_grad_norm = 0 and one micro-batch an optimizer step. Updates stay the same bit for bit.",
    )
    activation_offload: bool = Field(
        default=False,
        description="What backward passes of trained roles need waits in pinned host memory (on CUDA) or in a file of "
        "the temporary folder (on the CPU). Updates stay the same bit for bit.",
    )
    attention: Literal["auto", "eager", "sdpa", "flash_attention_2", "flex_attention"] = Field(
        default="auto",
        description="Attention kernel of all four roles; 'auto' is transformers' choice, sdpa where a model has it.",
    )
    budget_gib: NonNegativeFloat = Field(
        default=0.0,
        description="Memory that the run may take: of the GPU, or resident memory of the process on the CPU; 0 is no "
        "limit. A pass that needs more is done again with half the rows.",
    )
    count_tensors: bool = Field(
        default=False,
        description="Count the bytes of live tensors for memory.jsonl, which slows every operation.",
    )


RESIDENCY = (
    "'keep' in memory; 'park': in memory in the score phase only; 'stream': there also layer by layer, two at a time. "
    "Elsewhere they lie in host memory (on the CPU: on disk, in the run's folder). Scores stay the same bit for bit."
)


class ReferenceSection(Section):
    residency: Literal["keep", "park", "stream"] = Field(
        default="keep", description=f"Where the reference's own weights are: {RESIDENCY}"
    )


class SystemSection(Section):
    device: Literal["auto", "cpu", "cuda"] = Field(default="auto", description="'auto' takes CUDA where there is one.")
    threads: Count = Field(default=0, description="CPU threads of torch; 0 leaves torch's own choice.")
