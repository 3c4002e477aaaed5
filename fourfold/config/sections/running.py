"""Sampling, evaluation, checkpoints and trackers."""

from __future__ import annotations

from typing import Annotated, Literal

from pydantic import Field, model_validator

from fourfold.config.sections.base import Count, PositiveFloat, PositiveInt, Section


class SamplingSection(Section):
    engine: Literal["local", "llama_cpp", "llama_cpp_q8_0", "vllm"] = Field(
        default="local",
        description="What draws responses: this program; llama.cpp on the CPU (extra llama-cpp), with the base written "
        "as GGUF, its matrices in float16 or in Q8_0; or a vLLM server of yours (`url`) that serves "
        "model.path. The last two are given the adapters after every update (they need sharing.mode = 'adapters'), and "
        "at every start their log-probs are compared with torch's.",
    )
    url: str = Field(
        default="",
        description="Address of the vLLM server of engine = 'vllm', such as 'http://127.0.0.1:8000' "
        "(docs/sampling.md says how to start it).",
    )
    token_env: str = Field(
        default="", description="Name of the environment variable that holds the key of `url`; empty: none."
    )
    requests: PositiveInt = Field(default=64, description="Rows that are asked for at a time at `url`.")
    timeout_seconds: PositiveFloat = Field(default=600.0, description="Longest wait for one row of `url`.")
    retries: Count = Field(
        default=4, description="How often a request to `url` that fails is sent again, after 0.5 s, 1 s, 2 s and so on."
    )
    weights: Literal["as_trained", "int8", "int8_dynamic", "nf4"] = Field(
        default="as_trained",
        description="How engine = 'local' holds the layers that are trained while it draws: in the compute type, or "
        "their matrices in fewer bits, which is another distribution (ppo.importance). A frozen trunk stays as it is.",
    )
    max_gap: PositiveFloat = Field(
        default=0.2,
        description="Largest mean size, in nats a token, of the difference between log-probs of a sampler with another "
        "distribution and the training engine's; a rollout beyond it is drawn again in the training precision.",
    )
    max_new_tokens: PositiveInt = Field(default=24, description="Longest response, in tokens (EOS included).")
    temperature: Annotated[float, Field(ge=0.001, allow_inf_nan=False)] = Field(
        default=1.0, description="Logits are divided by it in sampling and in every log-prob (actor, reference, old)."
    )
    responses_per_prompt: PositiveInt = Field(default=1, description="Responses drawn for each prompt of a rollout.")
    batch_size: Count = Field(
        default=0,
        description="Rows sampled at once, each in a slot that a waiting row takes over; 0: the whole rollout.",
    )
    overlap_scoring: bool = Field(
        default=False,
        description="Reference and reward score rows that have ended on a thread while others are "
        "sampled: give a batch_size below ppo.rollout_batch_size. Scores stay the same but for rounding.",
    )
    stop_strings: tuple[str, ...] = Field(
        default=(), description="A response also ends with the token that completes one of these.", strict=False
    )
    extra_eos_token_ids: tuple[Count, ...] = Field(
        default=(), description="Token ids that end a response besides the model's own EOS ids.", strict=False
    )
    top_p: float = Field(default=1.0, description="Only 1.0: truncated sampling breaks the on-policy assumption.")
    top_k: int = Field(default=0, description="Only 0: truncated sampling breaks the on-policy assumption.")

    @property
    def differs(self) -> bool:
        """Whether responses come from another distribution than the trained one, by more than the order of sums."""
        return self.engine != "local" or self.weights != "as_trained"

    @model_validator(mode="after")
    def _refuse_truncated_sampling(self) -> SamplingSection:
        if self.top_p != 1.0 or self.top_k != 0:
            raise ValueError(
                f"top_p = {self.top_p}, top_k = {self.top_k}: truncated sampling draws from "
                "another distribution than the one that is trained, so KL and ratio would be wrong; "
                "allowed: top_p = 1.0 and top_k = 0; try a lower temperature"
            )
        return self


class CurriculumSection(Section):
    steps: Count = Field(
        default=0,
        description="PPO steps over which the limit of responses, the rollout or both grow evenly, short and small "
        "first; the step after them has sampling.max_new_tokens and ppo.rollout_batch_size. 0: from the first step on.",
    )
    start_new_tokens: Count = Field(
        default=0, description="Longest response of the first step, in tokens; 0: sampling.max_new_tokens always."
    )
    start_rollout_batch_size: Count = Field(
        default=0,
        description="Responses of the first rollout; it grows by whole mini-batches. 0: ppo.rollout_batch_size always.",
    )

    def grown(self, start: int, end: int, step: int, unit: int = 1) -> int:
        """What `start` (0: no growth) has come to at a step, counted from 0: start + (end - start) step / steps.

        Rounded down to a multiple of `unit`; `end` from step `steps` on.
        """
        if not start or step >= self.steps:
            return end
        return (start + (end - start) * step // self.steps) // unit * unit


class EvaluationSection(Section):
    every: Count = Field(
        default=0, description="PPO steps between evaluations on held-out prompts; 0: start and end only."
    )
    max_prompts: PositiveInt = Field(default=64, description="Held-out prompts used.")
    responses_per_prompt: PositiveInt = Field(default=1, description="Responses drawn for each of them.")
    max_texts: Count = Field(
        default=64,
        description="Of data.texts_test, where it is given: texts whose loss under the actor is measured; 0: none.",
    )
    judge: Literal["none", "vader"] = Field(
        default="none", description="A judge other than the reward model: 'vader', the lexicon's compound score."
    )
    keep_rollouts: bool = Field(
        default=True,
        description="Write the held-out rollout of every evaluation and the training rollout of the step before it "
        "into the run's folder, with values, rewards and returns: what `fourfold doctor` and `report` read.",
    )
    samples: Count = Field(default=8, description="Samples printed before and after, side by side.")


class CheckpointSection(Section):
    every: PositiveInt = Field(default=10, description="PPO steps between checkpoints; the last step is always saved.")
    keep_last: PositiveInt = Field(default=2, description="Checkpoints kept, besides the best one.")
    best_metric: str = Field(default="eval_score_mean", description="The best checkpoint is chosen by this metric.")
    best_mode: Literal["max", "min"] = Field(default="max", description="Whether more or less of it is better.")
    stage_every: PositiveInt = Field(default=50, description="Optimizer steps between checkpoints of sft and reward.")


class TrackingSection(Section):
    trackers: tuple[Literal["tensorboard", "wandb", "trackio"], ...] = Field(
        default=(),
        description="Where metrics go besides metrics.jsonl. 'wandb' writes into the run's folder and sends nothing "
        "unless the variable WANDB_MODE says so, 'trackio' into TRACKIO_DIR; each is an extra of its own.",
        strict=False,
    )
    project: Annotated[str, Field(min_length=1)] = Field(
        default="fourfold", description="The project that the run belongs to at 'wandb' and 'trackio'."
    )
