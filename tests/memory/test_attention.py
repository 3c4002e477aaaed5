"""One attention kernel for all four roles; what device or architecture cannot do is refused with what they can."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from transformers import AutoConfig, AutoModelForCausalLM

from fourfold.config import ConfigError
from fourfold.memory.attention import check_attention, on_device, use_attention
from training.runs import (
    SHARINGS,
    by_function,
    give_value_head,
    make_config,
    make_trainer,
    merged,
    settings,
    weights_of,
)
from training.test_levers import difference

CPU = torch.device("cpu")


@pytest.mark.parametrize("kernel", ["flex_attention", "flash_attention_2"])
def test_what_the_cpu_cannot_do_is_refused(kernel: str, tmp_path: Path) -> None:
    with pytest.raises(ValueError, match=r"memory.attention: given .*; allowed here: auto, eager, sdpa$"):
        check_attention(kernel, CPU)
    with pytest.raises(ConfigError, match=r"memory\.attention"):
        make_config(settings(tmp_path, {"memory": {"attention": kernel}}))


def test_flash_in_float32_is_refused(tmp_path: Path) -> None:
    changes = {"memory": {"attention": "flash_attention_2"}, "system": {"device": "auto"}}
    with pytest.raises(ConfigError, match="bfloat16 and float16 only"):
        make_config(settings(tmp_path, changes))


def test_what_the_architecture_cannot_do_is_refused() -> None:
    """Gemma 2 caps its attention logits, which sdpa does not."""
    sizes = {"hidden_size": 32, "intermediate_size": 32, "num_hidden_layers": 1, "num_attention_heads": 2}
    config = AutoConfig.for_model("gemma2", vocab_size=50, num_key_value_heads=1, head_dim=16, **sizes)
    model = AutoModelForCausalLM.from_config(config)
    with pytest.raises(ValueError, match=r"'sdpa', which Gemma2ForCausalLM does not have; .*: auto, eager$"):
        use_attention(model, "sdpa", CPU)
    use_attention(model, "eager", CPU)
    assert model.config._attn_implementation == "eager"


def test_auto_leaves_the_model_alone_and_every_allowed_kernel_is_a_choice() -> None:
    check_attention("auto", CPU)
    assert on_device(CPU) == ["eager", "sdpa"]


@pytest.mark.parametrize(("family", "sharing"), [("llama", "trunk"), ("gpt2", "none"), ("llama", "adapters")])
def test_all_roles_have_the_kernel_and_the_update_is_that_of_the_other(
    tmp_path: Path, sharing: str, family: str
) -> None:
    moves = []
    for kernel in ("sdpa", "eager"):
        changes = merged(by_function("pays_by_hash", steps=1), SHARINGS[sharing])
        tree = settings(tmp_path, merged(changes, {"memory": {"attention": kernel}}), family=family)
        trainer = make_trainer(make_config(tree))
        models = trainer.models
        give_value_head(models)
        parts = [models.base.trunk, models.actor.branch, models.critic.branch, models.reference.branch]
        for part in parts:
            if part is not None:
                assert part.body.config._attn_implementation == kernel
                used = {layer.config._attn_implementation for layer in part.attentions}
                assert used == {kernel}
        roles = {"actor": models.actor, "critic": models.critic}
        before = {f"{role}.{name}": w for role, module in roles.items() for name, w in weights_of(module).items()}
        row = trainer.step()
        assert abs(row["kl_per_token_mean"]) < 1e-5, "actor and reference agree before the update"
        after = {f"{role}.{name}": w for role, module in roles.items() for name, w in weights_of(module).items()}
        moves.append((before, after))
    assert difference(*moves) < 1e-2


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
def test_flex_attention_is_a_choice_on_cuda() -> None:
    check_attention("flex_attention", torch.device("cuda"))
