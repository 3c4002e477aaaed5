"""PPO with a KL penalty must find the posterior, prior times likelihood, where every response can be listed.

The optimum of E[r] - beta KL(pi, pi_ref) is pi*(y) = pi_ref(y) exp(r(y) / beta) / Z (Korbak et al. 2022, "RL with KL
penalties is better viewed as Bayesian inference", equation 4). Nothing in this file uses the maths of the package.
"""

from __future__ import annotations

import itertools
from pathlib import Path

import pytest
import torch
from tokenizers import Tokenizer, decoders, models, pre_tokenizers
from transformers import AutoModelForCausalLM, PreTrainedTokenizerFast

from fourfold.training.trainer import Trainer
from tiny import EOS, tiny_model
from training.runs import SHARINGS, by_function, make_config, make_trainer, merged, pays_by_hash, settings, steps_of

WORDS = {"a": 0, "<eos>": EOS, "b": 2, "c": 3}
# Of different words: rotary positions alone cannot tell "b" from "b b", so no Llama could answer the two differently.
PROMPTS = [[3, 0], [0, 2, 3]]
LONGEST = 3
BETA = 0.7


def tiny_world(path: Path, family: str, seed: int) -> Path:
    """A model of four words, one of which ends the response."""
    tokenizer = Tokenizer(models.WordLevel(WORDS, unk_token="c"))
    tokenizer.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    tokenizer.decoder = decoders.Fuse()
    model = tiny_model(family, len(WORDS), layers=2, hidden=16, seed=seed, pad_id=EOS)
    model.save_pretrained(path)
    PreTrainedTokenizerFast(tokenizer_object=tokenizer, eos_token="<eos>", pad_token="<eos>").save_pretrained(path)
    return path


def all_responses() -> list[tuple[int, ...]]:
    """Everything that can be sampled: ended by EOS, or cut at the longest length."""
    words = [word for word in WORDS.values() if word != EOS]
    ended = [(*body, EOS) for n in range(LONGEST) for body in itertools.product(words, repeat=n)]
    return ended + list(itertools.product(words, repeat=LONGEST))


def probabilities(trainer: Trainer, prompt: list[int]) -> torch.Tensor:
    """pi(y) of every response under the actor, from whole logits."""
    models = trainer.models
    found = []
    for response in all_responses():
        ids = torch.tensor([[*prompt, *response]])
        mask = torch.ones_like(ids, dtype=torch.bool)
        below = ids if models.base.trunk is None else models.base.trunk(ids, mask)
        logits = models.actor.branch(below, mask)[0] @ models.actor.head.weight.T
        found.append(_probability(logits, len(prompt), response))
    return torch.tensor(found)


def _probability(logits: torch.Tensor, start: int, response: tuple[int, ...]) -> float:
    log_probs = logits.double().log_softmax(-1)
    chosen = [log_probs[start - 1 + t, token] for t, token in enumerate(response)]
    return float(torch.stack(chosen).sum().exp())


def posterior(model: Path, prompt: list[int], *, uniform: bool = False) -> torch.Tensor:
    """pi_ref(y) exp(r(y) / beta) / Z from the model as it lies on disk, or from a prior of V^-n for n tokens."""
    reference = AutoModelForCausalLM.from_pretrained(model)
    names = {number: word for word, number in WORDS.items()}
    prior, reward = [], []
    for response in all_responses():
        logits = reference(torch.tensor([[*prompt, *response]])).logits[0]
        of_model = _probability(logits, len(prompt), response)
        prior.append(len(WORDS) ** -len(response) if uniform else of_model)
        text = "".join(names[token] for token in response if token != EOS)
        reward += pays_by_hash([""], [text])
    assert sum(prior) == pytest.approx(1.0, abs=1e-6), "every response is listed once"
    weighed = torch.tensor(prior) * (torch.tensor(reward) / BETA).exp()
    return weighed / weighed.sum()


@torch.no_grad()
def distances(trainer: Trainer, model: Path, *, uniform: bool = False) -> list[float]:
    """Total variation between actor and posterior for each prompt."""
    pairs = [(probabilities(trainer, prompt), posterior(model, prompt, uniform=uniform)) for prompt in PROMPTS]
    return [float((actual - wanted).abs().sum() / 2) for actual, wanted in pairs]


@pytest.mark.slow
@pytest.mark.parametrize(
    ("family", "seed", "sharing", "gae_lambda", "prior"),
    [
        ("gpt2", 2, "trunk", 0.95, "step_0"),
        ("llama", 0, "none", 1.0, "step_0"),
        ("llama", 0, "none", 1.0, "uniform"),  # among responses of one length softmax(r / beta)
    ],
)
def test_ppo_finds_the_posterior(
    tmp_path: Path, family: str, seed: int, sharing: str, gae_lambda: float, prior: str
) -> None:
    """Total variation under 0.03 after training, far above it before."""
    uniform = prior == "uniform"
    model = tiny_world(tmp_path / "world", family, seed)
    decay = {"schedule": "cosine", "learning_rate": 0.01}
    ppo = decay | {
        "steps": 60, "rollout_batch_size": 128, "mini_batch_size": 64, "micro_batch_size": 64, "num_epochs": 4,
        "kl_coef": BETA, "gae_lambda": gae_lambda, "whiten_advantages": False, "value_clip_eps": 0.0,
    }  # fmt: skip
    changes = merged(by_function("pays_by_hash", **ppo), SHARINGS[sharing] or {"trunk": {"branch_layers": 1}})
    changes = merged(changes, {
        "seed": seed,
        "model": {"path": str(model)},
        "reference": {"prior": prior},
        "critic": decay | {"learning_rate": 0.02},
        "sampling": {"max_new_tokens": LONGEST, "extra_eos_token_ids": None},
        "checkpoint": {"every": 60},
        "evaluation": None,
        "data": {"prompts_test": None},
    })  # fmt: skip
    trainer = make_trainer(make_config(settings(tmp_path, changes)), prompts=PROMPTS)
    assert min(distances(trainer, model, uniform=uniform)) > 0.3
    steps_of(trainer)
    assert max(distances(trainer, model, uniform=uniform)) < 0.03
    if uniform:
        assert min(distances(trainer, model)) > 0.09, "which is not where the model's own prior leads"
