"""A service over HTTP: who is answered, what is refused with which status, and how the client takes it."""

from __future__ import annotations

import http.client
import json
import threading
import time
from collections.abc import Mapping
from concurrent.futures import ThreadPoolExecutor
from typing import Any
from urllib.parse import urlsplit

import pytest
import torch

from fourfold.config.schema import ServiceSection
from fourfold.data.records import TextRecord
from fourfold.data.tokenize import encode_text
from fourfold.errors import RunFailed
from fourfold.models.loading import load_base
from fourfold.scoring.service import client
from fourfold.scoring.service.client import Service
from fourfold.scoring.service.hosted import Hosted, HostedReward, TooLate
from fourfold.scoring.service.server import Limits, ScoringServer, is_loopback
from fourfold.training.inputs import end_of_text
from tiny_roles import oracle_log_probs, tiny_rollout
from training.runs import Tree, by_function, by_model, make_config, settings
from training.served import Watched, hosted_roles, listening

ROWS: Tree = {"prompts": [[11, 12, 13], [14]], "responses": [[15, 16], [17, 18, 19]]}


@pytest.fixture(scope="module")
def tree(tmp_path_factory: pytest.TempPathFactory) -> Tree:
    folder = tmp_path_factory.mktemp("served")
    return by_model(settings(folder, by_function("pays_by_hash")), folder / "reward")


@pytest.fixture(scope="module")
def hosted(tree: Tree) -> Hosted:
    return hosted_roles(tree, "reference", "reward")


def ask(
    server: ScoringServer, method: str, path: str, content: bytes = b"", **headers: str
) -> tuple[int, dict[str, Any]]:
    """Status and answer, by the standard library alone."""
    connection = http.client.HTTPConnection(urlsplit(server.url).netloc, timeout=20)
    kinds = {"Content-Type": "application/json"} | {name.replace("_", "-"): text for name, text in headers.items()}
    try:
        connection.request(method, path, content or None, kinds)
        response = connection.getresponse()
        return response.status, json.loads(response.read())
    finally:
        connection.close()


def post(server: ScoringServer, path: str, message: Any, **headers: str) -> tuple[int, dict[str, Any]]:
    return ask(server, "POST", path, json.dumps(message).encode(), **headers)


def test_log_probs_are_those_of_the_whole_model(hosted: Hosted, tree: Tree) -> None:
    from transformers import AutoModelForCausalLM

    rollout = tiny_rollout([(3, 2), (1, 3), (4, 1)], seed=3)
    ids = rollout.sequences.tolist()
    message = {
        "prompts": [ids[0][1:4], ids[1][3:4], ids[2][:4]],
        "responses": [ids[0][4:6], ids[1][4:7], ids[2][4:5]],
        "temperature": 0.7,
    }
    expected = oracle_log_probs(AutoModelForCausalLM.from_pretrained(tree["model"]["path"]), rollout, 0.7)
    with listening(hosted) as server:
        for size in (1, 2, 3):
            status, answer = post(server, "/v1/log_probs", {**message, "micro_batch_size": size})
            assert status == 200 and [len(row) for row in answer["log_probs"]] == [2, 3, 1]
            for row, numbers in enumerate(answer["log_probs"]):
                torch.testing.assert_close(torch.tensor(numbers), expected[row, : len(numbers)], rtol=0, atol=1e-5)


def test_texts_are_scored_as_the_reward_model_read_them_in_training(hosted: Hosted, tree: Tree) -> None:
    base = load_base(make_config(tree))
    texts = [("the film", " was good"), ("a", " b c")]
    ids = [encode_text(base.tokenizer, TextRecord(p + r), eos_id=end_of_text(base)) for p, r in texts]
    with listening(hosted) as server:
        status, by_text = post(
            server, "/v1/scores", {"prompts": [p for p, _ in texts], "responses": [r for _, r in texts]}
        )
        by_ids = post(
            server, "/v1/scores", {"prompts": [row[:2] for row in ids], "responses": [row[2:] for row in ids]}
        )[1]
    assert status == 200 and by_text["scores"] == by_ids["scores"]
    assert len(set(by_text["scores"])) == 2


def test_it_says_what_it_is(hosted: Hosted) -> None:
    with listening(hosted) as server:
        assert ask(server, "GET", "/health") == (200, {"status": "ok"})
        status, said = ask(server, "GET", "/v1/describe")
    assert status == 200 and said["roles"].keys() == {"reference", "reward"} and said["max_request_bytes"] == 64 * 2**20
    role = said["roles"]["reward"]
    assert role["path"] == "/v1/scores" and role["compute"] == "float32" and role["sharing"] == "trunk"
    assert role["own_weights"] != said["roles"]["reference"]["own_weights"]
    assert role["shared_weights"] == said["roles"]["reference"]["shared_weights"]


@pytest.mark.parametrize(
    ("path", "message", "status", "said"),
    [
        ("/v1/log_probs", {**ROWS, "temperature": 0}, 400, "temperature: given 0"),
        ("/v1/log_probs", {**ROWS, "micro_batch_size": 1.5}, 400, "micro_batch_size: given 1.5"),
        ("/v1/scores", {**ROWS, "temperature": 1.0}, 400, "unknown key 'temperature'"),
        ("/v1/log_probs", {"prompts": ["a"], "responses": ["b"]}, 400, "lists of token ids"),
        ("/v1/scores", {"prompts": [[10**6]], "responses": [[1]]}, 400, "holds 1000000"),
        ("/v1/scores", {"prompts": [[5] * 5000], "responses": [[5]]}, 400, "a row has 5001 tokens"),
        ("/v1/scores", [1], 400, "a list, not an object"),
        ("/v1/else", ROWS, 404, "allowed: /v1/log_probs, /v1/scores"),
    ],
)
def test_what_cannot_be_answered_is_refused(hosted: Hosted, path: str, message: Any, status: int, said: str) -> None:
    with listening(hosted) as server:
        got, answer = post(server, path, message)
    assert got == status and said in answer["error"]


def test_an_oversize_request_is_refused_unread(hosted: Hosted) -> None:
    with listening(hosted, limits=Limits(max_request_bytes=1000)) as server:
        big = {"prompts": [[5] * 2000], "responses": [[5]]}
        status, answer = post(server, "/v1/scores", big)
        assert status == 413 and "allowed: 1,000" in answer["error"]
        assert ask(server, "POST", "/v1/scores", json.dumps(ROWS).encode(), Content_Type="text/plain")[0] == 415
        assert ask(server, "POST", "/v1/scores", b"", Content_Length="x")[0] == 411
        with pytest.raises(RunFailed, match="refused /v1/scores with status 413"):
            Service(ServiceSection(url=server.url)).ask("/v1/scores", big)


def test_a_request_that_stops_coming_is_let_go(hosted: Hosted) -> None:
    with listening(hosted, limits=Limits(read_seconds=0.2)) as server:
        status, answer = ask(server, "POST", "/v1/scores", b"{", Content_Length="50")
    assert status == 408 and "in time" in answer["error"]


def test_only_those_with_the_token_are_answered(hosted: Hosted) -> None:
    with listening(hosted, token="right") as server:
        assert ask(server, "GET", "/health")[0] == 200
        for headers in ({}, {"Authorization": "Bearer wrong"}, {"Authorization": "right"}):
            assert post(server, "/v1/scores", ROWS, **headers)[0] == 401
            assert ask(server, "GET", "/v1/describe", b"", **headers)[0] == 401
        assert post(server, "/v1/scores", ROWS, Authorization="Bearer right")[0] == 200
        given = ServiceSection(url=server.url, token_env="SECRET")
        assert Service(given, {"SECRET": "right"}).describe()["roles"]
        with pytest.raises(RunFailed, match=r"status 401: the token is missing or wrong; set service.token_env"):
            Service(given, {"SECRET": "wrong"}).describe()
        with pytest.raises(ValueError, match="the environment variable 'SECRET' is not set"):
            Service(given, {})


@pytest.mark.parametrize(("host", "only_here"), [("127.0.0.1", True), ("localhost", True), ("0.0.0.0", False)])
def test_other_hosts_need_a_token(hosted: Hosted, host: str, only_here: bool) -> None:
    assert is_loopback(host) == only_here and not is_loopback("example.org")
    if not only_here:
        with pytest.raises(ValueError, match="there is no token"):
            ScoringServer(host, 0, hosted)


def test_requests_are_worked_at_one_after_the_other(hosted: Hosted) -> None:
    at_work, most, lock = 0, 0, threading.Lock()

    class Counting:
        roles, describe = hosted.roles, hosted.describe

        def answer(self, role: str, message: dict[str, Any], deadline: float) -> dict[str, Any]:
            nonlocal at_work, most
            with lock:
                at_work += 1
                most = max(most, at_work)
            time.sleep(0.02)
            try:
                return hosted.answer(role, message, deadline)
            finally:
                with lock:
                    at_work -= 1

    with listening(Counting()) as server, ThreadPoolExecutor(6) as pool:
        paths = ["/v1/scores", "/v1/log_probs"] * 3
        answers = list(pool.map(lambda path: post(server, path, ROWS), paths))
    assert most == 1 and all(status == 200 for status, _ in answers)
    assert max(answer["waited_seconds"] for _, answer in answers) > 0.02


def test_work_that_takes_too_long_is_given_up(hosted: Hosted) -> None:
    with listening(hosted, limits=Limits(answer_seconds=1e-9)) as server:
        status, answer = post(server, "/v1/scores", ROWS)
    assert status == 503 and "no answer within" in answer["error"]


def test_damaged_weights_give_no_answer(tree: Tree) -> None:
    damaged = hosted_roles(tree, "reward")
    reward = damaged.held["reward"]
    assert isinstance(reward, HostedReward)
    reward.scorer.head.shift.fill_(torch.nan)
    with listening(damaged) as server:
        status, answer = post(server, "/v1/scores", ROWS)
        assert post(server, "/v1/log_probs", ROWS)[0] == 404
    assert status == 500 and answer == {"error": "the answer is not finite"}


# --- the client -------------------------------------------------------------------------------------------------------


def test_what_fails_is_asked_again(hosted: Hosted, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(client, "FIRST_PAUSE_SECONDS", 0.01)
    seen: list[str] = []

    def fails_twice(role: str, message: Mapping[str, Any]) -> None:
        seen.append(role)
        if len(seen) <= 2:
            raise TooLate if len(seen) == 1 else ZeroDivisionError

    with listening(Watched(hosted, fails_twice)) as server:
        with pytest.raises(RunFailed, match="failed 1 times, last with: status 503"):
            Service(ServiceSection(url=server.url, retries=0)).ask("/v1/scores", ROWS)
        answer = Service(ServiceSection(url=server.url, retries=1)).ask("/v1/scores", ROWS)
    assert len(answer["scores"]) == 2 and len(seen) == 3


def test_a_slow_service_is_waited_for_no_longer_than_timeout_seconds(hosted: Hosted) -> None:
    said = r"no answer within service.timeout_seconds = 0.1.*raise service.retries"
    with listening(Watched(hosted, lambda *_: time.sleep(0.6))) as server, pytest.raises(RunFailed, match=said):
        Service(ServiceSection(url=server.url, retries=0, timeout_seconds=0.1)).ask("/v1/scores", ROWS)


def test_a_client_that_is_closed_waits_no_more(hosted: Hosted) -> None:
    with listening(Watched(hosted, lambda *_: time.sleep(0.8))) as server:
        service = Service(ServiceSection(url=server.url, retries=9))
        threading.Timer(0.1, service.close).start()
        started = time.monotonic()
        with pytest.raises(RunFailed, match="given up"):
            service.ask("/v1/scores", ROWS)
        assert time.monotonic() - started < 0.7
