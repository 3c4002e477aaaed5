"""What a run asks of a vLLM server, answered by torch: peft reads the adapters, a generator of the seed draws."""

from __future__ import annotations

import contextlib
import json
import threading
import warnings
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from peft import PeftModel

if TYPE_CHECKING:
    from transformers import PreTrainedModel


class VllmStandIn(ThreadingHTTPServer):
    """A server of a model with the adapters that it was told to load; `requests` are the completions asked of it."""

    def __init__(self, model: PreTrainedModel, tokenizer: Any, *, processed: bool = True) -> None:
        super().__init__(("127.0.0.1", 0), _Handler)
        self.model: Any = model.eval()
        self.tokenizer = tokenizer
        self.processed = processed  # --logprobs-mode: of the tempered distribution, or of temperature 1
        self.ignores_adapters = False
        self.requests: list[dict[str, Any]] = []
        self.loaded: list[str] = []
        self.tokens: set[str | None] = set()
        self._lock = threading.Lock()

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self.server_port}"

    def load(self, message: dict[str, Any]) -> None:
        """As `add_adapter` would be told; the files are gone afterwards."""
        name, folder = message["lora_name"], message["lora_path"]
        assert Path(folder).is_absolute()
        with warnings.catch_warnings():
            warnings.simplefilter("ignore", FutureWarning)  # peft asks transformers by a name that goes
            if isinstance(self.model, PeftModel):
                self.model.load_adapter(folder, name)
            else:
                self.model = PeftModel.from_pretrained(self.model, folder, name)
        self.loaded.append(name)

    def unload(self, message: dict[str, Any]) -> None:
        self.loaded.remove(message["lora_name"])

    @torch.no_grad()
    def complete(self, asked: dict[str, Any]) -> dict[str, Any]:
        """One row, a token at a time, without a cache."""
        with self._lock:
            self.requests.append(asked)
            assert asked["model"] in self.loaded
            self.model.set_adapter(asked["model"])
            without = self.model.disable_adapter() if self.ignores_adapters else contextlib.nullcontext()
            with without:
                tokens, numbers, reason = self._drawn(asked)
        choice = {
            "token_ids": tokens,
            "prompt_token_ids": asked["prompt"],
            "logprobs": {"token_logprobs": numbers},
            "finish_reason": reason,
        }
        return {"choices": [choice]}

    def _drawn(self, asked: dict[str, Any]) -> tuple[list[int], list[float], str]:
        generator = torch.Generator().manual_seed(asked["seed"])
        tokens: list[int] = []
        numbers: list[float] = []
        for _ in range(asked["max_tokens"]):
            raw = self.model(torch.tensor([asked["prompt"] + tokens])).logits[0, -1].float()
            tempered = (raw / asked["temperature"]).log_softmax(-1)
            token = int(torch.multinomial(tempered.exp(), 1, generator=generator))
            tokens.append(token)
            numbers.append(float((tempered if self.processed else raw.log_softmax(-1))[token]))
            text = self.tokenizer.decode(tokens) if asked["stop"] else ""
            if token in asked["stop_token_ids"] or any(stop in text for stop in asked["stop"]):
                return tokens, numbers, "stop"
        return tokens, numbers, "length"


class _Handler(BaseHTTPRequestHandler):
    server: VllmStandIn  # pyright: ignore[reportIncompatibleVariableOverride]

    def do_GET(self) -> None:
        self._answer(200, json.dumps({"object": "list", "data": [{"id": "tiny"}]}))

    def do_POST(self) -> None:
        self.server.tokens.add(self.headers.get("Authorization"))
        message = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
        if self.path == "/v1/completions":
            self._answer(200, json.dumps(self.server.complete(message)))
        elif self.path == "/v1/load_lora_adapter":
            self.server.load(message)
            self._answer(200, f"Success: LoRA adapter '{message['lora_name']}' added successfully.")
        else:
            self.server.unload(message)
            self._answer(200, "Success: removed.")

    def _answer(self, status: int, text: str) -> None:
        content = text.encode()
        self.send_response(status)
        self.send_header("Content-Length", str(len(content)))
        self.end_headers()
        self.wfile.write(content)

    def log_message(self, format: str, *args: Any) -> None:
        """Nothing."""


@contextlib.contextmanager
def stand_in(model: PreTrainedModel, tokenizer: Any, **given: Any) -> Iterator[VllmStandIn]:
    """One that listens."""
    server = VllmStandIn(model, tokenizer, **given)
    thread = threading.Thread(target=server.serve_forever, kwargs={"poll_interval": 0.02})
    thread.start()
    try:
        yield server
    finally:
        server.shutdown()
        thread.join()
        server.server_close()
