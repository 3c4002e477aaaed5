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

from fourfold.config.schema import ServiceSection
from fourfold.errors import RunFailed
from fourfold.scoring.service import wire
from fourfold.scoring.service.wire import BadMessage

log = logging.getLogger(__name__)

FIRST_PAUSE_SECONDS, LONGEST_PAUSE_SECONDS = 0.5, 30.0
# Statuses that another attempt may change.
PASSING = (408, 429, 500, 502, 503, 504)


class _Passing(Exception):
    """A failure that another attempt may not meet."""


class Service:
    """A service at an address. Redirections and proxies are not followed, so the token goes nowhere else."""

    def __init__(self, settings: ServiceSection, environment: Mapping[str, str] = os.environ) -> None:
        self.url = settings.url.rstrip("/")
        self._timeout_seconds = settings.timeout_seconds
        self._retries = settings.retries
        self._closed = threading.Event()
        self._headers = {"Content-Type": "application/json", "Accept": "application/json", "Connection": "close"}
        self._connection: http.client.HTTPConnection | None = None
        self.moved_bytes = 0
        if settings.token_env:
            if not environment.get(settings.token_env):
                raise ValueError(
                    f"service.token_env: the environment variable {settings.token_env!r} is not set; put the token of "
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

    def _request(self, method: str, path: str, content: bytes) -> dict[str, Any]:
        pause = FIRST_PAUSE_SECONDS
        for attempt in range(self._retries + 1):
            try:
                return self._once(method, path, content)
            except _Passing as error:
                if attempt == self._retries:
                    raise RunFailed(
                        f"the service at {self.url} failed {attempt + 1} times, last with: {error}; the last good "
                        "checkpoint is kept: mend the service and give the same command again, or raise "
                        "service.retries or service.timeout_seconds"
                    ) from error
                log.warning("the service at %s: %s; asked again in %g s", self.url, error, pause)
            if self._closed.wait(pause):
                raise RunFailed(f"the service at {self.url}: given up")
            pause = min(2 * pause, LONGEST_PAUSE_SECONDS)
        raise AssertionError("unreachable: the loop returns or raises")

    def _once(self, method: str, path: str, content: bytes) -> dict[str, Any]:
        status, answer = self._exchange(method, path, content)
        self.moved_bytes += len(content) + len(answer)
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
        hints = {
            401: "set service.token_env and that variable",
            404: "a `fourfold serve` answers there for reference.engine = 'torch', a llama-server for 'llama_cpp'",
        }
        hint = hints.get(status, "see docs/service.md")
        raise RunFailed(f"the service at {self.url} refused {path} with {said}; {hint}")

    def _exchange(self, method: str, path: str, content: bytes) -> tuple[int, bytes]:
        parts = urlsplit(self.url)
        kind = http.client.HTTPSConnection if parts.scheme == "https" else http.client.HTTPConnection
        connection = self._connection = kind(parts.hostname or "", parts.port, timeout=self._timeout_seconds)
        try:
            connection.request(method, parts.path + path, content or None, self._headers)
            response = connection.getresponse()
            return response.status, response.read()
        except TimeoutError as error:
            raise _Passing(f"no answer within service.timeout_seconds = {self._timeout_seconds:g}") from error
        except (OSError, http.client.HTTPException) as error:
            raise _Passing(f"{type(error).__name__}: {error}") from error
        finally:
            connection.close()
