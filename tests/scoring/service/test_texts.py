"""Scores of texts from any service with the documented JSON: batches, tokens, limits, retries, failures."""

from __future__ import annotations

import contextlib
import json
import threading
import time
from collections.abc import Callable, Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

import pytest

from fourfold.config.schema import PartSection
from fourfold.errors import RunFailed
from fourfold.scoring.service import client
from fourfold.scoring.service.texts import ANSWER_BYTES, ServiceScores
from fourfold.scoring.sources import FunctionReward
from scoring.test_sources import ACTIVATIONS, PROMPTS, RESPONSES, ROLLOUT, TOKENIZER
from training.runs import by_function, by_model, settings
from training.served import hosted_roles, listening

KEY = "reward.parts.tone"
Answer = Callable[[dict[str, Any]], tuple[int, Any]]


class Answering(ThreadingHTTPServer):
    """Answers each request as `answers` say, the last of them for ever; keeps what was asked."""

    daemon_threads = True

    def __init__(self, *answers: Answer) -> None:
        super().__init__(("127.0.0.1", 0), _Handler)
        self.answers, self.asked, self.tokens = list(answers), list[dict[str, Any]](), list[str | None]()

    @property
    def url(self) -> str:
        """The whole address that scores are asked of."""
        return f"http://127.0.0.1:{self.server_address[1]}/any/path"


class _Handler(BaseHTTPRequestHandler):
    server: Answering  # pyright: ignore[reportIncompatibleVariableOverride]

    def do_POST(self) -> None:
        assert self.path == "/any/path" and self.headers["Content-Type"] == "application/json"
        message = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
        self.server.asked.append(message)
        self.server.tokens.append(self.headers.get("Authorization"))
        answers = self.server.answers
        status, content = (answers.pop(0) if len(answers) > 1 else answers[0])(message)
        body = content if isinstance(content, bytes) else json.dumps(content).encode()
        with contextlib.suppress(OSError):
            self.send_response(status)
            self.send_header("Content-Length", str(len(body)))
            self.end_headers()
            self.wfile.write(body)

    def log_message(self, format: str, *args: Any) -> None:
        """Nothing is printed."""


@contextlib.contextmanager
def answering(*answers: Answer) -> Iterator[Answering]:
    server = Answering(*answers)
    thread = threading.Thread(target=server.serve_forever, kwargs={"poll_interval": 0.01})
    thread.start()
    try:
        yield server
    finally:
        server.shutdown()
        server.server_close()
        thread.join()


def lengths(message: dict[str, Any]) -> tuple[int, Any]:
    return 200, {"scores": [len(text) for text in message["responses"]], "whatever": "else"}


def says(status: int, content: Any) -> Answer:
    return lambda message: (status, content)


def part(url: str, **given: Any) -> PartSection:
    return PartSection(**{"source": "http", "url": url, "retries": 0, **given})


@pytest.fixture(autouse=True)
def quick(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(client, "FIRST_PAUSE_SECONDS", 0.01)


@pytest.mark.parametrize("max_rows", [1, 2, 3, 256])
def test_rows_go_in_requests_of_at_most_max_rows_and_come_back_in_order(max_rows: int) -> None:
    texts = [str(n) * n for n in range(7)]
    with answering(lengths) as server:
        assert ServiceScores(part(server.url, max_rows=max_rows), KEY)(["p"] * 7, texts) == list(range(7))
    assert [text for message in server.asked for text in message["responses"]] == texts
    assert [len(message["prompts"]) for message in server.asked] == [
        min(max_rows, 7 - start) for start in range(0, 7, max_rows)
    ]
    assert all(message.keys() == {"prompts", "responses"} for message in server.asked)


def test_null_and_what_no_float32_holds_are_no_scores() -> None:
    with answering(says(200, {"scores": [None, 1, -2.5, 1e39, 10**400]})) as server:
        assert ServiceScores(part(server.url), KEY)(["p"] * 5, ["r"] * 5) == [None, 1.0, -2.5, None, None]


def test_a_token_is_read_from_the_environment_and_sent() -> None:
    with answering(lengths) as server:
        given = part(server.url, token_env="TONE_TOKEN")
        ServiceScores(given, KEY, {"TONE_TOKEN": "secret"})(["p"], ["r"])
        with pytest.raises(ValueError, match=r"reward\.parts\.tone\.token_env: .* 'TONE_TOKEN' is not set"):
            ServiceScores(given, KEY, {})
    assert server.tokens == ["Bearer secret"]


def test_what_passes_is_asked_again_with_growing_pauses(caplog: pytest.LogCaptureFixture) -> None:
    with answering(says(503, {"error": "busy"}), says(200, b"<html>"), lengths) as server:
        assert ServiceScores(part(server.url, retries=2), KEY)(["p"], ["abc"]) == [3.0]
    assert len(server.asked) == 3
    assert [record.getMessage().rpartition(" in ")[2] for record in caplog.records] == ["0.01 s", "0.02 s"]


FAILURES: dict[str, tuple[Answer, str]] = {
    "busy": (says(503, {"error": "busy"}), "failed 2 times, last with: status 503: busy"),
    "no JSON": (says(200, b"<html>"), "its answer cannot be read"),
    "a bad row": (says(422, {"error": "row 1 is empty"}), "status 422: row 1 is empty"),
    "too slow": (lambda message: (time.sleep(0.4), (200, {}))[1], "timeout_seconds = 0.1"),
}


@pytest.mark.parametrize("name", FAILURES)
def test_a_failure_stops_the_run_or_leaves_its_request_s_rows_without_a_score(name: str) -> None:
    """Of three requests the second fails: only its rows are lost."""
    failing, said = FAILURES[name]
    given: dict[str, Any] = {"max_rows": 2, "retries": 1, "timeout_seconds": 0.1 if name == "too slow" else 5.0}
    prompts, texts = ["p"] * 6, ["a", "bb", "ccc", "dddd", "e", "ff"]

    def fails_on_the_second(message: dict[str, Any]) -> tuple[int, Any]:
        return failing(message) if "ccc" in message["responses"] else lengths(message)

    with answering(fails_on_the_second) as server:
        dropped = ServiceScores(part(server.url, on_failure="drop", **given), KEY)(prompts, texts)
        assert dropped == [1.0, 2.0, None, None, 1.0, 2.0]
        with pytest.raises(RunFailed, match=rf"(?s)score: reward\.parts\.tone: .*{said}"):
            ServiceScores(part(server.url, **given), KEY)(prompts, texts)


@pytest.mark.parametrize(
    ("answer", "said"),
    [
        (says(401, {"error": "no token"}), r"status 401.*set reward\.parts\.tone\.token_env"),
        (says(404, {"error": "no such path"}), r"status 404.*reward\.parts\.tone\.url is the whole address"),
        (says(200, {"scores": [1.0]}), "2 numbers are wanted, given 1"),
        (says(200, {"score": 1.0}), "2 numbers are wanted, given NoneType"),
        (says(200, {"scores": ["1", 2]}), "'1' is neither a number nor null"),
        (says(200, {"scores": [True, 2]}), "True is neither a number nor null"),
        (says(200, b'{"scores": [1, 2], "more": "' + b"x" * 2 * ANSWER_BYTES + b'"}'), "answers with more than"),
    ],
)
def test_what_every_request_would_meet_stops_the_run_whatever_the_policy(answer: Answer, said: str) -> None:
    with answering(answer) as server, pytest.raises(RunFailed, match=said):
        ServiceScores(part(server.url, on_failure="drop", max_rows=2), KEY)(["p"] * 2, ["r"] * 2)
    assert len(server.asked) == 1


def test_nobody_there_is_a_failure_too() -> None:
    with answering(lengths) as server:
        url = server.url
    with pytest.raises(RunFailed, match=r"failed 1 times, last with: ConnectionRefusedError"):
        ServiceScores(part(url), KEY)(["p"], ["r"])
    assert ServiceScores(part(url, on_failure="drop"), KEY)(["p"], ["r"]) == [None]


def test_as_a_source_it_reads_texts_and_its_refusals_are_not_asked_again() -> None:
    with answering(lengths) as server:
        source = FunctionReward(ServiceScores(part(server.url), KEY), TOKENIZER, retries=0, key=KEY, whole=True)
        scores, valid = source(ACTIVATIONS, ROLLOUT)
    assert scores.tolist() == [len(text) for text in RESPONSES] and valid.all()
    assert server.asked == [{"prompts": PROMPTS, "responses": RESPONSES}]
    with answering(says(401, {})) as server, pytest.raises(RunFailed, match="status 401"):
        FunctionReward(ServiceScores(part(server.url), KEY), TOKENIZER, retries=3, key=KEY)(ACTIVATIONS, ROLLOUT)
    assert len(server.asked) == 1


def test_a_fourfold_serve_is_such_a_service(tmp_path: Path) -> None:
    """The reward model of another run, asked about texts; a wrong token is refused."""
    tree = by_model(settings(tmp_path, by_function("pays_by_hash")), tmp_path / "reward")
    hosted = hosted_roles(tree, "reward")
    message = {"prompts": PROMPTS, "responses": RESPONSES}
    expected = hosted.answer("reward", {**message}, time.monotonic() + 60)["scores"]
    with listening(hosted, token="right") as server:
        given = part(f"{server.url}/v1/scores", token_env="TOKEN", max_rows=2)
        found = ServiceScores(given, KEY, {"TOKEN": "right"})(PROMPTS, RESPONSES)
        with pytest.raises(RunFailed, match="status 401: the token is missing or wrong"):
            ServiceScores(given, KEY, {"TOKEN": "wrong"})(PROMPTS, RESPONSES)
    assert found == pytest.approx(expected, abs=1e-5)
