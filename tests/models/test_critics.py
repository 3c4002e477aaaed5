"""What a critic can be made of: the lowest layers of the run's model, a model of its own, several heads."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import Tensor
from transformers import AutoConfig, AutoModelForCausalLM, AutoModelForSequenceClassification

from fourfold.batch import Rollout
from fourfold.memory.budget import tensor_bytes
from fourfold.models.assembly import FourModels, assemble, record_for
from fourfold.models.ensemble import EnsembleHead
from fourfold.models.heads import AnyNumberHead, ScalarHead
from fourfold.models.own_critic import VALUE_SHIFT, OwnCritic, own_critic_bytes
from fourfold.models.roles import Scorer, checksum
from fourfold.models.storage import save_role
from tiny import FAMILIES, tiny_directory, tiny_tokenizer
from tiny_roles import activations_of, tiny_base, tiny_config, tiny_rollout

ROLLOUT = tiny_rollout([(3, 4), (5, 2), (1, 6)])
ADAPTED: dict[str, Any] = {"adapters__rank": 4}
MODES: dict[str, tuple[str, dict[str, Any]]] = {
    "none": ("none", {}),
    "trunk": ("trunk", {}),
    "trained trunk": ("trunk", {"trunk__train": True}),
    "adapters": ("adapters", ADAPTED),
    "adapters over a trunk": ("adapters", {**ADAPTED, "adapters__layers": 2}),
}


def made(path: Path, mode: str, reward: Path | None = None, **settings: Any) -> FourModels:
    """The four roles of a run on a tiny model with 4 layers, 2 of them above a trunk."""
    sharing, of_mode = MODES[mode]
    given: dict[str, Any] = ({} if "critic__model" in settings else {"critic__init": "actor"}) | of_mode | settings
    config = tiny_config(path / "m", sharing, **given)
    return assemble(config, tiny_base(path / "m", mode=sharing, **given), None, reward)


def with_random_head(critic: Scorer, seed: int = 3) -> Scorer:
    """A new head says the same everywhere, which would show nothing."""
    weight = critic.head.linear.weight
    with torch.no_grad():
        weight.copy_(torch.randn(weight.shape, generator=torch.Generator().manual_seed(seed)))
        critic.head.linear.bias.fill_(0.25)
    return critic


@torch.no_grad()
def oracle_values(model: Any, head: AnyNumberHead, rollout: Rollout) -> Tensor:
    """Values above the last hidden state of transformers' own model, each row alone and without padding."""
    found = torch.zeros(rollout.response_mask.shape)
    for row, (ids, mask) in enumerate(zip(rollout.sequences, rollout.attention_mask, strict=True)):
        before, length = int(rollout.prompt_mask[row].sum()), int(rollout.response_mask[row].sum())
        hidden = model.base_model(ids[mask][None]).last_hidden_state[0]
        found[row, :length] = head(hidden[before - 1 : before - 1 + length])
    return found


def shortened(path: Path, layers: int) -> Any:
    """The library's model with its lowest layers only."""
    model: Any = AutoModelForCausalLM.from_pretrained(path, dtype=torch.float32).eval()
    body = model.base_model
    name = next(name for name in ("layers", "h") if hasattr(body, name))
    setattr(body, name, getattr(body, name)[:layers])
    body.config.num_hidden_layers = layers
    return model


# --- the lowest layers ------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("mode", MODES)
def test_a_critic_of_the_lowest_layers_computes_what_a_shorter_model_does(tmp_path: Path, mode: str) -> None:
    models = made(tmp_path, mode, critic__layers=3)
    critic, base = with_random_head(models.critic), models.base
    inputs = activations_of(base, ROLLOUT)
    if mode == "trained trunk":
        inputs = type(inputs)(ROLLOUT.sequences, ROLLOUT.attention_mask)  # nothing is cached
    expected = oracle_values(shortened(tmp_path / "m", 3), critic.head, ROLLOUT)
    with torch.no_grad():
        torch.testing.assert_close(critic.values(inputs, ROLLOUT), expected, rtol=1e-5, atol=1e-5)
    assert expected.std() > 0.1 and models.new_value_head
    trunk = 0 if base.trunk is None else base.trunk.num_layers
    assert critic.branch.num_layers == 3 - trunk and models.actor.branch.num_layers == 4 - trunk
    trained = sum(p.numel() for p in critic.parameters() if p.requires_grad)
    assert 0 < trained < sum(p.numel() for p in made(tmp_path, mode).critic.parameters() if p.requires_grad)


@pytest.mark.parametrize("family", FAMILIES)
def test_every_family_can_be_shortened(tmp_path: Path, family: str) -> None:
    tiny_directory(tmp_path / "m", family)
    models = made(tmp_path, "none", critic__layers=2)
    critic = with_random_head(models.critic)
    expected = oracle_values(shortened(tmp_path / "m", 2), critic.head, ROLLOUT)
    with torch.no_grad():
        found = critic.values(activations_of(models.base, ROLLOUT), ROLLOUT)
    torch.testing.assert_close(found, expected, rtol=1e-4, atol=1e-4)


def test_above_a_trunk_the_norm_and_the_head_can_be_all_there_is(tmp_path: Path) -> None:
    models = made(tmp_path, "trunk", critic__layers=2)
    critic = with_random_head(models.critic)
    expected = oracle_values(shortened(tmp_path / "m", 2), critic.head, ROLLOUT)
    with torch.no_grad():
        found = critic.values(activations_of(models.base, ROLLOUT), ROLLOUT)
    torch.testing.assert_close(found, expected, rtol=1e-5, atol=1e-5)
    assert {name for name, p in critic.named_parameters() if p.requires_grad} == {
        "branch.body.norm.weight",
        "head.linear.weight",
        "head.linear.bias",
    }


@pytest.mark.parametrize(
    ("mode", "layers", "said"),
    [
        ("none", 4, r"given 4 of the model's 4 layers; allowed: 1 to 3, or 0 for all"),
        ("trunk", 1, r"of which the lowest 2 are the shared trunk.*allowed: 2 to 3.*larger trunk.branch_layers"),
        ("adapters over a trunk", 2, r"allowed: 3 to 3.*try a larger adapters.layers"),
        ("adapters", 9, r"given 9 of the model's 4 layers; allowed: 1 to 3"),
    ],
)
def test_a_number_of_layers_that_cannot_be_is_refused(tmp_path: Path, mode: str, layers: int, said: str) -> None:
    with pytest.raises(ValueError, match=f"^critic.layers: .*{said}"):
        made(tmp_path, mode, critic__layers=layers)


@pytest.mark.parametrize("init", ["reward", "actor", "base"])
@pytest.mark.parametrize("residency", ["keep", "service"])
def test_layers_are_those_of_the_named_source_and_the_reward_model_keeps_all(
    tmp_path: Path, init: str, residency: str
) -> None:
    base = tiny_base(tmp_path / "m", mode="none")
    scorer = base.new_scorer()
    with torch.no_grad():
        for p in scorer.parameters():
            p.add_(0.05 * torch.randn(p.shape, generator=torch.Generator().manual_seed(1)))
        scorer.head.scale.fill_(0.5)
    save_role(tmp_path / "reward", scorer, record_for(tiny_config(tmp_path / "m", "none"), "scorer"))
    given: dict[str, Any] = {"critic__init": init, "critic__layers": 2}
    if residency == "service":
        given |= {"reward__residency": "service", "service__url": "http://127.0.0.1:9"}
    models = made(tmp_path, "none", tmp_path / "reward", **given)
    source = scorer if init == "reward" else base.policy
    assert checksum(models.critic.branch.layers) == checksum(source.branch.layers[:2])
    assert not models.critic.head.linear.weight.any() and float(models.critic.head.scale) == 1.0
    assert isinstance(models.reward, Scorer) and models.reward.branch.num_layers == 4
    assert models.new_value_head
    if residency == "keep":
        assert checksum([models.reward.head]) == checksum([scorer.head])
        held = {id(p) for p in models.reward.parameters()} & {id(p) for p in models.critic.parameters()}
        assert not held


def test_the_room_that_a_critic_takes_is_what_it_has(tmp_path: Path) -> None:
    tiny_directory(tmp_path / "small", layers=2, hidden=16, seed=5)
    cases: list[tuple[str, dict[str, Any]]] = [("none", {"critic__layers": 2}), ("trunk", {"critic__layers": 3})]
    for mode, given in (*cases, ("trunk", {})):
        models = made(tmp_path, mode, **given)
        planned = models.room.planned.weights["critic"]
        assert planned == tensor_bytes(models.critic.branch.parameters())
    for mode in ("none", "trunk", "adapters"):
        models = made(tmp_path, mode, critic__model=str(tmp_path / "small"))
        assert models.room.planned.weights["critic"] == tensor_bytes(models.critic.parameters())


# --- a model of its own -----------------------------------------------------------------------------------------------


@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("family", ["llama", "gpt2"])
def test_a_critic_with_a_model_of_its_own_shares_nothing_and_reads_ids(tmp_path: Path, mode: str, family: str) -> None:
    tiny_directory(tmp_path / "small", family, layers=3, hidden=16, seed=5)
    models = made(tmp_path, mode, critic__model=str(tmp_path / "small"))
    critic = models.critic
    assert isinstance(critic, OwnCritic) and models.new_value_head
    assert critic.trunk is None, "also where others stand on a trained trunk"
    own = models.own_parameters(critic)
    assert len(own) == len(list(critic.parameters())) and all(p.requires_grad for p in own)
    with_random_head(critic)
    model: Any = AutoModelForCausalLM.from_pretrained(tmp_path / "small", dtype=torch.float32).eval()
    expected = oracle_values(model, critic.head, ROLLOUT)
    with torch.no_grad():
        found = critic.values(activations_of(models.base, ROLLOUT), ROLLOUT)
        every, last = critic.values_and_last(activations_of(models.base, ROLLOUT), ROLLOUT)
    torch.testing.assert_close(found, expected, rtol=1e-5, atol=1e-5)
    torch.testing.assert_close(every, expected, rtol=1e-5, atol=1e-5)
    assert last.shape == (3,) and float(expected.std()) > 0.1
    config = tiny_config(tmp_path / "m", critic__model=str(tmp_path / "small"))
    assert own_critic_bytes(config) == tensor_bytes(critic.parameters())


def test_a_sequence_classifier_brings_its_head(tmp_path: Path) -> None:
    """Its logit at a token, and what `fourfold distill` notes that it is short of the value, is the value there."""
    folder = tmp_path / "small"
    config = AutoConfig.for_model(
        "llama", vocab_size=160, hidden_size=16, num_hidden_layers=2, num_attention_heads=4, intermediate_size=32,
        num_labels=1, pad_token_id=0, initializer_range=0.3, **{VALUE_SHIFT: 0.75},
    )  # fmt: skip
    torch.manual_seed(7)
    model: Any = AutoModelForSequenceClassification.from_config(config, dtype=torch.float32).eval()
    model.save_pretrained(folder)
    tiny_tokenizer(pad_is_eos=False).save_pretrained(folder)
    models = made(tmp_path, "trunk", critic__model=str(folder))
    assert not models.new_value_head
    ids = ROLLOUT.sequences[0][ROLLOUT.attention_mask[0]]
    with torch.no_grad():
        found = models.critic.values(activations_of(models.base, ROLLOUT), ROLLOUT)[0, :4]
        expected = torch.stack([model(ids[None, : 3 + t]).logits[0, 0] + 0.75 for t in range(4)])
    torch.testing.assert_close(found, expected, rtol=1e-5, atol=1e-5)


def test_a_classifier_with_several_labels_is_refused(tmp_path: Path) -> None:
    config = AutoConfig.for_model(
        "llama", vocab_size=160, hidden_size=16, num_hidden_layers=1, num_attention_heads=4, num_labels=3
    )
    AutoModelForSequenceClassification.from_config(config).save_pretrained(tmp_path / "three")
    tiny_tokenizer(pad_is_eos=False).save_pretrained(tmp_path / "three")
    with pytest.raises(ValueError, match=r"critic.model = .*with 3 labels; allowed: one with a single label"):
        made(tmp_path, "none", critic__model=str(tmp_path / "three"))


def test_other_tokens_are_refused_with_the_reason(tmp_path: Path) -> None:
    """Another vocabulary; the same one with other special tokens; fewer embeddings than the actor can write."""
    tiny_directory(tmp_path / "other", layers=1, hidden=16)
    made_otherwise = json.loads((tmp_path / "other" / "tokenizer.json").read_text())
    merged_token = made_otherwise["model"]["merges"].pop()
    made_otherwise["model"]["vocab"].pop("".join(merged_token))
    (tmp_path / "other" / "tokenizer.json").write_text(json.dumps(made_otherwise))
    with pytest.raises(ValueError, match=r"another vocabulary.* is none and 159\).*cut at other places.*distill"):
        made(tmp_path, "none", critic__model=str(tmp_path / "other"))
    tiny_directory(tmp_path / "begins", layers=1, hidden=16, bos=True)
    with pytest.raises(ValueError, match=r"other special tokens: its bos_token is '<bos>', the run's None"):
        made(tmp_path, "none", critic__model=str(tmp_path / "begins"))
    tiny_directory(tmp_path / "few", layers=1, hidden=16, vocab_size=100)
    with pytest.raises(ValueError, match=r"embeddings for 100 ids, and the actor may write any of 160"):
        made(tmp_path, "none", critic__model=str(tmp_path / "few"))
    tiny_directory(tmp_path / "pads", layers=1, hidden=16, pad_is_eos=True)
    made(tmp_path, "none", critic__model=str(tmp_path / "pads"))  # padding is masked: its token may be any


def test_the_same_tokens_under_other_ids_are_mapped(tmp_path: Path) -> None:
    """The very values of the model whose ids are the run's: rows of the embedding go where their tokens have gone."""
    plain = tiny_directory(tmp_path / "plain", layers=1, hidden=16, seed=3)
    other = tiny_directory(tmp_path / "other", layers=1, hidden=16, seed=3)
    content = json.loads((other / "tokenizer.json").read_text())
    places = list(range(4)) + [4 + (7 * each) % 156 for each in range(156)]  # special tokens stay
    content["model"]["vocab"] = {token: places[old] for token, old in content["model"]["vocab"].items()}
    (other / "tokenizer.json").write_text(json.dumps(content))
    weights = load_file(other / "model.safetensors")
    for name in ("model.embed_tokens.weight", "lm_head.weight"):
        if name in weights:
            weights[name][torch.tensor(places)] = weights[name].clone()
    save_file(weights, other / "model.safetensors", metadata={"format": "pt"})
    found = []
    for folder in (plain, other):
        models = made(tmp_path, "trunk", critic__model=str(folder))
        with torch.no_grad():
            critic = with_random_head(models.critic)
            found.append(critic.values(activations_of(models.base, ROLLOUT), ROLLOUT))
    assert torch.equal(*found) and found[0].any()


def test_a_folder_without_a_model_is_named(tmp_path: Path) -> None:
    (tmp_path / "empty").mkdir()
    with pytest.raises(ValueError, match=r"^critic.model = '.*empty' cannot be loaded .*`fourfold distill`"):
        made(tmp_path, "none", critic__model=str(tmp_path / "empty"))


# --- several heads ----------------------------------------------------------------------------------------------------


def test_an_ensemble_starts_as_copies_of_one_head_and_says_their_mean() -> None:
    head = ScalarHead(8)
    generator = torch.Generator().manual_seed(0)
    with torch.no_grad():
        head.linear.weight.normal_(generator=generator)
        head.linear.bias.fill_(0.5)
        head.scale.fill_(2.0)
        head.shift.fill_(-1.0)
    several, hidden = EnsembleHead.of(head, 3), torch.randn(2, 5, 8, generator=generator)
    torch.testing.assert_close(several(hidden), head(hidden))
    with torch.no_grad():
        several.linear.weight[1] += 1.0
        several.linear.bias[2] += 4.0
    by_hand = [2.0 * (hidden @ several.linear.weight[k] + several.linear.bias[k]) - 1.0 for k in range(3)]
    torch.testing.assert_close(several.each(hidden), torch.stack(by_hand, dim=-1))
    torch.testing.assert_close(several(hidden), sum(by_hand) / 3)


@pytest.mark.parametrize("mode", ["trunk", "adapters"])
def test_a_critic_with_several_heads_is_assembled(tmp_path: Path, mode: str) -> None:
    models = made(tmp_path, mode, critic__ensemble=4, ppo__value_clip_eps=0.0)
    head = models.critic.head
    assert isinstance(head, EnsembleHead) and head.linear.weight.shape == (4, 32)
    assert head.linear.weight.requires_grad and head.linear.bias.requires_grad
