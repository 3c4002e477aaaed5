"""How each stage and role is trained."""

from __future__ import annotations

from typing import Annotated, Literal

from pydantic import Field

from fourfold.config.sections.base import Count, Fraction, NonNegativeFloat, PositiveFloat, PositiveInt, Section
from fourfold.config.sections.models import RESIDENCY
from fourfold.config.sections.parts import FUNCTION, ClassifierSection, PartSection


class OptimizerSection(Section):
    optimizer: Literal["adamw", "adamw_8bit", "paged_adamw", "paged_adamw_8bit"] = Field(
        default="adamw",
        description="AdamW with float32 moments, with moments in 8 bits, and both in memory that pages between GPU and "
        "host (CUDA only). All but 'adamw' are bitsandbytes'.",
    )
    learning_rate: NonNegativeFloat = Field(default=1e-4, description="Peak learning rate of AdamW.")
    schedule: Literal["constant", "linear", "cosine"] = Field(
        default="constant", description="Decay of the learning rate to zero over the optimizer steps of the stage."
    )
    warmup_steps: Count = Field(default=0, description="Optimizer steps of linear warm-up.")
    betas: tuple[Fraction, Fraction] = Field(default=(0.9, 0.95), description="Adam's decay rates.", strict=False)
    eps: PositiveFloat = Field(default=1e-8, description="Adam's epsilon.")
    weight_decay: NonNegativeFloat = Field(default=0.0, description="Decoupled weight decay; not on norms and biases.")
    max_grad_norm: NonNegativeFloat = Field(
        default=1.0, description="Gradients are clipped to this global norm; 0: no clip."
    )


class SftSection(OptimizerSection):
    checkpoint: str = Field(
        default="",
        description="Policy that reward, ppo and the reference start from instead of the stage sft's: the folder "
        "sft/model of a run, a checkpoint of its stage sft, or beside sharing.mode = 'adapters' a LoRA adapter that "
        "peft has saved, with the base, rank, alpha and targets of this run.",
    )
    num_epochs: PositiveInt = Field(default=1, description="Passes over the texts.")
    batch_size: PositiveInt = Field(default=32, description="Texts an optimizer step.")
    micro_batch_size: PositiveInt = Field(default=32, description="Texts a forward pass; divides batch_size.")
    max_texts: Count = Field(default=0, description="Use this many texts, drawn by the seed; 0 means all.")
    tell_weights: bool = Field(
        default=False,
        description="Put weights in front of each text, as in front of prompts (reward.weights = 'sampled'): those "
        "that the text's own scores suggest, so that the policy heeds weights before ppo begins. Parts must read "
        "texts: source 'function', 'rules' or 'http'.",
    )


class RewardSection(OptimizerSection, ClassifierSection):
    @property
    def trains(self) -> bool:
        """Whether the stage reward trains a model."""
        return self.source == "train" or (self._trained is not None and not self._trained.checkpoint)

    @property
    def stored(self) -> str:
        """Folder of a trained reward model that is taken as it is; '' where there is none."""
        if self.source == "checkpoint":
            return self.checkpoint
        return self._trained.checkpoint if self._trained is not None else ""

    @property
    def stored_key(self) -> str:
        """The key of the settings that names that folder."""
        parts = [name for name, part in self.used_parts.items() if part.source == "trained"]
        return f"reward.parts.{parts[0]}.checkpoint" if parts else "reward.checkpoint"

    def with_stored(self, folder: str) -> RewardSection:
        """The same reward, whose model of the run's own is one that lies in a folder already."""
        if self.source != "combined":
            return self.model_copy(update={"source": "checkpoint", "checkpoint": folder})
        change = {"checkpoint": folder}
        parts = {
            name: part.model_copy(update=change) if part.source == "trained" else part
            for name, part in self.parts.items()
        }
        return self.model_copy(update={"parts": parts})

    @property
    def of_the_base(self) -> bool:
        """Whether a reward model is made of the run's own model: a head above a copy of its layers."""
        return self.source in ("train", "checkpoint") or self._trained is not None

    @property
    def classifiers(self) -> dict[str, ClassifierSection]:
        """The text classifiers of other families by the key of the table that describes them."""
        if self.source == "model":
            return {"reward": self}
        return {f"reward.parts.{name}": part for name, part in self.used_parts.items() if part.source == "model"}

    def holder_of(self, key: str) -> str:
        """The key of the classifier that is held for table `key`: the first that differs from it in label at most."""
        names = [name for name in ClassifierSection.model_fields if name != "label"]
        alike = {other: [getattr(each, name) for name in names] for other, each in self.classifiers.items()}
        return next(other for other, each in alike.items() if each == alike[key])

    @property
    def held_classifiers(self) -> dict[str, list[str]]:
        """The keys of the tables of each classifier that is held and passed once, by the first of them."""
        held: dict[str, list[str]] = {}
        for key in self.classifiers:
            held.setdefault(self.holder_of(key), []).append(key)
        return held

    @property
    def has_model(self) -> bool:
        """Whether a role `reward` computes, here or elsewhere."""
        return self.of_the_base or bool(self.classifiers)

    @property
    def used_parts(self) -> dict[str, PartSection]:
        """Those of a combination; none where there is another source."""
        return self.parts if self.source == "combined" else {}

    @property
    def _trained(self) -> PartSection | None:
        return next((part for part in self.used_parts.values() if part.source == "trained"), None)

    @property
    def dimensions(self) -> tuple[str, ...]:
        """Names of the columns of `ScoredRollout.score_parts`: those of the parts, in the order of the file."""
        return tuple(self.used_parts) or ("score",)

    @property
    def trained_dimension(self) -> int:
        """Place among `dimensions` of what the reward model of the run's own says."""
        return next((place for place, part in enumerate(self.used_parts.values()) if part.source == "trained"), 0)

    @property
    def functions(self) -> dict[str, str]:
        """The Python functions that are called, by the table that names them."""
        if self.source == "function":
            return {"reward": self.function}
        named = {f"reward.parts.{name}": part for name, part in self.used_parts.items()}
        return {key: part.function for key, part in named.items() if part.source == "function"}

    @property
    def on_invalid(self) -> Literal["stop", "drop"]:
        """What a row without a valid score does to the step; parts have seen to their own."""
        return "drop" if self.source == "combined" else self.on_failure

    source: Literal["train", "checkpoint", "function", "model", "combined"] = Field(
        default="train",
        description="Train a reward model on the pairs, load one of those, call a Python function, take a text "
        "classifier of any family, which reads the responses as text, or add up the [reward.parts.NAME].",
    )
    parts: dict[str, PartSection] = Field(
        default_factory=dict,
        description="A part of the reward (source = 'combined'); NAME is its own. A row's score is the sum of weight x "
        "score over all parts, and it has none where a part has none. Metrics of each part bear its name.",
    )
    checkpoint: str = Field(default="", description="Folder of a trained reward model (source = 'checkpoint').")
    function: str = Field(default="", description=FUNCTION)
    weights: Literal["fixed", "sampled"] = Field(
        default="fixed",
        description="Weights of the parts of source = 'combined': 'fixed', those of the parts; or 'sampled' for every "
        "prompt, which is told of them ('[safety=0.8 brevity=0.2]' on a line in front of it, within "
        "data.max_prompt_tokens): so that `fourfold sample --weights` can ask for any others later. Drawn are tenths "
        "that add up to 1; scores are weighed by them times the sum of the parts' weights.",
    )
    weights_concentration: PositiveFloat = Field(
        default=1.0,
        description="Of the Dirichlet distribution of weights = 'sampled', whose mean is the parts' weights: 1 draws "
        "all alike (of equal weights), less draws extremes, more stays near the mean.",
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
    residency: Literal["keep", "park", "stream", "cpu", "service"] = Field(
        default="keep", description=f"Where the reward model's own weights are in ppo: {RESIDENCY}"
    )
    timeout_seconds: NonNegativeFloat = Field(
        default=60.0, description="Longest wait for one call of a function; 0: as long as it takes."
    )
    retries: Count = Field(default=2, description="How often a function that fails is asked again.")
    on_failure: Literal["stop", "drop"] = Field(
        default="stop", description="What a function that fails after the retries does: stop the run, or drop the rows."
    )


class PpoSection(OptimizerSection):
    steps: PositiveInt = Field(default=30, description="Rollouts (each is sampled, scored and learned from).")
    rollout_batch_size: PositiveInt = Field(default=32, description="Responses a rollout.")
    mini_batch_size: PositiveInt = Field(default=32, description="Responses an optimizer step.")
    micro_batch_size: PositiveInt = Field(default=32, description="Responses a forward and backward pass.")
    micro_batch_tokens: Count = Field(
        default=0,
        description="Tokens a pass, prompts and padding included, which end a micro-batch before it has all of its "
        "responses: many short ones or few long ones then take about the same memory. A longer response has a pass of "
        "its own. 0: no limit.",
    )
    num_epochs: PositiveInt = Field(default=4, description="Passes over a rollout.")
    clip_eps: Annotated[float, Field(gt=0, le=1)] = Field(
        default=0.2, description="Clip range of the ratio (lower side: 1 - clip_eps)."
    )
    clip_eps_high: NonNegativeFloat = Field(default=0.0, description="Upper clip range; 0 means clip_eps.")
    dual_clip: NonNegativeFloat = Field(default=0.0, description="Dual-clip constant c > 1; 0 switches it off.")
    importance: Literal["auto", "none", "token", "sequence"] = Field(
        default="auto",
        description="Weight of what the actor learns from a token: the ratio of its probabilities in the training "
        "engine and in the sampler that drew it ('token'), or of the whole response's ('sequence'), cut at "
        "importance_cap. 'auto': 'token' where the sampler has another distribution (sampling.engine, "
        "sampling.weights), else 'none'.",
    )
    importance_cap: PositiveFloat = Field(default=2.0, description="Largest importance weight.")
    value_clip_eps: NonNegativeFloat = Field(default=0.2, description="Clip range of the value's move; 0: no clip.")
    value_coef: PositiveFloat = Field(default=1.0, description="Factor of the value loss.")
    entropy_coef: NonNegativeFloat = Field(default=0.0, description="Factor of the entropy bonus.")
    gamma: Fraction = Field(default=1.0, description="Discount.")
    gae_lambda: Fraction = Field(default=0.95, description="Lambda of generalised advantage estimation.")
    whiten_advantages: bool = Field(default=True, description="Mean 0, standard deviation 1 over the rollout's tokens.")
    whiten_dimensions: bool = Field(
        default=False,
        description="So are the advantages of each part of the reward before they are weighed (critic.heads 'vector', "
        "'multi'), but for the penalties: weights then count standard deviations.",
    )
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
    def mini_batches(self) -> int:
        """Of one pass over a rollout."""
        return -(-self.rollout_batch_size // self.mini_batch_size)

    @property
    def updates_a_rollout(self) -> int:
        """The actor's optimizer steps of one whole rollout when no epoch ends early."""
        return self.updates_of(self.rollout_batch_size)

    def mini_batches_of(self, rows: int) -> int:
        """Of one pass over a rollout of so many rows."""
        return -(-rows // self.mini_batch_size)

    def updates_of(self, rows: int) -> int:
        """The actor's optimizer steps of a rollout of so many rows when no epoch ends early."""
        return self.num_epochs * self.mini_batches_of(rows)
