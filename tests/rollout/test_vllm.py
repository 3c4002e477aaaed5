"""A vLLM server draws from the actor as it is now: it is given the adapters as peft's files before every rollout."""

from __future__ import annotations

import contextlib
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import AutoModelForCausalLM, AutoTokenizer

from fourfold.config import ConfigError
from fourfold.errors import RunFailed
from fourfold.models.adapters import adapter_parameters
from fourfold.rollout.guarded import mean_gap
from fourfold.training.trainer import Trainer
from training.runs import SHARINGS, Tree, by_function, make_config, make_trainer, merged, settings
from vllm_stand_in import VllmStandIn, stand_in


def by_vllm(folder: Path, url: str, sharing: str = "adapters", **sampling: Any) -> Tree:
    tree = merged(settings(folder, by_function("pays_by_hash", steps=1)), SHARINGS[sharing])
    given = {"engine": "vllm", "url": url, "temperature": 0.7, "requests": 3, "retries": 0}
    return merged(tree, {"sampling": given | sampling})


@contextlib.contextmanager
def server_of(folder: Path, **given: Any) -> Iterator[VllmStandIn]:
    """Of the model that the settings of this folder name."""
    settings(folder)
    model = AutoModelForCausalLM.from_pretrained(folder / "llama", dtype=torch.float32)
    with stand_in(model, AutoTokenizer.from_pretrained(folder / "llama"), **given) as server:
        yield server


def move_adapters(trainer: Trainer, seed: int) -> None:
    generator = torch.Generator().manual_seed(seed)
    for parameter in adapter_parameters(trainer.models.actor.branch):
        parameter.copy_(0.2 * torch.randn(parameter.shape, generator=generator))


@torch.no_grad()
@pytest.mark.parametrize(
    ("sharing", "rslora"), [("adapters", False), ("adapters", True), ("adapters over a trunk", False)]
)
def test_it_draws_from_the_adapters_as_they_are_now(tmp_path: Path, sharing: str, rslora: bool) -> None:
    """FAULTS H9, H12: by peft's own reading of the files the server's log-probs are the actor's, after each move."""
    with server_of(tmp_path) as server:
        tree = merged(by_vllm(tmp_path, server.url, sharing), {"adapters": {"rslora": rslora}})
        trainer = make_trainer(make_config(tree))
        prompts, names = trainer.prompts.batch(0), set[str]()
        for seed in (0, 1):
            move_adapters(trainer, seed)
            rollout, activations = trainer.sampler.generate(prompts, policy_version=seed)
            assert mean_gap(rollout) < 1e-3
            again, _ = trainer.models.actor.log_probs(activations, rollout, 0.7)
            torch.testing.assert_close(again, rollout.log_probs, rtol=0, atol=1e-4)
            names.add(server.requests[-1]["model"])
            assert set(rollout.policy_version.tolist()) == {seed}
        assert len(names) == 2 and server.loaded == [], "what is cached under one name is not another's"
        assert not list((tmp_path / "run" / "ppo" / "sampler").iterdir())


def test_rows_end_where_the_run_says(tmp_path: Path) -> None:
    with server_of(tmp_path) as server:
        trainer = make_trainer(make_config(by_vllm(tmp_path, server.url, stop_strings=["a", "e"])))
        rollout, _ = trainer.sampler.generate(trainer.prompts.batch(0), policy_version=0)
    eos, decode = trainer.models.base.eos_ids, trainer.models.base.tokenizer.decode
    ended = 0
    for i, truncated in enumerate(rollout.truncated.tolist()):
        ids = rollout.sequences[i, rollout.prompt_length :][rollout.response_mask[i]].tolist()
        ends = ids[-1] in eos or any(stop in decode(ids) for stop in "ae")
        assert truncated == (not ends) and not any(token in eos for token in ids[:-1])
        ended += ends
    assert ended > 0
    asked = server.requests[-1]
    assert asked["ignore_eos"] and set(asked["stop_token_ids"]) == eos and asked["top_p"] == 1.0


def test_a_row_is_asked_for_with_its_own_seed(tmp_path: Path) -> None:
    """Responses to one prompt differ, and the same rollout drawn again is the same."""
    with server_of(tmp_path) as server:
        tree = by_vllm(tmp_path, server.url, responses_per_prompt=2)
        trainer = make_trainer(make_config(tree))
        first, _ = trainer.sampler.generate(trainer.prompts.batch(0), policy_version=0)
        again, _ = trainer.sampler.generate(trainer.prompts.batch(0), policy_version=0)
        assert torch.equal(first.sequences, again.sequences)
        assert len({asked["seed"] for asked in server.requests[-8:]}) == 8
        row = trainer.step()
    assert row["sampler_gap_mean"] < 1e-3 and row["importance_weight_mean"] == pytest.approx(1, abs=1e-2)


@pytest.mark.parametrize("fault", ["raw log-probs", "adapters", "another model"])
def test_another_distribution_is_refused_at_the_start(tmp_path: Path, fault: str) -> None:
    other = tmp_path / "other" if fault == "another model" else tmp_path
    if fault == "another model":
        settings(tmp_path)
        settings(other, family="llama")
        model = AutoModelForCausalLM.from_pretrained(other / "llama")
        with torch.no_grad():
            model.model.layers[0].mlp.down_proj.weight.mul_(1.5)
        model.save_pretrained(other / "llama")
    with server_of(other, processed=fault != "raw log-probs") as server:
        server.ignores_adapters = fault == "adapters"
        config = make_config(by_vllm(tmp_path, server.url))
        with pytest.raises(
            ValueError, match=r"nats a token from this run's actor .* --logprobs-mode processed_logprobs"
        ):
            make_trainer(config)


@pytest.mark.parametrize(
    ("spoilt", "problem"),
    [
        ({"token_ids": [5, 6]}, "drew 2 tokens .* with 1 log-probs"),
        ({"token_ids": None}, "cannot be used"),
        ({"logprobs": {"token_logprobs": [float(1)]}}, "drew 1 tokens"),
        ({"prompt_token_ids": [1, 5, 6]}, r"read the prompt as \[1, 5, 6\]"),
        ({"finish_reason": "abort"}, "ended by 'abort'"),
    ],
)
def test_an_answer_that_cannot_be_right_stops_the_run(
    tmp_path: Path, spoilt: dict[str, Any], problem: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    with server_of(tmp_path) as server:
        trainer = make_trainer(make_config(by_vllm(tmp_path, server.url, max_new_tokens=1)))
        complete = server.complete

        def spoiling(asked: dict[str, Any]) -> dict[str, Any]:
            answer = complete(asked)
            answer["choices"][0] |= spoilt
            return answer

        monkeypatch.setattr(server, "complete", spoiling)
        with pytest.raises(RunFailed, match=problem):
            trainer.sampler.generate(trainer.prompts.batch(0), policy_version=0)


def test_rows_are_asked_for_so_many_at_a_time(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("VLLM_KEY", "secret")
    with server_of(tmp_path) as server:
        tree = by_vllm(tmp_path, server.url, requests=2, token_env="VLLM_KEY", max_new_tokens=1)
        trainer = make_trainer(make_config(tree))
        complete, working, most = server.complete, threading.Semaphore(2), list[bool]()

        def watched(asked: dict[str, Any]) -> dict[str, Any]:
            most.append(working.acquire(blocking=False))
            time.sleep(0.02)
            try:
                return complete(asked)
            finally:
                working.release()

        monkeypatch.setattr(server, "complete", watched)
        trainer.sampler.generate(trainer.prompts.batch(0), policy_version=0)
    assert len(most) == 8 and all(most)
    assert server.tokens == {"Bearer secret"}


def test_a_row_that_fails_is_asked_for_again(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    with server_of(tmp_path) as server:
        trainer = make_trainer(make_config(by_vllm(tmp_path, server.url, retries=1, max_new_tokens=1)))
        complete, calls = server.complete, list[int]()

        def failing(asked: dict[str, Any]) -> dict[str, Any]:
            calls.append(asked["seed"])
            return complete(asked) if len(calls) > 1 else {"choices": float("nan")}  # which is no JSON

        monkeypatch.setattr(server, "complete", failing)
        rollout, _ = trainer.sampler.generate(trainer.prompts.batch(0), policy_version=0)
        assert len(calls) == 9 and len(set(calls)) == 8 and len(rollout.sequences) == 8
        slow = make_trainer(make_config(by_vllm(tmp_path, server.url, timeout_seconds=5.0, max_new_tokens=1)))
        for client in slow.sampler._quick._server._clients:  # type: ignore[attr-defined]
            client._timeout_seconds = 0.05
        monkeypatch.setattr(server, "complete", lambda asked: time.sleep(0.3) or complete(asked))
        with pytest.raises(RunFailed, match=r"no answer within sampling\.timeout_seconds = 0\.05"):
            slow.sampler.generate(slow.prompts.batch(0), policy_version=0)


def test_a_server_that_is_not_there_or_no_vllm_is_named(tmp_path: Path) -> None:
    config = make_config(by_vllm(tmp_path, "http://127.0.0.1:9"))
    with pytest.raises(RunFailed, match=r"the service at http://127\.0\.0\.1:9 failed 1 times"):
        make_trainer(config)


@pytest.mark.parametrize(
    ("changes", "problem"),
    [
        ({"sampling": {"url": ""}}, "sampling.url: not given, but sampling.engine = 'vllm' needs"),
        ({"sampling": {"url": "ftp://a"}}, "sampling.url: given 'ftp://a', which is no http"),
        ({"sampling": {"url": "http://a?b=c"}}, "a token stands in sampling.token_env's variable"),
        ({"sharing": {"mode": "none"}, "adapters": None}, "whose actor would have to be written and read as a whole"),
        ({"adapters": {"dora": True}}, "beside adapters.dora = true, which vLLM does not compute"),
        ({"model": {"path": "a.gguf"}}, "given 'vllm' beside model.path = 'a.gguf'"),
        ({"sampling": {"engine": "local"}}, "sampling.url: given, but sampling.engine = 'local' asks no server"),
    ],
)
def test_what_stands_against_it_is_refused(tmp_path: Path, changes: Tree, problem: str) -> None:
    with pytest.raises(ConfigError, match=problem):
        make_config(merged(by_vllm(tmp_path, "http://127.0.0.1:8000"), changes))
