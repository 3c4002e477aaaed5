"""What a run of PPO samples: the sampler of its settings, and the prompts that evaluations draw from."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

from fourfold.config.schema import RunConfig
from fourfold.memory.budget import BatchSizes
from fourfold.models.assembly import FourModels
from fourfold.models.llama_actor import LlamaActor
from fourfold.rollout.decoder import SamplingSettings
from fourfold.rollout.guarded import GuardedSampler
from fourfold.rollout.llama_cpp import LlamaSampler
from fourfold.rollout.local import LocalSampler
from fourfold.rollout.prompts import evaluation_batch
from fourfold.rollout.sampler import PromptBatch, Sampler
from fourfold.rollout.vllm import VllmSampler, VllmServer, verify
from fourfold.scoring.ahead import Ahead
from fourfold.scoring.combined import Reward, told_by
from fourfold.scoring.service.client import Service
from fourfold.training.supervised import Texts


def sampler_of(config: RunConfig, models: FourModels, sizes: BatchSizes, ahead: Ahead | None) -> Sampler:
    """The sampler of the settings; one with another distribution stands under guard."""
    settings = _sampling_settings(config)
    exact = LocalSampler(models.base, models.actor, replace(settings, weights="as_trained"), sizes, ahead)
    if not config.sampling.differs:
        return exact
    if config.sampling.engine == "local":
        quick: Sampler = LocalSampler(models.base, models.actor, settings, sizes, ahead)
    elif config.sampling.engine == "vllm":
        quick = _at_vllm(config, models, settings, exact)
    else:
        quick = LlamaSampler(models.base, LlamaActor(config, models.base, models.actor), settings, exact)
    return GuardedSampler(quick, exact, config.sampling.max_gap)


def _at_vllm(config: RunConfig, models: FourModels, settings: SamplingSettings, exact: LocalSampler) -> Sampler:
    """Compared with the training engine on a probe; ValueError where the server's distribution is another one."""
    clients = [Service(config.sampling, key="sampling") for _ in range(config.sampling.requests)]
    folder = Path(config.output).expanduser() / "ppo" / "sampler"
    server = VllmServer(clients, models.actor, config.adapters, config.model.path, folder)
    sampler = VllmSampler(models.base, server, settings, exact)
    verify(sampler, exact, models.actor, len(models.actor.head.weight), config.sampling.max_gap)
    return sampler


def _sampling_settings(config: RunConfig) -> SamplingSettings:
    sampling = config.sampling
    return SamplingSettings(
        max_new_tokens=sampling.max_new_tokens,
        temperature=sampling.temperature,
        stop_strings=sampling.stop_strings,
        weights=sampling.weights,
    )


def evaluation_prompts(config: RunConfig, prompts_test: Texts, reward: Reward) -> PromptBatch | None:
    """The held-out prompts, told the weights of the reward where those are sampled; None without any."""
    if not prompts_test:
        return None
    return evaluation_batch(
        prompts_test,
        seed=config.seed,
        responses_per_prompt=config.evaluation.responses_per_prompt,
        told=told_by(reward),
    )
