"""What a role's weights are, in few bytes: two processes that compare them need not send the weights."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Iterator
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from safetensors import safe_open
from torch import Tensor

from fourfold.config.schema import RunConfig
from fourfold.memory.precision import resolve_compute
from fourfold.models.adapters import is_adapted, is_adapter
from fourfold.models.external import placed
from fourfold.models.loading import Base, device_of, resolve_model
from fourfold.models.quantized import PROBE
from fourfold.models.roles import Policy, Scorer, checksum_of
from fourfold.models.storage import TRUNK, RoleRecord, own_tensors, stored_tensors
from fourfold.models.stored import weight_files
from fourfold.tensor_files import read

# What the library writes into a model's config.json without a meaning for its numbers.
_VERSIONED = ("transformers_version", "_name_or_path", "_commit_hash", "dtype", "torch_dtype")


@dataclass(frozen=True)
class ModelIdentity:
    """What a role with a model of its own computes with, by its files and the settings: no weight is held for it."""

    weights: str
    architecture: str  # of config.json
    tokenizer: str
    compute: str
    held: str  # what precision.<role> says
    attention: str  # what memory.attention says

    @classmethod
    def of_reference(cls, config: RunConfig) -> ModelIdentity:
        """Of `reference.model`, which torch runs; ValueError where its files are not on this machine."""
        key, path = "reference.model", config.reference.model
        place = resolve_model(path, Path(config.model.cache), key)
        return cls(
            weights=_weights_at(place, f"{key} = {path!r}"),
            architecture=_architecture_at(place),
            tokenizer=vocabulary_checksum(_tokenizer_at(place)),
            compute=resolve_compute(config.precision.compute, device_of(config)),
            held=config.precision.reference,
            attention=config.memory.attention,
        )


@dataclass(frozen=True)
class ReaderIdentity(ModelIdentity):
    """The same of a reward model of another family, and what it makes of a text."""

    engine: str
    template: str
    label: dict[str, float]
    max_tokens: int

    @classmethod
    def of_reward(cls, config: RunConfig) -> ReaderIdentity:
        """Of `reward.model`; ValueError where its files are not on this machine."""
        reward = config.reward
        place = resolve_model(reward.model, Path(config.model.cache), "reward.model")
        tokenizer = _tokenizer_at(place)
        return cls(
            weights=_weights_at(place, f"reward.model = {reward.model!r}"),
            architecture=_architecture_at(place),
            tokenizer=_reading_checksum(tokenizer, with_chat=reward.template == "chat"),
            compute=str(placed(config)[1]).removeprefix("torch."),
            held=config.precision.reward,
            attention=config.memory.attention,
            engine=reward.engine,
            template=reward.template,
            label=dict(reward.label),
            max_tokens=reward.max_tokens,
        )


def _weights_at(place: str, given: str) -> str:
    """Of every stored tensor, in the order of their names, whatever files they are in; one is read at a time."""
    files = weight_files(place)
    if not files:
        raise ValueError(
            f"{given}: its safetensors are not on this machine, where they are compared with those of the service; "
            "load the model into the hub's cache, or give a folder"
        )
    with ExitStack() as opened:
        stored = [opened.enter_context(safe_open(file, framework="pt")) for file in files]
        where = {name: file for file in stored for name in file.keys()}  # noqa: SIM118 - no mapping
        return checksum_of((name, where[name].get_tensor(name)) for name in sorted(where))


def _architecture_at(place: str) -> str:
    from transformers import PreTrainedConfig

    told, _ = PreTrainedConfig.get_config_dict(place)
    return _digest({name: value for name, value in told.items() if name not in _VERSIONED})


def _tokenizer_at(place: str) -> Any:
    from transformers import AutoTokenizer

    return AutoTokenizer.from_pretrained(place, trust_remote_code=False)


def _reading_checksum(tokenizer: Any, *, with_chat: bool) -> str:
    """Of the vocabulary, of what becomes of sentences, and of the chat template where that is used.

    Not of the tokenizer's files: versions of the library write the same tokenizer otherwise.
    """
    ids = [tokenizer(text)["input_ids"] for text in PROBE]
    return _digest([vocabulary_checksum(tokenizer), ids, tokenizer.chat_template if with_chat else ""])


def _digest(content: Any) -> str:
    text = json.dumps(content, ensure_ascii=False, sort_keys=True)
    return hashlib.blake2b(text.encode(), digest_size=16).hexdigest()


@dataclass(frozen=True)
class RoleWeights:
    """Checksums of a role before it is frozen: of what a stage would store of it, and of what all roles share."""

    own: str
    shared: str


def weights_of_role(base: Base, role: Policy | Scorer) -> RoleWeights:
    """Of a role in memory, as it starts: a trained trunk is still the shared one."""
    own = own_tensors(role, shares_head=base.shares_head)
    names = sorted(name for name in own if not name.startswith(TRUNK))
    return RoleWeights(checksum_of((name, read(own[name]).float()) for name in names), _of_shared(base))


def weights_in_folder(base: Base, folder: Path, expected: RoleRecord) -> RoleWeights:
    """Of a role that a stage has stored; its tensors are read one at a time."""
    with safe_open(str(stored_tensors(folder, expected)), framework="pt") as stored:
        own = checksum_of((name, stored.get_tensor(name).float()) for name in sorted(stored.keys()))
    return RoleWeights(own, _of_shared(base))


def _of_shared(base: Base) -> str:
    """The trunk, the language head above it, the base of adapters: those of them that there are."""
    return checksum_of(_shared_tensors(base))


def _shared_tensors(base: Base) -> Iterator[tuple[str, Tensor]]:
    if base.trunk is not None:
        yield from sorted(base.trunk.state_dict().items())
    if base.shares_head:
        yield from sorted(base.policy.head.state_dict().items())
    if is_adapted(base.policy.branch):
        own = base.policy.branch.state_dict()
        yield from ((name, own[name]) for name in sorted(own) if not is_adapter(name))


def vocabulary_checksum(tokenizer: Any) -> str:
    """Of every token with its id."""
    return _digest(sorted(tokenizer.get_vocab().items()))
