"""llama-server's two endpoints that a run asks, answered by torch; and the real ones where a package brings them."""

from __future__ import annotations

import contextlib
import json
import re
import threading
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import TYPE_CHECKING, Any

from fourfold.models.llama_roles import torch_log_probs

if TYPE_CHECKING:
    from transformers import PreTrainedModel

SLOTS = 2


class StandIn(ThreadingHTTPServer):
    """A server of a model; `requests` are what it was asked to complete."""

    def __init__(self, model: PreTrainedModel) -> None:
        super().__init__(("127.0.0.1", 0), _Handler)
        self.model = model
        self.requests: list[dict[str, Any]] = []
        self.shift = 0  # of the ids that it draws, from those that it should

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self.server_port}"

    def complete(self, message: dict[str, Any]) -> dict[str, Any]:
        """What is forced, and the log-probs at temperature 1 of the whole vocabulary, whatever forces it."""
        self.requests.append(message)
        prompt, grammar = message["prompt"], message.get("grammar", "")
        ids = [int(number) for number in re.findall(r"<\[(\d+)\]>", grammar)]
        ids = ids or [max(message["logit_bias"], key=lambda pair: pair[1])[0]]
        numbers = torch_log_probs(self.model, [*prompt, *ids])[-len(ids) :].tolist()
        drawn = [each + self.shift for each in ids[: message["n_predict"]]]
        return {"completion_probabilities": [{"id": i, "logprob": n} for i, n in zip(drawn, numbers, strict=True)]}


class _Handler(BaseHTTPRequestHandler):
    server: StandIn  # pyright: ignore[reportIncompatibleVariableOverride]

    def do_GET(self) -> None:
        self._answer({"total_slots": SLOTS} if self.path == "/props" else None)

    def do_POST(self) -> None:
        message = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
        self._answer(self.server.complete(message) if self.path == "/completion" else None)

    def _answer(self, message: dict[str, Any] | None) -> None:
        content = json.dumps(message or {"error": {"message": "File Not Found"}}).encode()
        self.send_response(404 if message is None else 200)
        self.send_header("Content-Length", str(len(content)))
        self.end_headers()
        self.wfile.write(content)

    def log_message(self, format: str, *args: Any) -> None:
        """Nothing."""


@contextlib.contextmanager
def stand_in(model: PreTrainedModel) -> Iterator[StandIn]:
    """One that listens."""
    server = StandIn(model)
    thread = threading.Thread(target=server.serve_forever, kwargs={"poll_interval": 0.02})
    thread.start()
    try:
        yield server
    finally:
        server.shutdown()
        thread.join()
        server.server_close()


@contextlib.contextmanager
def real_one(library: Any, file: Path) -> Iterator[str]:
    """llama.cpp's own server, as the package xllamacpp holds it; gives its address."""
    settings = library.CommonParams()
    settings.model.path = str(file)
    settings.n_ctx, settings.n_parallel, settings.warmup = 512 * SLOTS, SLOTS, False
    settings.cpuparams.n_threads = settings.cpuparams_batch.n_threads = 1
    server = library.Server(settings)
    yield server.listening_address
    del server
