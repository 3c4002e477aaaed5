"""Asking a service: what fails is asked again after a pause, then the run stops; nothing becomes a 0."""

from __future__ import annotations

import contextlib
import http.client
import logging
import os
import socket
import threading
from collections.abc import Mapping
from typing import Any
from urllib.parse import urlsplit

from fourfold.config.schema import PartSection, SamplingSection, ServiceSection
from fourfold.errors import RunFailed
from fourfold.scoring.service import wire
from fourfold.scoring.service.wire import BadMessage

log = logging.getLogger(__name__)

FIRST_PAUSE_SECONDS, LONGEST_PAUSE_SECONDS = 0.5, 30.0
ANSWER_BYTES = 2**30  # more is no answer to a request about one rollout
# Statuses that another attempt may change.
PASSING = (408, 429, 500, 502, 503, 504)


class _Passing(Exception):
    """A failure that another attempt may not meet."""


class Refused(RunFailed):
    """An answer whose status says that the same request would be refused again."""

    def __init__(self, said: str, status: int) -> None:
        super().__init__(said)
        self.status = status


class Unanswered(RunFailed):
    """A request that failed as often as it may be sent."""


class Service:
    """A service at an address. Redirections and proxies are not followed, so the token goes nowhere else.

    `key` is the table of the settings that names it; an answer of more than `answer_bytes` is not read.
    """

    def __init__(
        self,
        settings: ServiceSection | PartSection | SamplingSection,
        environment: Mapping[str, str] = os.environ,
        *,
        key: str = "service",
        answer_bytes: int = ANSWER_BYTES,
    ) -> None:
        self.url = settings.url.rstrip("/")
        self._key = key
        self._answer_bytes = answer_bytes
        self._timeout_seconds = settings.timeout_seconds
        self._retries = settings.retries
        self._closed = threading.Event()
        self._headers = {"Content-Type": "application/json", "Accept": "application/json", "Connection": "close"}
        self._connection: http.client.HTTPConnection | None = None
        self.moved_bytes = 0
        if settings.token_env:
            if not environment.get(settings.token_env):
                raise ValueError(
                    f"{key}.token_env: the environment variable {settings.token_env!r} is not set; put the token of "
                    f"{self.url} into it, or leave token_env out for a service without one"
                )
            self._headers["Authorization"] = f"Bearer {environment[settings.token_env]}"

    def close(self) -> None:
        """Give up what is being asked; a thread that waits for an answer would hold the process up."""
        self._closed.set()
        if self._connection is not None and self._connection.sock is not None:
            with contextlib.suppress(OSError):
                self._connection.sock.shutdown(socket.SHUT_RDWR)

    def describe(self) -> dict[str, Any]:
        """What the service says of itself."""
        return self.get(wire.DESCRIBE)

    def get(self, path: str) -> dict[str, Any]:
        """What the service says there."""
        return self._request("GET", path, b"")

    def ask(self, path: str, message: dict[str, Any]) -> dict[str, Any]:
        """The answer to a request."""
        return self._request("POST", path, wire.encode(message))

    def tell(self, path: str, message: dict[str, Any]) -> None:
        """A request whose answer says nothing but that it was done."""
        self._request("POST", path, wire.encode(message), read=False)

    def _request(self, method: str, path: str, content: bytes, *, read: bool = True) -> dict[str, Any]:
        pause = FIRST_PAUSE_SECONDS
        for attempt in range(self._retries + 1):
            try:
                return self._once(method, path, content, read=read)
            except _Passing as error:
                if attempt == self._retries:
                    raise Unanswered(
                        f"the service at {self.url} failed {attempt + 1} times, last with: {error}; the last good "
                        "checkpoint is kept: mend the service and give the same command again, or raise "
                        f"{self._key}.retries or {self._key}.timeout_seconds"
                    ) from error
                log.warning("the service at %s: %s; asked again in %g s", self.url, error, pause)
            if self._closed.wait(pause):
                raise RunFailed(f"the service at {self.url}: given up")
            pause = min(2 * pause, LONGEST_PAUSE_SECONDS)
        raise AssertionError("unreachable: the loop returns or raises")

    def _once(self, method: str, path: str, content: bytes, *, read: bool) -> dict[str, Any]:
        status, answer = self._exchange(method, path, content)
        self.moved_bytes += len(content) + len(answer)
        if status == 200 and not read:
            return {}
        try:
            message = wire.decode(answer)
        except BadMessage as error:
            if status == 200 or status in PASSING:  # of a proxy before it, perhaps
                raise _Passing(f"status {status}, and its answer cannot be read: {error}") from error
            message = {}
        if status == 200:
            return message
        said = f"status {status}: {message.get('error', 'no reason given')}"
        if status in PASSING:
            raise _Passing(said)
        missing = {
            "service": "a `fourfold serve` is there for reference.engine = 'torch', a llama-server for 'llama_cpp'",
            "sampling": "a vLLM server answers there that was started with VLLM_ALLOW_RUNTIME_LORA_UPDATING=True",
        }
        whole_address = f"{self._key}.url is the whole address, such as {self.url}{wire.SCORES}"
        hints = {
            401: f"set {self._key}.token_env and that variable",
            404: missing.get(self._key, whole_address),
        }
        hint = hints.get(status, f"see docs/{self._key if self._key in missing else 'rewards'}.md")
        refused = f"refused {path}".rstrip()
        raise Refused(f"the service at {self.url} {refused} with {said}; {hint}", status)

    def _exchange(self, method: str, path: str, content: bytes) -> tuple[int, bytes]:
        parts = urlsplit(self.url)
        kind = http.client.HTTPSConnection if parts.scheme == "https" else http.client.HTTPConnection
        connection = self._connection = kind(parts.hostname or "", parts.port, timeout=self._timeout_seconds)
        try:
            connection.request(method, parts.path + path, content or None, self._headers)
            response = connection.getresponse()
            content = response.read(self._answer_bytes + 1)
            if len(content) > self._answer_bytes:
                raise RunFailed(f"the service at {self.url} answers with more than {self._answer_bytes:,} bytes")
            return response.status, content
        except TimeoutError as error:
            raise _Passing(f"no answer within {self._key}.timeout_seconds = {self._timeout_seconds:g}") from error
        except (OSError, http.client.HTTPException) as error:
            raise _Passing(f"{type(error).__name__}: {error}") from error
        finally:
            connection.close()
