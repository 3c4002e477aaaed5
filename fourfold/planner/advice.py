"""Which setting would save most when memory has run out: arithmetic on what is resident at that moment.

Only levers that are not on are proposed, in the order of what they save. No torch.
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field, replace

from fourfold.config.loading import Contradiction, with_settings
from fourfold.config.schema import RunConfig
from fourfold.planner.quantization import QUANTIZED, held_bytes

# Settings that leave an update as it is, bit for bit (an offloaded optimizer on a GPU: but for the CPU's rounding of
# Adam): a run may be taken up again with others.
RESUMABLE = frozenset(
    {
        "memory.activation_offload",
        "memory.budget_gib",
        "memory.checkpoint_every",
        "memory.checkpointing",
        "memory.count_tensors",
        "memory.optimizer_residency",
        "precision.max_reference_bias",
        "reference.residency",
        "reward.residency",
        "service.max_rows",
        "service.retries",
        "service.timeout_seconds",
        "service.token_env",
        "service.url",
    }
)
# Stages, and phases of the same name, in which one role learns from texts.
SUPERVISED = ("sft", "reward")
# How the trained copy of the trunk's layers is called among the weights.
TRAINED_TRUNK = "trained trunk"
# The same of the actor as it was at step 0, where the reference is another policy.
STEP_0 = "policy of step 0"
# Adapters of four roles, gradients of one of them at a time, two moments of two.
_ADAPTER_COPIES = 4 + 1 + 2 * 2


@dataclass(frozen=True)
class Held:
    """Bytes that are resident, by what they are."""

    weights: Mapping[str, int] = field(default_factory=dict)  # by role; shared ones under "trunk" or "base"
    trained: int = 0  # of the weights, those that are trained
    gradients: int = 0
    states: int = 0
    cache: int = 0  # the trunk's cached activations
    passing: int = 0  # activations and temporary tensors of the pass that was broken off
    process: int = 0  # interpreter, libraries, data
    matrix_shares: tuple[float, float] = (0.0, 0.0)  # decoder layers' float matrices: of shared and of a role's bytes
    layers: int = 1  # of the model
    own_layers: int = 1  # of a trained role
    trunk_layers: int = 0  # of a trained trunk
    hidden: int = 1

    def describe(self) -> str:
        """One line for people."""
        parts = {
            **self.weights,
            "gradients": self.gradients,
            "optimizer states": self.states,
            "cached trunk activations": self.cache,
            "activations and temporary tensors": self.passing,
            "interpreter, libraries and data": self.process,
        }
        return ", ".join(f"{name} {mib(size)}" for name, size in parts.items() if size) or "nothing"


@dataclass(frozen=True)
class Advice:
    """A setting that would save memory."""

    setting: str
    value: str
    saves: int

    def __str__(self) -> str:
        again = "" if self.setting in RESUMABLE else ", in a new output folder"
        return f"{self.setting} = {self.value} (about {mib(self.saves)} less{again})"


def mib(size: int) -> str:
    """Bytes for people."""
    return f"{size / 2**20:,.1f} MiB"


def advice(phase: str, held: Held, config: RunConfig) -> list[Advice]:
    """Settings that would save memory in this phase, the largest saving first; about batch sizes never while loading.

    What the other settings refuse is not among them. The batch sizes that are halved by themselves are not among them.
    """
    found = [*_sharing(held, config), *_precision(held, config), *_elsewhere(phase, held, config)]
    if phase != "load":
        found += _shorter(phase, held, config)
    if phase in ("learn", "sft", "reward"):
        found += _activations(held, config)
    best = sorted((each for each in found if each.saves > 0), key=lambda each: -each.saves)
    return [each for each in best if _is_taken(each, config)]


def _is_taken(proposed: Advice, config: RunConfig) -> bool:
    """Whether the other settings allow it."""
    try:
        with_settings(config, {proposed.setting: json.loads(proposed.value)})
    except Contradiction:
        return False
    return True


def _sharing(held: Held, config: RunConfig) -> Iterator[Advice]:
    """One copy of the lower layers, or of all, instead of one a role that is made of the model."""
    theirs = _of_other_models(config)
    held = replace(held, weights={name: size for name, size in held.weights.items() if name not in theirs})
    weights, learning = sum(held.weights.values()), held.gradients + held.states
    narrow = 1.0 if config.precision.compute == "float32" and config.precision.frozen in ("auto", "float32") else 0.5
    mode = config.sharing.mode
    if mode == "none":
        whole = max(held.weights.values(), default=0)
        own = min(config.trunk.branch_layers / held.layers, 1.0)
        after = whole * (1 - own) * narrow + own * (weights + learning)
        yield Advice("sharing.mode", '"trunk"', round(weights + learning - after))
        after = whole * narrow + _adapters(whole, held, config)
        yield Advice("sharing.mode", '"adapters"', round(weights + learning - after))
    elif mode == "trunk":
        yield from _trunk(held, config, narrow)
    elif held.own_layers > 1:  # adapters: most of what their backward pass keeps lies in the layers that they are on
        half = held.own_layers // 2
        yield Advice("adapters.layers", str(half), round((learning + held.passing) * (1 - half / held.own_layers)))


def _of_other_models(config: RunConfig) -> set[str]:
    """Roles that are not made of the run's model."""
    reference = bool(config.reference.model) or config.reference.engine != "torch"
    reward = config.reward.has_model and not config.reward.of_the_base
    theirs = dict.fromkeys(config.reward.classifiers, True) | {"reward": reward, "reference": reference}
    return {role for role, other in theirs.items() if other}


def _trunk(held: Held, config: RunConfig, narrow: float) -> Iterator[Advice]:
    """Shorter branches; layers that a trained trunk takes over are there twice, trained and frozen."""
    trained = held.weights.get(TRAINED_TRUNK, 0)
    learning = held.gradients + held.states
    a_byte = learning / max(held.trained, 1)  # of gradients and states, for each of trained weights
    if trained:
        yield Advice("trunk.train", "false", round(trained * (1 + a_byte)))
    half = config.trunk.branch_layers // 2
    if half:
        share = 1 - half / config.trunk.branch_layers
        own = sum(held.weights.values()) - held.weights.get("trunk", 0) - trained
        saved = own + learning
        if trained:
            saved -= trained * a_byte + held.weights.get("actor", 0) * (1 + narrow + a_byte)
        yield Advice("trunk.branch_layers", str(half), round(share * saved))


def _adapters(whole: int, held: Held, config: RunConfig) -> float:
    """Low-rank factors r (m + n) of matrices m n, taken as square."""
    return _ADAPTER_COPIES * whole * min(2 * config.adapters.rank / held.hidden, 1.0)


def _precision(held: Held, config: RunConfig) -> Iterator[Advice]:
    """Frozen weights, cached and passing activations in half the bytes; frozen matrices in 8 or 4 bits."""
    precision = config.precision
    parts = {"frozen": ("trunk", "base"), "reference": ("reference",), "reward": ("reward",)}
    quantized = [name for key, names in parts.items() if getattr(precision, key) in QUANTIZED for name in names]
    if precision.compute == "float32":
        frozen = sum(size for name, size in held.weights.items() if name not in quantized) - held.trained
        yield Advice("precision.compute", '"bfloat16"', (max(frozen, 0) + held.cache + held.passing) // 2)
    width = 4 if precision.compute == "float32" else 2
    shared = sum(held.weights.get(name, 0) for name in parts["frozen"])
    if config.sharing.mode == "trunk" and config.trunk.train:
        shared = 0  # nothing but 'auto' is allowed beside it
    if precision.compute == "float32" and precision.frozen == "auto":
        # A trunk's cached activations have its type.
        yield Advice("precision.frozen", '"bfloat16"', (shared + held.cache) // 2 if shared else 0)
    matrices = shared * held.matrix_shares[0]
    roles = [role for role in ("reference", "reward") if role not in _of_other_models(config)]
    own = {role: held.weights.get(role, 0) * held.matrix_shares[1] for role in roles}
    for key, kind, size in (("frozen", "nf4", matrices), *((role, "int8", size) for role, size in own.items())):
        if getattr(precision, key) == "auto":
            saves = size - held_bytes(kind, size / width, held.hidden, width)
            yield Advice(f"precision.{key}", f'"{kind}"', round(saves))


def _elsewhere(phase: str, held: Held, config: RunConfig) -> Iterator[Advice]:
    """What a phase does not use lies on the tier below; a streamed role leaves two of its layers."""
    for role, residency in (("reference", config.reference.residency), ("reward", config.reward.residency)):
        others = config.reward.classifiers if role == "reward" else {}
        # Another engine holds its weights itself.
        names = {role, *others} - {key for key, given in others.items() if given.engine != "torch"}
        own = 0 if residency == "service" else sum(held.weights.get(name, 0) for name in names)
        own += held.weights.get(STEP_0, 0) if role == "reference" else 0  # it lies where the reference does
        if residency in ("keep", "park") and phase == "score":
            yield Advice(f"{role}.residency", '"stream"', own - 2 * own // max(held.own_layers, 2))
        elif residency == "keep" and phase in ("generate", "learn", "save", "load"):
            yield Advice(f"{role}.residency", '"park"', own)
    if config.memory.optimizer_residency == "keep":
        yield Advice("memory.optimizer_residency", '"park"', held.states)
    elif config.memory.optimizer_residency == "park":
        narrower = held.trained // 2 if config.precision.compute == "bfloat16" else 0
        yield Advice("memory.optimizer_residency", '"offload"', held.gradients + narrower)
    # Offloaded gradients leave as they come.
    if phase in ("learn", *SUPERVISED) and config.memory.optimizer_residency != "offload":
        yield Advice("memory.optimizer_in_backward", "true", held.gradients * (not config.memory.optimizer_in_backward))
    section = phase if phase in SUPERVISED else "ppo"
    if section in config.stages and getattr(config, section).optimizer == "adamw":
        own = held.states if phase in SUPERVISED else held.states // 2  # of the actor's and the critic's
        yield Advice(f"{section}.optimizer", '"adamw_8bit"', own * 3 // 4)


def _shorter(phase: str, held: Held, config: RunConfig) -> Iterator[Advice]:
    """Fewer tokens a row, or fewer rows that are kept at once."""
    if phase in SUPERVISED:
        length = config.data.max_text_tokens
        share = (length - length // 2) / length
        yield Advice("data.max_text_tokens", str(length // 2), round((held.cache + held.passing) * share))
        return
    if "ppo" not in config.stages:
        return
    new = config.sampling.max_new_tokens
    if new > 1:
        share = (new - new // 2) / (config.data.max_prompt_tokens + new)
        yield Advice("sampling.max_new_tokens", str(new // 2), round((held.cache + held.passing) * share))
    ppo = config.ppo
    half = ppo.rollout_batch_size // 2
    if half and half % ppo.mini_batch_size == half % config.sampling.responses_per_prompt == 0:
        yield Advice("ppo.rollout_batch_size", str(half), held.cache // 2)


def _activations(held: Held, config: RunConfig) -> Iterator[Advice]:
    """Both keep one layer's activations at a time."""
    saves = round(held.passing * (1 - 1 / max(held.own_layers + held.trunk_layers, 1)))
    if config.memory.checkpointing == "none":
        yield Advice("memory.checkpointing", '"layers"', saves)
    if not config.memory.activation_offload:
        # Beside checkpointing only the layers' inputs are left to move.
        yield Advice(
            "memory.activation_offload", "true", saves if config.memory.checkpointing == "none" else saves // 2
        )
