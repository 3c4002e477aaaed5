"""Four roles over one base: adapters of their own, the base there once, and merged weights that say the same."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from fourfold.config.schema import AdaptersSection
from fourfold.models.adapters import adapter_parameters, add_adapters, copy_part, is_adapted, merge_adapters
from fourfold.models.assembly import FourModels, assemble, record_for
from fourfold.models.roles import scorer_on
from fourfold.models.split import Part, cut
from fourfold.models.storage import own_tensors, save_role
from tiny import FAMILIES, tiny_directory, tiny_model
from tiny_roles import activations_of, tiny_base, tiny_config, tiny_rollout

KINDS: list[dict[str, Any]] = [{}, {"dora": True}, {"rslora": True}]
IDS = torch.arange(24).reshape(3, 8) % 100
MASK = torch.ones_like(IDS, dtype=torch.bool)


def adapted(family: str = "llama", dtype: torch.dtype = torch.float32, **settings: Any) -> tuple[Part, Tensor]:
    """A whole tiny model with fresh adapters, and what it computed without them."""
    part = cut(tiny_model(family), 0, 4, compute_dtype=dtype)
    part.to(dtype).requires_grad_(False)
    plain = part(IDS, MASK)
    add_adapters(part, AdaptersSection(**{"rank": 4, **settings}), seed=0)
    return part, plain


def shake(part: nn.Module, seed: int = 0) -> None:
    """Adapters as after training: no B is 0."""
    generator = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for p in adapter_parameters(part):
            p.add_(0.05 * torch.randn(p.shape, generator=generator))


def unique_bytes(*modules: nn.Module) -> int:
    storages = {t.untyped_storage().data_ptr(): t.untyped_storage().nbytes() for m in modules for t in m.parameters()}
    return sum(storages.values())


@pytest.mark.parametrize("family", FAMILIES)
@pytest.mark.parametrize("kind", KINDS)
def test_fresh_adapters_change_nothing_and_trained_ones_can_be_merged(family: str, kind: dict[str, Any]) -> None:
    """FAULTS of the field: B = 0 at the start, and fused equals unfused within rounding."""
    part, plain = adapted(family, **kind)
    torch.testing.assert_close(part(IDS, MASK), plain, rtol=0, atol=1e-5)
    shake(part)
    apart = part(IDS, MASK)
    assert (apart - plain).abs().max() > 0.01, "trained adapters act"
    merge_adapters(part)
    assert not is_adapted(part)
    torch.testing.assert_close(part(IDS, MASK), apart, rtol=0, atol=2e-5)


@pytest.mark.parametrize(("kind", "scale"), [({}, 8.0 / 4), ({"rslora": True}, 8.0 / 2)])
def test_the_product_is_that_of_the_paper(kind: dict[str, Any], scale: float) -> None:
    """W x + alpha / r * B A x, and alpha / sqrt(r) with rsLoRA."""
    part, _ = adapted(alpha=8.0, **kind)
    shake(part)
    layer: Any = part.get_submodule("body.layers.0.self_attn.q_proj")
    x = torch.randn(5, 32, generator=torch.Generator().manual_seed(1))
    a, b = layer.lora_A["default"].weight, layer.lora_B["default"].weight
    torch.testing.assert_close(layer(x), x @ layer.base_layer.weight.T + scale * (x @ a.T) @ b.T, rtol=1e-5, atol=1e-5)


def test_only_the_named_layers_are_adapted_and_unknown_names_are_refused() -> None:
    part, _ = adapted(targets=["q_proj", "v_proj"])
    names = {name.split(".")[-4] for name, _ in part.named_parameters() if "lora_" in name}
    assert names == {"q_proj", "v_proj"}
    with pytest.raises(ValueError, match=r"adapters\.targets: given qproj; this model's linear layers are .*q_proj"):
        adapted(targets=["qproj"])


def test_the_same_seed_gives_the_same_adapters_and_moves_no_other_generator() -> None:
    torch.manual_seed(5)
    before = torch.get_rng_state()
    first, second = adapted()[0], adapted()[0]
    assert torch.equal(torch.get_rng_state(), before)
    for a, b in zip(adapter_parameters(first), adapter_parameters(second), strict=True):
        assert torch.equal(a, b)


def test_a_copy_has_adapters_of_its_own_over_the_same_base() -> None:
    part, _ = adapted()
    twin = copy_part(part)
    ours, theirs = dict(part.named_parameters()), dict(twin.named_parameters())
    assert ours.keys() == theirs.keys()
    assert all((ours[name] is theirs[name]) != ("lora_" in name) for name in ours)
    apart = part(IDS, MASK)
    shake(twin)
    assert torch.equal(part(IDS, MASK), apart)


def four(path: Path, *, sft: bool = False, **settings: Any) -> FourModels:
    """The four roles of an adapters run; with `sft` the actor starts from trained adapters."""
    tiny_directory(path / "m")
    config = tiny_config(path / "m", "adapters", critic__init="actor", **settings)
    stored = None
    if sft:
        policy = tiny_base(path / "m", mode="adapters", **settings).new_policy()
        shake(policy.branch)
        stored = path / "sft"
        save_role(stored, policy, record_for(config, "policy"))
    return assemble(config, tiny_base(path / "m", mode="adapters", **settings), stored, None)


@pytest.mark.parametrize("layers", [0, 2])
def test_the_base_is_resident_once(tmp_path: Path, layers: int) -> None:
    """All roles together hold the base and four sets of adapters."""
    models = four(tmp_path, adapters__layers=layers, adapters__rank=2)
    reward = scorer_on(models.actor)
    roles = (models.actor, models.critic, models.reference, reward)
    trunk = [] if models.base.trunk is None else [models.base.trunk]
    adapters = sum(p.nbytes for role in roles for p in adapter_parameters(role.branch))
    heads = sum(p.nbytes for role in (models.critic, reward) for p in role.head.parameters())
    base = unique_bytes(tiny_model("llama"))
    assert unique_bytes(*trunk, *roles) == base + adapters + heads
    assert adapters < base


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_the_reference_is_the_actor_as_it_starts(tmp_path: Path, dtype: str) -> None:
    """FAULTS: also from an sft adapter the KL at step 0 is exactly 0, and it stays put when the actor moves."""
    models = four(tmp_path, sft=True, precision__compute=dtype)
    rollout = tiny_rollout([(3, 4), (5, 2)])
    activations = activations_of(models.base, rollout)
    actor, reference = (role.log_probs(activations, rollout, 1.0)[0] for role in (models.actor, models.reference))
    assert actor.requires_grad and torch.equal(actor, reference)
    shake(models.actor.branch, seed=1)
    moved, still = (role.log_probs(activations, rollout, 1.0)[0] for role in (models.actor, models.reference))
    assert torch.equal(still, reference) and not torch.equal(moved, actor)


def test_adapters_and_the_value_head_are_trained_and_nothing_else(tmp_path: Path) -> None:
    models = four(tmp_path)
    for role in (models.actor, models.critic):
        trained = {name for name, p in role.named_parameters() if p.requires_grad}
        assert trained == {
            name for name in own_tensors(role, shares_head=True) if name not in ("head.scale", "head.shift")
        }
        assert all("lora_" in name or name.startswith("head.linear") for name in trained)
        assert {p.dtype for p in role.parameters() if p.requires_grad} == {torch.float32}
    assert not any(p.requires_grad for p in models.reference.parameters())


def test_adapters_of_other_settings_are_refused(tmp_path: Path) -> None:
    four(tmp_path, sft=True)
    config = tiny_config(tmp_path / "m", "adapters", adapters__alpha=7.0)
    with pytest.raises(
        ValueError, match="adapters = 'lora rank 16 alpha 32 on all', this run has 'lora rank 16 alpha 7"
    ):
        assemble(config, tiny_base(tmp_path / "m", mode="adapters"), tmp_path / "sft", None)


@pytest.mark.parametrize("layers", [5, 9])
def test_more_adapted_layers_than_the_model_has_are_refused(tmp_path: Path, layers: int) -> None:
    with pytest.raises(ValueError, match=rf"adapters\.layers = {layers}: the model has 4 layers"):
        four(tmp_path, adapters__layers=layers)
