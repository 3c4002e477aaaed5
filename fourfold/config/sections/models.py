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
        default="~/.cache/fourfold/models",
        description="Folder for converted models (GGUF to bf16 safetensors, reward models to ONNX).",
    )


class TrunkSection(Section):
    branch_layers: Count = Field(
        default=4,
        description="Upper layers that every role owns; the layers below form the shared trunk. 0 (with train): all "
        "layers are shared, a role owns its final norm and its head, which is all that sft and reward train then.",
    )
    train: bool = Field(
        default=False,
        description="Train the trunk's layers in ppo, one copy for actor and critic; reference and reward keep them as "
        "they were at step 0. The embedding and the language head stay frozen.",
    )
    lr_scale: PositiveFloat = Field(default=0.1, description="The trunk's learning rate in parts of ppo.learning_rate.")
    critic_grad_scale: NonNegativeFloat = Field(
        default=0.5, description="Factor of the critic's gradient into the trunk; 0: the critic never moves it."
    )
    balance: Literal["none", "grad_norm"] = Field(
        default="none",
        description="'grad_norm': the critic's gradient into the trunk is scaled in every mini-batch, so that its norm "
        "is critic_grad_scale times that of the actor's.",
    )
    alternate: Count = Field(
        default=0,
        description="Mini-batches of the critic alone, over a trunk that stands still, before as many of the actor "
        "alone, which moves the trunk; 0: both learn from every mini-batch. In turns their gradients into the trunk "
        "never exist side by side, so their cosine is not logged.",
    )
    decoupling: NonNegativeFloat = Field(
        default=0.0,
        description="Factor of a penalty on the squared cosine between the features that the two heads read.",
    )

    def turn(self, index: int) -> Literal["both", "critic", "actor"]:
        """Who learns from mini-batch `index` of a rollout."""
        if self.alternate == 0:
            return "both"
        return "critic" if index // self.alternate % 2 == 0 else "actor"

    def turns(self, count: int) -> dict[Literal["both", "critic", "actor"], int]:
        """How many of a rollout's `count` mini-batches are whose turn."""
        if self.alternate == 0:
            return {"both": count, "critic": 0, "actor": 0}
        rounds, rest = divmod(count, 2 * self.alternate)
        critic = rounds * self.alternate + min(rest, self.alternate)
        return {"both": 0, "critic": critic, "actor": count - critic}


class SharingSection(Section):
    mode: Literal["trunk", "adapters", "none"] = Field(
        default="trunk",
        description="'trunk': the lower layers are shared; frozen ones have their activations cached. "
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


# How frozen weights are held: in a float type, or in fewer bits.
Held = Literal["auto", "float32", "bfloat16", "float16", "int8", "int8_dynamic", "nf4"]
FEWER_BITS = (
    "or the matrices of decoder layers in fewer bits: 'int8' (torchao), 'int8_dynamic' (torchao; activations in int8 "
    "too), 'nf4' (bitsandbytes; 4 bits, double quantisation)."
)


class PrecisionSection(Section):
    compute: Literal["auto", "float32", "bfloat16", "float16"] = Field(
        default="auto",
        description="Type of the matrix products of trained roles; 'auto' takes bfloat16 where the hardware multiplies "
        "it, else float32. Trained weights and Adam states are float32 always; log-softmax, KL and GAE run in float32. "
        "float16 scales losses.",
    )
    critic: Literal["auto", "float32", "bfloat16"] = Field(
        default="auto",
        description="Type of the critic's matrix products in ppo, above what it shares; 'auto': as compute.",
    )
    frozen: Held = Field(
        default="auto",
        description="How what the roles share is held. A trunk in a float type computes in it, and its cached "
        "activations have it; the matrices of a base below adapters are widened for each product. 'auto': as compute; "
        f"{FEWER_BITS}",
    )
    reference: Held = Field(
        default="auto",
        description="How the reference's own weights are held: a float type is also what it computes in. 'auto': "
        "exactly as the actor's, so that KL is 0 at the start; anything else biases every KL by what pre-flight "
        f"measures (of reference.model: what loading measures on given sentences); {FEWER_BITS}",
    )
    reward: Held = Field(
        default="auto",
        description="How the reward model's own weights are held in ppo: a float type is also what it computes in. "
        f"'auto': as compute (with reward.device = 'cpu' beside a GPU: what the CPU multiplies); {FEWER_BITS} The head "
        "of reward.source = 'model' is float32 always.",
    )
    loss_scale: Annotated[float, Field(ge=1, allow_inf_nan=False)] = Field(
        default=65536.0,
        description="First loss scale of float16; it halves when gradients overflow and doubles after 200 steps "
        "without.",
    )
    max_reference_bias: PositiveFloat = Field(
        default=0.05,
        description="Largest size, in nats a token, of the mean difference between log-probs in the actor's numerics "
        "and those of the reference as it is held, or where reference.residency has it computed: what every KL is "
        "biased by. Pre-flight measures it on a rollout, with its standard error over responses, and refuses a mean "
        "that is larger by more than two of these.",
    )

    @property
    def reference_differs(self) -> bool:
        """Whether torch computes the reference otherwise than the actor (of settings whose `compute` is resolved)."""
        return self.reference not in ("auto", self.compute)

    @property
    def critic_differs(self) -> bool:
        """Whether the critic computes otherwise than the actor (of settings whose `compute` is resolved)."""
        return self.critic not in ("auto", self.compute)


class MemorySection(Section):
    checkpointing: Literal["none", "layers", "attention"] = Field(
        default="none",
        description="What backward passes of trained roles compute again instead of keeping: whole decoder layers, or "
        "attention only. Updates stay the same bit for bit.",
    )
    checkpoint_every: PositiveInt = Field(
        default=1, description="Every how many of a role's decoder layers are checkpointed, the first one included."
    )
    optimizer_residency: Literal["keep", "park", "offload"] = Field(
        default="keep",
        description="'park': Adam's moments lie in host memory (a run on the CPU: on disk, in the run's folder) except "
        "those of the one parameter that is being stepped. 'offload': so do gradients and, where precision.compute is "
        "bfloat16, float32 masters, of which the device holds the rounded weights only; the CPU steps. Updates stay "
        "the same bit for bit (with 'offload' on a GPU: but for the CPU's rounding of Adam).",
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
        description="Attention kernel of all four roles; 'auto' is transformers' choice, sdpa where a model has it; "
        "on a CPU in half precision its sums run in float32.",
    )
    budget_gib: NonNegativeFloat = Field(
        default=0.0,
        description="Memory that the run may take: of the GPU, or resident memory of the process on the CPU, where it "
        "is looked at between layers, chunks of logits and steps of parked states, not within them; 0 is no limit. A "
        "pass that needs more is done again with half the rows.",
    )
    levers: Literal["given", "exact", "bounded"] = Field(
        default="given",
        description="Which levers ppo takes so that it fits into budget_gib (0: into the device): 'given', those of "
        "these settings. Or the planner adds some when the run starts, so that it is the fastest that fits: 'exact', "
        "after which updates stay the same but for the order of sums; 'bounded', those too that round. Keys that are "
        "given stay. A run goes on with what was chosen for it.",
    )
    count_tensors: bool = Field(
        default=False,
        description="Count the bytes of live tensors for memory.jsonl, which slows every operation.",
    )


RESIDENCY = (
    "'keep' in memory; 'park': in memory in the score phase only; 'stream': there also layer by layer, two at a time. "
    "Elsewhere they lie in host memory (on the CPU: on disk, in the run's folder). Scores stay the same bit for bit. "
    "'cpu', for a run on CUDA: in host memory, where the CPU computes with them; scores stay the same but for "
    "rounding. 'service': not in this process at all; the `fourfold serve` of [service] is asked (over a trunk, and on "
    "another kind of machine, equal but for rounding)."
)


Prior = Literal["step_0", "checkpoint", "model", "uniform", "moving"]


class ReferenceSection(Section):
    prior: Literal["step_0", "uniform", "moving"] = Field(
        default="step_0",
        description="What the KL is taken to, where neither reference.checkpoint nor reference.model names another "
        "policy. 'step_0': the actor as it is at step 0, frozen. 'uniform': every token has the same probability; no "
        "weights. 'moving': weights that follow the actor's, as an average (decay) or a copy now and then "
        "(copy_every).",
    )
    decay: Annotated[float, Field(ge=0, lt=1)] = Field(
        default=0.95,
        description="With prior = 'moving', after every step: the reference's weights become decay times themselves "
        "and 1 - decay times the actor's.",
    )
    copy_every: Count = Field(
        default=0,
        description="With prior = 'moving': the reference is the actor as it was at the last step that is a multiple "
        "of this; 0: the average of reference.decay.",
    )
    checkpoint: str = Field(
        default="",
        description="Another policy of this run's model for the reference, frozen: the folder sft/model or ppo/model "
        "of a run of the same sharing, or a checkpoint of a stage sft.",
    )
    model: str = Field(
        default="",
        description="A whole model of its own for the reference, named as in model.path, with the same vocabulary.",
    )
    log_step_0: bool = Field(
        default=True,
        description="Where the KL is taken to another policy than the actor at step 0: hold that one too, as its own "
        "part of the actor's weights where reference.residency says, and log the KL to it. Not beside "
        "reference.residency = 'service'.",
    )
    engine: Literal["torch", "llama_cpp", "llama_cpp_q8_0"] = Field(
        default="torch",
        description="What runs the reference: torch, or llama.cpp on the CPU (extra llama-cpp). 'llama_cpp' takes a "
        ".gguf file of reference.model as it is; anything else, the actor at step 0 too, is written as GGUF with its "
        "matrices in float16, or in Q8_0. At every start its log-probs are compared with torch's.",
    )
    residency: Literal["keep", "park", "stream", "cpu", "service"] = Field(
        default="keep", description=f"Where the reference's own weights are: {RESIDENCY}"
    )

    @property
    def kind(self) -> Prior:
        """Which policy the KL is taken to: one that a key names by its place, or what `prior` says."""
        if self.model:
            return "model"
        return "checkpoint" if self.checkpoint else self.prior

    @property
    def starts_as_the_actor(self) -> bool:
        """Whether its weights are the actor's at step 0, so that the KL is 0 there."""
        return self.kind in ("step_0", "moving")

    @property
    def holds_step_0(self) -> bool:
        """Whether the actor of step 0 is held beside a prior that is another policy."""
        return self.kind != "step_0" and self.log_step_0 and self.residency != "service"

    @property
    def computes_elsewhere(self) -> bool:
        """Whether other kernels than the actor's may compute it."""
        return self.engine != "torch" or self.residency in ("cpu", "service")


class SystemSection(Section):
    device: Literal["auto", "cpu", "cuda"] = Field(default="auto", description="'auto' takes CUDA where there is one.")
    threads: Count = Field(default=0, description="CPU threads of torch; 0 leaves torch's own choice.")


class ServiceSection(Section):
    url: str = Field(
        default="",
        description="Address of a `fourfold serve` of the same run, such as 'http://127.0.0.1:8777'; with "
        "reference.engine = 'llama_cpp' that of a llama-server.",
    )
    token_env: str = Field(
        default="", description="Name of the environment variable that holds the service's token; empty: no token."
    )
    timeout_seconds: PositiveFloat = Field(default=60.0, description="Longest wait for the answer to one request.")
    retries: Count = Field(
        default=4, description="How often a request that fails is sent again, after 0.5 s, 1 s, 2 s and so on."
    )
    max_rows: PositiveInt = Field(
        default=256, description="Most rows in one request; at least ppo.micro_batch_size, a multiple of which is sent."
    )
