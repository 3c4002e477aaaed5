"""A role on disk: its own tensors as safetensors and what they fit, as JSON.

The shared trunk and head are not stored again; a record says which model and cut the tensors belong to. A checkpoint
of the stage that makes a role holds the same two things, so it can stand for the stage's result.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import asdict, dataclass
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from fourfold.files import replacing, write_atomically
from fourfold.models.adapters import is_adapted, is_adapter
from fourfold.models.peft_folder import TENSORS as PEFT_TENSORS
from fourfold.models.peft_folder import is_peft_folder, own_names, peft_record
from fourfold.models.roles import Policy, Scorer
from fourfold.tensor_files import Source, TensorFile, Unread, read, write_tensors

TENSORS = "model.safetensors"
RECORD = "role.json"
# The same in a checkpoint of a stage: the group of tensors, and the state whose "record" is the role's.
CHECKPOINT_TENSORS = "role.safetensors"
CHECKPOINT_STATE = "state.json"
# What the tensors of a trained trunk, which goes with the actor, are called before their own names.
TRUNK = "trunk."


@dataclass(frozen=True)
class RoleRecord:
    """What the tensors of a role belong to."""

    kind: str  # "policy" or "scorer"
    model: str
    sharing: str
    branch_layers: int
    adapters: str = ""
    schema: int = 1

    @property
    def shares_head(self) -> bool:
        """Whether a policy's language head belongs to the trunk and is not stored with it."""
        return self.sharing != "none"


def own_tensors(role: Policy | Scorer, *, shares_head: bool) -> dict[str, Source]:
    """The role's tensors by name, each once; without a head that belongs to the trunk, and the base of adapters.

    A trained trunk goes with the actor. Where masters lie below the device, those; where a frozen role is parked, what
    lies there.
    """
    return {name: source_of(role, part) for name, part in own_parts(role, shares_head=shares_head).items()}


def source_of(role: Policy | Scorer, part: Tensor) -> Source:
    """One of the role's own parts, to be read from where its numbers are."""
    held: Any = holder_of(role)
    if held is None:
        return part.detach()
    dtype = part.dtype if role.masters is None else role.masters.dtype_of(part)
    return Unread(dtype, part.shape, partial(held.read, part))


def holder_of(role: Policy | Scorer) -> Any:
    """What reads and writes the role's numbers where its tensors do not hold them always; None where they do."""
    return role.masters or role.residency


def own_parts(role: Policy | Scorer, *, shares_head: bool) -> dict[str, Tensor]:
    """The tensors that the role's passes use: by name, each once, as `own_tensors`."""
    found: dict[str, Tensor] = {}
    seen: set[int] = set()
    adapted = is_adapted(role.branch)
    # Without keep_vars the tensors would be other objects than those that have masters.
    for name, tensor in role.state_dict(keep_vars=True).items():
        if adapted and name.startswith("branch.") and not is_adapter(name):
            continue
        if shares_head and isinstance(role, Policy) and name.startswith("head."):
            continue
        if tensor.data_ptr() not in seen:
            seen.add(tensor.data_ptr())
            found[name] = tensor
    if isinstance(role, Policy) and role.trunk is not None:
        found |= {f"{TRUNK}{name}": tensor for name, tensor in role.trunk.named_parameters() if tensor.requires_grad}
    return found


@torch.no_grad()
def load_own_tensors(role: Policy | Scorer, tensors: Mapping[str, Source], *, shares_head: bool) -> None:
    """Copy stored tensors into the role, one after the other; a missing, surplus or misshapen one is a ValueError."""
    targets = own_parts(role, shares_head=shares_head)
    if missing := sorted(targets.keys() - tensors.keys()):
        raise ValueError(
            f"the stored role lacks {len(missing)} tensors, first {missing[0]!r}; it belongs to another model"
        )
    if surplus := sorted(tensors.keys() - targets.keys()):
        raise ValueError(f"the stored role has {len(surplus)} unknown tensors, first {surplus[0]!r}")
    for name, target in targets.items():
        if target.shape != tensors[name].shape:
            raise ValueError(f"tensor {name!r}: stored shape {tuple(tensors[name].shape)}, model {tuple(target.shape)}")
    write = Tensor.copy_ if role.masters is None else role.masters.write
    for name, target in targets.items():
        write(target, read(tensors[name]))


def save_role(folder: Path, role: Policy | Scorer, record: RoleRecord) -> None:
    """Write a role; the record comes last, so a folder with a record is whole."""
    folder.mkdir(parents=True, exist_ok=True)
    for left in folder.glob(f".partial-{TENSORS}-*"):  # by a process that was killed here: one at a time writes a role
        left.unlink(missing_ok=True)
    with replacing(folder / TENSORS) as new:
        write_tensors(new, own_tensors(role, shares_head=record.shares_head))
    write_atomically(folder / RECORD, json.dumps(asdict(record), indent=2) + "\n")


def load_role(folder: Path, role: Policy | Scorer, expected: RoleRecord) -> None:
    """Read a stored role or a peft adapter into `role`; ValueError when it was made for another model, cut or kind."""
    tensors: Mapping[str, Source] = TensorFile(stored_tensors(folder, expected)).unread()
    if is_peft_folder(folder):
        tensors = own_names(tensors, role.branch)
    load_own_tensors(role, tensors, shares_head=expected.shares_head)


def stored_tensors(folder: Path, expected: RoleRecord) -> Path:
    """The tensors' file of a stored role whose record is the expected one; the weights are not read."""
    stored, tensors = _stored(folder, expected)
    for name, wanted in asdict(expected).items():
        if (got := stored.get(name)) != wanted:
            raise ValueError(
                f"{str(folder)!r} was made with {name} = {got!r}, this run has {wanted!r}; they must agree"
            )
    if not tensors.is_file():
        raise ValueError(f"no stored role at {str(folder)!r}: {tensors.name} is missing")
    return tensors


def _stored(folder: Path, expected: RoleRecord) -> tuple[dict[str, Any], Path]:
    """Record and tensors' file of a stored role, of a checkpoint of the stage that makes one, or of a peft adapter."""
    if is_peft_folder(folder):
        run = {"model": expected.model, "adapters": expected.adapters, "layers": expected.branch_layers}
        return peft_record(folder, **run), folder / PEFT_TENSORS
    path, state = folder / RECORD, folder / CHECKPOINT_STATE
    if path.is_file():
        return json.loads(path.read_text(encoding="utf-8")), folder / TENSORS
    record = json.loads(state.read_text(encoding="utf-8")).get("record") if state.is_file() else None
    if record is None:
        raise ValueError(f"no stored role at {str(folder)!r}: {RECORD} is missing; run the stage that makes it first")
    return record, folder / CHECKPOINT_TENSORS
