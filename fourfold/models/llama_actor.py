"""The actor run by llama.cpp: the base below its adapters written once, the adapters after every update.

Only adapters change between two rollouts, and they are a few per cent of the weights. An actor that is trained in full
would have to be written and read as a whole for every rollout, by way of a float32 copy (docs/decisions/0015).
"""

from __future__ import annotations

import math
from pathlib import Path

import torch

from fourfold.config.schema import RunConfig
from fourfold.models.adapters import adapters_of
from fourfold.models.gguf_files import WEIGHTS_OF, require_writable, write_adapters, write_gguf
from fourfold.models.llama_cpp import LlamaCpp, library
from fourfold.models.llama_roles import verify_engine
from fourfold.models.loading import Base
from fourfold.models.roles import Policy, copy_policy
from fourfold.models.whole import whole_model

KEY = "sampling.engine"


class LlamaActor:
    """An engine for the policy as it is whenever it is asked for; ValueError where llama.cpp says something else."""

    def __init__(self, config: RunConfig, base: Base, policy: Policy) -> None:
        library(KEY)  # a missing one is named before anything is loaded
        require_writable(base.config, KEY)
        self._config, self._model_config, self._policy = config, base.config, policy
        folder = Path(config.output).expanduser() / "ppo"
        self._adapters = folder / "sampler-adapters.gguf"
        file = folder / "sampler.gguf"
        write_gguf(whole_model(config, base, _without_adapters(policy))[0], file, WEIGHTS_OF[config.sampling.engine])
        self._engine = LlamaCpp(file, KEY)
        verify_engine(self.current(), whole_model(config, base, policy)[0], base.tokenizer, str(file), KEY)

    def current(self) -> LlamaCpp:
        """With the adapters as they are now."""
        given = self._config.adapters
        alpha = given.alpha * math.sqrt(given.rank) if given.rslora else given.alpha
        write_adapters(self._model_config, adapters_of(self._policy.branch), self._adapters, alpha=alpha)
        self._engine.take_adapters(self._adapters)
        return self._engine


@torch.no_grad()
def _without_adapters(policy: Policy) -> Policy:
    """A copy that computes what lies below its adapters."""
    plain = copy_policy(policy, share_head=True)
    for _, b in adapters_of(plain.branch).values():
        b.zero_()
    return plain
