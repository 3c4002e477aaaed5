"""Stored roles come back to the bit, and only where they belong."""

from __future__ import annotations

import copy
import json
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file

from fourfold.models.heads import LanguageHead
from fourfold.models.roles import Policy, Scorer, checksum, copy_policy, scorer_on
from fourfold.models.split import cut
from fourfold.models.storage import RECORD, TENSORS, RoleRecord, load_own_tensors, load_role, own_tensors, save_role
from fourfold.tensor_files import read
from tiny import FAMILIES, tiny_model

TRUNK = RoleRecord("policy", "some/model", "trunk", 2)
NONE = RoleRecord("policy", "some/model", "none", 0)


def policy(family: str = "llama", mode: str = "trunk", seed: int = 0) -> Policy:
    model = tiny_model(family, seed=seed)
    return Policy(cut(model, 2 if mode == "trunk" else 0, 4, compute_dtype=torch.float32), LanguageHead.of(model))


def scorer(seed: int = 0) -> Scorer:
    made = scorer_on(policy(seed=seed))
    torch.manual_seed(seed)
    for tensor in (*made.head.parameters(), *made.head.buffers()):
        tensor.data.copy_(torch.randn(tensor.shape))
    return made


def test_what_a_killed_process_left_is_removed_by_the_next_one(tmp_path: Path) -> None:
    left = tmp_path / f".partial-{TENSORS}-999999999"
    left.write_bytes(b"half of it")
    save_role(tmp_path, policy(), TRUNK)
    assert sorted(path.name for path in tmp_path.iterdir()) == sorted([TENSORS, RECORD])


@pytest.mark.parametrize("family", FAMILIES)
@pytest.mark.parametrize("mode", ["trunk", "none"])
def test_a_policy_comes_back_to_the_bit(tmp_path: Path, family: str, mode: str) -> None:
    record = TRUNK if mode == "trunk" else NONE
    stored, loaded = policy(family, mode), policy(family, mode, seed=1)
    head_before = loaded.head.weight.detach().clone()
    save_role(tmp_path / "role", stored, record)
    load_role(tmp_path / "role", loaded, record)
    assert checksum([loaded.branch]) == checksum([stored.branch])
    if mode == "none":
        assert checksum([loaded]) == checksum([stored])
    else:
        assert torch.equal(loaded.head.weight, head_before), "the head belongs to the trunk"
        assert not any(name.startswith("head.") for name in load_file(tmp_path / "role" / TENSORS))


def test_a_tied_tensor_is_stored_once_and_stays_tied(tmp_path: Path) -> None:
    stored, loaded = policy("gpt2", "none"), policy("gpt2", "none", seed=1)
    save_role(tmp_path, stored, NONE)
    assert "head.weight" not in load_file(tmp_path / TENSORS)
    load_role(tmp_path, loaded, NONE)
    assert loaded.head.weight is loaded.branch.body.get_parameter("wte.weight")
    assert torch.equal(loaded.head.weight, stored.head.weight)


def test_a_scorer_comes_back_with_its_head_scale_and_shift(tmp_path: Path) -> None:
    """FAULTS E3, E11: the value head is in every stored scorer, and what is loaded is the file's."""
    record = replace(TRUNK, kind="scorer")
    stored, loaded = scorer(), scorer(seed=1)
    save_role(tmp_path, stored, record)
    assert {"head.linear.weight", "head.linear.bias", "head.scale", "head.shift"} < set(load_file(tmp_path / TENSORS))
    assert checksum([loaded]) != checksum([stored])
    load_role(tmp_path, loaded, record)
    assert checksum([loaded]) == checksum([stored])


def test_saving_again_replaces_what_was_there(tmp_path: Path) -> None:
    save_role(tmp_path, policy(), TRUNK)
    save_role(tmp_path, policy(seed=1), TRUNK)
    loaded = policy()
    load_role(tmp_path, loaded, TRUNK)
    assert checksum([loaded.branch]) == checksum([policy(seed=1).branch])
    assert sorted(path.name for path in tmp_path.iterdir()) == [TENSORS, RECORD]


@pytest.mark.parametrize(
    ("field", "value"), [("kind", "scorer"), ("model", "other/model"), ("sharing", "none"), ("branch_layers", 3)]
)
def test_a_role_of_another_model_cut_or_kind_is_refused(tmp_path: Path, field: str, value: object) -> None:
    save_role(tmp_path, policy(), TRUNK)
    with pytest.raises(ValueError, match=rf"made with {field} = .*this run has {value!r}"):
        load_role(tmp_path, policy(), replace(TRUNK, **{field: value}))


@pytest.mark.parametrize("schema", [0, 2, None])
def test_a_role_of_another_schema_is_refused(tmp_path: Path, schema: int | None) -> None:
    """FAULTS K4 (its kind)."""
    save_role(tmp_path, policy(), TRUNK)
    record = json.loads((tmp_path / RECORD).read_text())
    (tmp_path / RECORD).write_text(json.dumps(record | {"schema": schema, "added_later": 1}))
    with pytest.raises(ValueError, match=rf"made with schema = {schema}, this run has 1"):
        load_role(tmp_path, policy(), TRUNK)


def test_a_folder_without_a_record_is_no_role(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match=r"no stored role at .*role.json is missing; run the stage"):
        load_role(tmp_path / "absent", policy(), TRUNK)
    save_role(tmp_path, policy(), TRUNK)
    (tmp_path / RECORD).unlink()  # the record comes last: without it the folder is half-written
    with pytest.raises(ValueError, match="no stored role"):
        load_role(tmp_path, policy(), TRUNK)


def damaged(change: str) -> tuple[dict[str, torch.Tensor], str]:
    tensors = {name: read(tensor) for name, tensor in own_tensors(policy(), shares_head=True).items()}
    first = min(tensors)
    if change == "missing":
        del tensors[first]
        return tensors, rf"lacks 1 tensors, first '{first}'"
    if change == "surplus":
        return tensors | {"branch.extra": torch.zeros(2)}, r"has 1 unknown tensors, first 'branch.extra'"
    return tensors | {first: torch.zeros(3, 3)}, rf"'{first}': stored shape \(3, 3\)"


@pytest.mark.parametrize("change", ["missing", "surplus", "misshapen"])
def test_tensors_that_do_not_fit_are_refused(tmp_path: Path, change: str) -> None:
    save_role(tmp_path, policy(), TRUNK)
    tensors, message = damaged(change)
    save_file(tensors, tmp_path / TENSORS)
    with pytest.raises(ValueError, match=message):
        load_role(tmp_path, policy(), TRUNK)


def test_tensors_that_do_not_fit_change_nothing() -> None:
    role = policy()
    before = checksum([role])
    tensors = {name: read(tensor) + 1 for name, tensor in own_tensors(role, shares_head=True).items()}
    last = max(tensors, key=list(tensors).index)
    with pytest.raises(ValueError, match="stored shape"):
        load_own_tensors(role, tensors | {last: torch.zeros(7, 7)}, shares_head=True)
    assert checksum([role]) == before


def test_a_copy_with_a_shared_head_owns_its_branch_only() -> None:
    original = policy()
    shared, separate = copy_policy(original, share_head=True), copy_policy(original, share_head=False)
    assert shared.head is original.head
    assert separate.head.weight.data_ptr() != original.head.weight.data_ptr()
    for twin in (shared, separate):
        assert checksum([twin]) == checksum([original])
        with torch.no_grad():
            next(iter(twin.branch.parameters())).add_(1.0)
        assert checksum([twin]) != checksum([original])
    assert checksum([original]) == checksum([copy.deepcopy(original)])
