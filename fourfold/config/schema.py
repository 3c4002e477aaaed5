"""The settings of a run: frozen, strict, complete.

Every field is described once, here; `fourfold init` and `docs/configuration.md` are made from these descriptions.
No torch is imported, so `--help` and checks of a configuration answer at once.
"""

from __future__ import annotations

from typing import Annotated, Literal

from pydantic import BaseModel, ConfigDict, Field, model_validator

from fourfold.config.checks import problems

PositiveInt = Annotated[int, Field(gt=0)]
Count = Annotated[int, Field(ge=0)]
PositiveFloat = Annotated[float, Field(gt=0, allow_inf_nan=False)]
NonNegativeFloat = Annotated[float, Field(ge=0, allow_inf_nan=False)]
Fraction = Annotated[float, Field(ge=0, le=1)]


class Section(BaseModel):
    """Base of every table: immutable, refuses unknown keys, never converts a type silently."""

    model_config = ConfigDict(frozen=True, extra="forbid", strict=True)


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
    compute: Literal["auto", "bfloat16", "float32"] = Field(
        default="auto",
        description="Type of matrix products, and the widest that frozen weights are held in; 'auto' takes bfloat16 "
        "where the hardware multiplies it. Trained weights and Adam states are float32 always; log-softmax, KL and GAE "
        "run in float32.",
    )


class MemorySection(Section):
    checkpointing: Literal["none", "layers", "attention"] = Field(
        default="none",
        description="What backward passes of trained roles compute again instead of keeping: whole decoder layers, or "
        "attention only. Updates stay the same bit for bit.",
    )
    checkpoint_every: PositiveInt = Field(
        default=1, description="Every how many of a role's decoder layers are checkpointed, the first one included."
    )


class SystemSection(Section):
    device: Literal["auto", "cpu", "cuda"] = Field(default="auto", description="'auto' takes CUDA where there is one.")
    threads: Count = Field(default=0, description="CPU threads of torch; 0 leaves torch's own choice.")


class DatasetSection(Section):
    path: str = Field(description="A .jsonl, .parquet or .csv file, or a `datasets` hub id such as 'imdb:train'.")
    columns: dict[str, str] = Field(
        default_factory=dict,
        description="Column names where they differ from the standard ones, e.g. {text = 'review'}. "
        "Standard names: text; prompt, chosen, rejected; messages.",
    )
    max_rows: Count = Field(default=0, description="Use the first rows only; 0 means all.")


class DataSection(Section):
    texts: DatasetSection | None = Field(default=None, description="Texts for the sft stage.")
    texts_test: DatasetSection | None = Field(default=None, description="Held-out texts: the loss reported by sft.")
    pairs: DatasetSection | None = Field(default=None, description="Preference pairs for the reward stage.")
    pairs_test: DatasetSection | None = Field(default=None, description="Held-out pairs: the accuracy reported.")
    prompts: DatasetSection | None = Field(default=None, description="Prompts that PPO samples from.")
    prompts_test: DatasetSection | None = Field(default=None, description="Held-out prompts for evaluation.")
    max_prompt_tokens: PositiveInt = Field(default=64, description="Longest prompt, in tokens.")
    max_text_tokens: PositiveInt = Field(default=64, description="Longest text (prompt and answer), in tokens.")
    truncation: Literal["drop", "left", "right", "error"] = Field(
        default="drop",
        description="What happens to a row that is too long: leave it out, cut its left or right end, or stop. "
        "The counts are printed at start.",
    )


class OptimizerSection(Section):
    learning_rate: NonNegativeFloat = Field(default=1e-4, description="Peak learning rate of AdamW.")
    schedule: Literal["constant", "linear", "cosine"] = Field(
        default="constant", description="Decay of the learning rate to zero over the optimizer steps of the stage."
    )
    warmup_steps: Count = Field(default=0, description="Optimizer steps of linear warm-up.")
    betas: tuple[Fraction, Fraction] = Field(default=(0.9, 0.95), description="Adam's decay rates.", strict=False)
    eps: PositiveFloat = Field(default=1e-8, description="Adam's epsilon.")
    weight_decay: NonNegativeFloat = Field(default=0.0, description="Decoupled weight decay; not on norms and biases.")
    max_grad_norm: PositiveFloat = Field(default=1.0, description="Gradients are clipped to this global norm.")


class SftSection(OptimizerSection):
    num_epochs: PositiveInt = Field(default=1, description="Passes over the texts.")
    batch_size: PositiveInt = Field(default=32, description="Texts an optimizer step.")
    micro_batch_size: PositiveInt = Field(default=32, description="Texts a forward pass; divides batch_size.")
    max_texts: Count = Field(default=0, description="Use this many texts, drawn by the seed; 0 means all.")


class RewardSection(OptimizerSection):
    source: Literal["train", "checkpoint", "function"] = Field(
        default="train", description="Train a reward model on the pairs, load one, or call a Python function."
    )
    checkpoint: str = Field(default="", description="Folder of a trained reward model (source = 'checkpoint').")
    function: str = Field(
        default="",
        description="'module:name' of a Python function (source = 'function'): "
        "takes prompts and responses (lists of str), returns a list of float.",
    )
    init: Literal["sft", "base"] = Field(
        default="sft", description="Weights that the reward model starts from; by default the base's where no sft is."
    )
    num_epochs: PositiveInt = Field(default=1, description="Passes over the pairs.")
    batch_size: PositiveInt = Field(default=32, description="Pairs an optimizer step.")
    micro_batch_size: PositiveInt = Field(default=32, description="Pairs a forward pass; divides batch_size.")
    max_pairs: Count = Field(default=0, description="Use this many pairs, drawn by the seed; 0 means all.")
    standardise: bool = Field(
        default=True,
        description="Shift and scale the score so that 256 of the sft texts have mean 0 and standard deviation 1 "
        "(the numbers are saved with the model).",
    )
    retries: Count = Field(default=2, description="How often a function that fails is asked again.")
    on_failure: Literal["stop", "drop"] = Field(
        default="stop", description="What a function that fails after the retries does: stop the run, or drop the rows."
    )


class CriticSection(OptimizerSection):
    init: Literal["reward", "actor", "base"] = Field(
        default="reward",
        description="Weights of the critic: from the reward model (with its head), from the actor, "
        "or from the base model (new head).",
    )
    warmup_steps: Count = Field(default=0, description="Optimizer steps of linear warm-up of the learning rate.")
    warmup_rollouts: Count = Field(
        default=0, description="PPO steps at the start in which the critic alone is trained and the actor stands still."
    )


class SamplingSection(Section):
    max_new_tokens: PositiveInt = Field(default=24, description="Longest response, in tokens (EOS included).")
    temperature: Annotated[float, Field(ge=0.001, allow_inf_nan=False)] = Field(
        default=1.0, description="Logits are divided by it in sampling and in every log-prob (actor, reference, old)."
    )
    responses_per_prompt: PositiveInt = Field(default=1, description="Responses drawn for each prompt of a rollout.")
    batch_size: Count = Field(default=0, description="Rows sampled at once; 0 means the whole rollout.")
    stop_strings: tuple[str, ...] = Field(
        default=(), description="A response also ends with the token that completes one of these.", strict=False
    )
    extra_eos_token_ids: tuple[Count, ...] = Field(
        default=(), description="Token ids that end a response besides the model's own EOS ids.", strict=False
    )
    top_p: float = Field(default=1.0, description="Only 1.0: truncated sampling breaks the on-policy assumption.")
    top_k: int = Field(default=0, description="Only 0: truncated sampling breaks the on-policy assumption.")

    @model_validator(mode="after")
    def _refuse_truncated_sampling(self) -> SamplingSection:
        if self.top_p != 1.0 or self.top_k != 0:
            raise ValueError(
                f"top_p = {self.top_p}, top_k = {self.top_k}: truncated sampling draws from "
                "another distribution than the one that is trained, so KL and ratio would be wrong; "
                "allowed: top_p = 1.0 and top_k = 0; try a lower temperature"
            )
        return self


class PpoSection(OptimizerSection):
    steps: PositiveInt = Field(default=30, description="Rollouts (each is sampled, scored and learned from).")
    rollout_batch_size: PositiveInt = Field(default=32, description="Responses a rollout.")
    mini_batch_size: PositiveInt = Field(default=32, description="Responses an optimizer step.")
    micro_batch_size: PositiveInt = Field(default=32, description="Responses a forward and backward pass.")
    num_epochs: PositiveInt = Field(default=4, description="Passes over a rollout.")
    clip_eps: Annotated[float, Field(gt=0, le=1)] = Field(
        default=0.2, description="Clip range of the ratio (lower side: 1 - clip_eps)."
    )
    clip_eps_high: NonNegativeFloat = Field(default=0.0, description="Upper clip range; 0 means clip_eps.")
    dual_clip: NonNegativeFloat = Field(default=0.0, description="Dual-clip constant c > 1; 0 switches it off.")
    value_clip_eps: NonNegativeFloat = Field(default=0.2, description="Clip range of the value's move; 0: no clip.")
    value_coef: PositiveFloat = Field(default=1.0, description="Factor of the value loss.")
    entropy_coef: NonNegativeFloat = Field(default=0.0, description="Factor of the entropy bonus.")
    gamma: Fraction = Field(default=1.0, description="Discount.")
    gae_lambda: Fraction = Field(default=0.95, description="Lambda of generalised advantage estimation.")
    whiten_advantages: bool = Field(default=True, description="Mean 0, standard deviation 1 over the rollout's tokens.")
    target_kl: NonNegativeFloat | None = Field(
        default=None,
        description="End a rollout's epochs when the mean of KL(old, new) per token in a mini-batch reaches "
        "this (its step is not applied); not given: off.",
    )
    kl_coef: NonNegativeFloat = Field(default=0.05, description="Factor of the per-token KL in the reward.")
    kl_estimator: Literal["k1", "k2", "k3", "abs", "full"] = Field(
        default="k1", description="Estimator of KL(actor, reference) that is penalised and logged."
    )
    kl_controller: Literal["fixed", "adaptive"] = Field(default="fixed", description="How kl_coef moves.")
    kl_target: PositiveFloat = Field(default=6.0, description="Target of the adaptive controller, nats a sequence.")
    kl_horizon: PositiveInt = Field(default=10_000, description="Horizon of the adaptive controller, sequences.")
    kl_loss_coef: NonNegativeFloat = Field(
        default=0.0, description="Factor of a KL term in the loss (needs kl_coef = 0)."
    )
    kl_loss_estimator: Literal["k2", "k3"] = Field(
        default="k2", description="Estimator in the loss; k2 has the right gradient, k3 a biased one."
    )
    score_clip: NonNegativeFloat = Field(default=0.0, description="Scores are clipped to +-this; 0: off.")
    reward_normalization: Literal["none", "batch", "running"] = Field(
        default="none", description="Scores minus mean, divided by standard deviation, of the rollout or running."
    )
    missing_eos_penalty: NonNegativeFloat = Field(
        default=0.0, description="Subtracted from the score of a response that was cut by length."
    )
    length_penalty: NonNegativeFloat = Field(
        default=0.0, description="Subtracted from the score for every token outside the length range."
    )
    length_range: tuple[Count, Count] = Field(
        default=(0, 0), description="Shortest and longest response free of length_penalty; 0 is no limit.", strict=False
    )
    truncation: Literal["terminal", "bootstrap", "drop"] = Field(
        default="terminal",
        description="A response cut by length: its score counts; or the value of the last state stands for "
        "the rest; or it is not learned from.",
    )

    @property
    def updates_a_rollout(self) -> int:
        """Optimizer steps of one rollout when no epoch ends early."""
        return self.num_epochs * -(-self.rollout_batch_size // self.mini_batch_size)


class EvaluationSection(Section):
    every: Count = Field(
        default=0, description="PPO steps between evaluations on held-out prompts; 0: start and end only."
    )
    max_prompts: PositiveInt = Field(default=64, description="Held-out prompts used.")
    responses_per_prompt: PositiveInt = Field(default=1, description="Responses drawn for each of them.")
    judge: Literal["none", "vader"] = Field(
        default="none", description="A judge other than the reward model: 'vader', the lexicon's compound score."
    )
    samples: Count = Field(default=8, description="Samples printed before and after, side by side.")


class CheckpointSection(Section):
    every: PositiveInt = Field(default=10, description="PPO steps between checkpoints; the last step is always saved.")
    keep_last: PositiveInt = Field(default=2, description="Checkpoints kept, besides the best one.")
    best_metric: str = Field(default="eval_score_mean", description="The best checkpoint is chosen by this metric.")
    best_mode: Literal["max", "min"] = Field(default="max", description="Whether more or less of it is better.")
    stage_every: PositiveInt = Field(default=50, description="Optimizer steps between checkpoints of sft and reward.")


class TrackingSection(Section):
    trackers: tuple[Literal["tensorboard"], ...] = Field(
        default=(), description="Where metrics go besides metrics.jsonl.", strict=False
    )


class RunConfig(Section):
    """All settings of a run; what is not given has the default shown by `fourfold init`."""

    output: str = Field(description="Folder of the run: stages, checkpoints, metrics, summary.")
    seed: Count = Field(default=0, description="Seed of everything random.")
    stages: tuple[Literal["sft", "reward", "ppo"], ...] = Field(
        default=("sft", "reward", "ppo"),
        description="Stages that `fourfold run` carries out, in this order.",
        strict=False,
    )
    model: ModelSection
    sharing: SharingSection = Field(default_factory=SharingSection)
    trunk: TrunkSection = Field(default_factory=TrunkSection)
    adapters: AdaptersSection = Field(default_factory=AdaptersSection)
    precision: PrecisionSection = Field(default_factory=PrecisionSection)
    memory: MemorySection = Field(default_factory=MemorySection)
    system: SystemSection = Field(default_factory=SystemSection)
    data: DataSection = Field(default_factory=DataSection)
    sft: SftSection = Field(default_factory=SftSection)
    reward: RewardSection = Field(default_factory=RewardSection)
    critic: CriticSection = Field(default_factory=CriticSection)
    sampling: SamplingSection = Field(default_factory=SamplingSection)
    ppo: PpoSection = Field(default_factory=PpoSection)
    evaluation: EvaluationSection = Field(default_factory=EvaluationSection)
    checkpoint: CheckpointSection = Field(default_factory=CheckpointSection)
    tracking: TrackingSection = Field(default_factory=TrackingSection)

    @model_validator(mode="after")
    def _refuse_contradictions(self) -> RunConfig:
        found = problems(self)
        if found:
            raise ValueError("\n".join(found))
        return self
