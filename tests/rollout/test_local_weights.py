"""What the sampler makes of weights that are damaged, that have changed, or that are wider than it computes in."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from fourfold.errors import RunFailed
from fourfold.models.roles import copy_policy, freeze, make_trainable
from fourfold.rollout.sampler import PromptBatch
from tiny_roles import MODES, forward_shapes, random_prompts, tiny_base, tiny_sampler

# --- broken weights ---------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("value", [torch.nan, torch.inf])
@pytest.mark.parametrize("where", ["branch", "trunk", "head"])
def test_weights_that_are_not_finite_stop_the_run_by_phase_and_role(tmp_path: Path, where: str, value: float) -> None:
    """FAULTS B10."""
    base = tiny_base(tmp_path / "m")
    module = {"branch": base.policy.branch, "trunk": base.trunk, "head": base.policy.head}[where]
    assert module is not None
    with torch.no_grad():
        next(p for p in module.parameters() if p.ndim == 2)[9] = value
    prompts = PromptBatch([[9, 9, 9]], [0], [0])
    said = {
        "branch": r"1 of the actor's \d+ weights are not finite, the first 'branch\.",
        "trunk": r"the actor's logits for response token \d+ are not finite, nor are the trunk's",
        "head": "1 of the actor's .* the first 'head",
    }
    with pytest.raises(RunFailed, match=f"^generate: {said[where]}"):
        tiny_sampler(base).generate(prompts, policy_version=3)


# --- fresh weights ----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("compute", ["float32", "bfloat16"])
@torch.no_grad()
def test_weights_that_change_between_two_calls_are_seen(tmp_path: Path, mode: str, compute: str) -> None:
    """FAULTS H9: no cache and no working copy outlives an update; a fresh sampler says the same to the bit."""
    base = tiny_base(tmp_path / "m", mode=mode, precision__compute=compute)
    make_trainable(base.policy, with_language_head=mode == "none")
    sampler = tiny_sampler(base, max_new_tokens=5)
    prompts = random_prompts([3, 5])
    before, _ = sampler.generate(prompts, policy_version=0)
    for parameter in base.policy.branch.parameters():
        parameter.mul_(1.25)
    after, _ = sampler.generate(prompts, policy_version=1)
    fresh, _ = tiny_sampler(base, max_new_tokens=5).generate(prompts, policy_version=1)
    assert torch.equal(after.sequences, fresh.sequences)
    assert torch.equal(after.sampler_log_probs, fresh.sampler_log_probs)
    first = before.sampler_log_probs[:, 0]
    assert (after.sampler_log_probs[:, 0] - first).abs().min() > 1e-3
    gap = (after.sampler_log_probs - after.log_probs).abs()[after.response_mask]
    assert gap.max() < (1e-4 if compute == "float32" else 0.2)


@pytest.mark.parametrize("mode", MODES)
@torch.no_grad()
def test_the_working_copy_holds_the_masters_rounded_and_leaves_them_alone(tmp_path: Path, mode: str) -> None:
    base = tiny_base(tmp_path / "m", mode=mode, precision__compute="bfloat16")
    make_trainable(base.policy, with_language_head=mode == "none")
    kept = {name: p.clone() for name, p in base.policy.named_parameters()}
    sampler = tiny_sampler(base, max_new_tokens=3)
    rollout, _ = sampler.generate(random_prompts([3, 5]), policy_version=0)
    assert all(torch.equal(p, kept[name]) for name, p in base.policy.named_parameters())
    assert all(
        p.requires_grad == (mode == "none" or name.startswith("branch")) for name, p in base.policy.named_parameters()
    )
    frozen = copy_policy(base.policy, share_head=base.shares_head)
    freeze(frozen)
    twin, _ = tiny_sampler(base, frozen, max_new_tokens=3).generate(random_prompts([3, 5]), policy_version=0)
    assert torch.equal(rollout.sequences, twin.sequences)
    assert torch.equal(rollout.sampler_log_probs, twin.sampler_log_probs)


def test_in_float32_the_sampler_makes_no_copy(tmp_path: Path) -> None:
    base = tiny_base(tmp_path / "m", mode="none")
    make_trainable(base.policy, with_language_head=True)
    sampler = tiny_sampler(base, max_new_tokens=3, score_batch_size=2)
    with forward_shapes(base.policy.branch) as shapes:
        sampler.generate(random_prompts([4] * 2), policy_version=3)
    assert shapes[:3] == [(2, 3), (2, 1), (2, 1)]


@pytest.mark.parametrize("mode", ["none", "trunk"])
def test_between_rollouts_the_half_precision_copy_is_a_form_without_numbers(tmp_path: Path, mode: str) -> None:
    """And the next rollout draws by the weights as they are then, as a new sampler does."""
    base = tiny_base(tmp_path / "m", mode=mode, precision__compute="bfloat16")
    policy = base.new_policy()
    make_trainable(policy, with_language_head=not base.shares_head)
    sampler, prompts = tiny_sampler(base, policy), random_prompts([3, 5, 1, 4])
    sampler.generate(prompts, policy_version=0)
    assert sampler._working is not None
    copied = [target for target, _ in sampler._copied(sampler._working)]
    assert copied and all(each.untyped_storage().nbytes() <= 4 for each in copied)
    with torch.no_grad():
        for parameter in policy.parameters():
            if parameter.requires_grad:
                parameter.mul_(1.25)
    again, _ = sampler.generate(prompts, policy_version=0)
    fresh, _ = tiny_sampler(base, policy).generate(prompts, policy_version=0)
    assert torch.equal(again.sequences, fresh.sequences)
    assert torch.equal(again.sampler_log_probs, fresh.sampler_log_probs)
