"""What a role's weights are, in few bytes: two processes that compare them need not send the weights."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from safetensors import safe_open
from torch import Tensor

from fourfold.models.adapters import is_adapted, is_adapter
from fourfold.models.loading import Base
from fourfold.models.roles import Policy, Scorer, checksum_of
from fourfold.models.storage import TRUNK, RoleRecord, own_tensors, stored_tensors


@dataclass(frozen=True)
class RoleWeights:
    """Checksums of a role before it is frozen: of what a stage would store of it, and of what all roles share."""

    own: str
    shared: str


def weights_of_role(base: Base, role: Policy | Scorer) -> RoleWeights:
    """Of a role in memory, as it starts: a trained trunk is still the shared one."""
    own = own_tensors(role, shares_head=base.shares_head)
    names = sorted(name for name in own if not name.startswith(TRUNK))
    return RoleWeights(checksum_of((name, own[name].float()) for name in names), _of_shared(base))


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
    text = json.dumps(sorted(tokenizer.get_vocab().items()), ensure_ascii=False)
    return hashlib.blake2b(text.encode(), digest_size=16).hexdigest()
