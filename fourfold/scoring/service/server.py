"""The HTTP side of a service: who may ask, how much, for how long; one worker answers, one request after the other."""

from __future__ import annotations

import contextlib
import hmac
import ipaddress
import logging
import time
from collections.abc import Iterator
from concurrent.futures import CancelledError, Future, ThreadPoolExecutor
from dataclasses import dataclass
from http import HTTPStatus
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any

from fourfold.errors import RunFailed
from fourfold.scoring.service import wire
from fourfold.scoring.service.hosted import Hosted, TooLate
from fourfold.scoring.service.wire import BadMessage

log = logging.getLogger(__name__)


@dataclass(frozen=True)
class Limits:
    """What a client may ask of the service."""

    max_request_bytes: int = 64 * 2**20
    read_seconds: float = 10.0  # longest silence while a request is read or an answer is taken
    answer_seconds: float = 600.0  # from the request's arrival, waiting for others included


class Refused(Exception):
    """A request that gets a status other than 200."""

    def __init__(self, status: HTTPStatus, said: str) -> None:
        super().__init__(said)
        self.status = status


def is_loopback(host: str) -> bool:
    """Whether only this machine can reach an address."""
    if host == "localhost":
        return True
    with contextlib.suppress(ValueError):
        return ipaddress.ip_address(host).is_loopback
    return False


class ScoringServer(ThreadingHTTPServer):
    """Threads read and write; the worker computes. `serve_forever` ends by `shutdown` or by an exception."""

    daemon_threads = False  # `server_close` waits until every answer that was begun is written
    request_queue_size = 64

    def __init__(self, host: str, port: int, hosted: Hosted, *, token: str = "", limits: Limits | None = None) -> None:
        if not token and not is_loopback(host):
            raise ValueError(
                f"host {host!r} can be reached from other machines, and there is no token; put one into the "
                "environment variable that --token-env names, or leave --host at 127.0.0.1"
            )
        super().__init__((host, port), _Handler)
        self._hosted = hosted
        self._token = token
        self.limits = limits or Limits()
        self._worker = ThreadPoolExecutor(1, thread_name_prefix="scorer")

    @property
    def url(self) -> str:
        """Where it listens."""
        return f"http://{self.server_address[0]!s}:{self.server_address[1]}"

    def server_close(self) -> None:
        """Let the request in work end, refuse those that wait, and close."""
        self._worker.shutdown(wait=True, cancel_futures=True)
        super().server_close()

    def allows(self, given: str | None) -> bool:
        """Whether an Authorization header holds the token."""
        return not self._token or hmac.compare_digest((given or "").encode(), f"Bearer {self._token}".encode())

    def describe(self) -> dict[str, Any]:
        """What the service is."""
        return {**self._hosted.describe(), "max_request_bytes": self.limits.max_request_bytes}

    def answer(self, path: str, content: bytes) -> dict[str, Any]:
        """What the worker says to a request; Refused where it says nothing."""
        roles = {wire.ROLE_PATHS[role]: role for role in self._hosted.roles}
        if path not in roles:
            paths = ", ".join((*roles, wire.DESCRIBE, wire.HEALTH))
            raise Refused(HTTPStatus.NOT_FOUND, f"no {path} here; allowed: {paths}")
        arrived = time.monotonic()
        begun = arrived

        def work() -> dict[str, Any]:
            nonlocal begun
            begun = time.monotonic()
            if begun > arrived + self.limits.answer_seconds:
                raise TooLate
            return self._hosted.answer(roles[path], wire.decode(content), arrived + self.limits.answer_seconds)

        with _refusals(self.limits):
            waiting: Future[dict[str, Any]] = self._worker.submit(work)
            found = waiting.result()
            return {**found, "waited_seconds": begun - arrived}


@contextlib.contextmanager
def _refusals(limits: Limits) -> Iterator[None]:
    """What can go wrong with a request, as statuses."""
    try:
        yield
    except BadMessage as error:
        raise Refused(HTTPStatus.BAD_REQUEST, str(error)) from error
    except TooLate:
        raise Refused(
            HTTPStatus.SERVICE_UNAVAILABLE, f"no answer within {limits.answer_seconds:g} s; ask for fewer rows"
        ) from None
    except CancelledError:
        raise Refused(HTTPStatus.SERVICE_UNAVAILABLE, "the service is being stopped") from None
    except RunFailed as error:  # memory ran out
        raise Refused(HTTPStatus.SERVICE_UNAVAILABLE, str(error)) from error
    except RuntimeError as error:
        if "after shutdown" in str(error):
            raise Refused(HTTPStatus.SERVICE_UNAVAILABLE, "the service is being stopped") from None
        raise


class _Handler(BaseHTTPRequestHandler):
    """One request a connection."""

    server: ScoringServer  # pyright: ignore[reportIncompatibleVariableOverride]
    server_version, sys_version = "fourfold", ""

    def setup(self) -> None:
        self.request.settimeout(self.server.limits.read_seconds)
        super().setup()

    def do_GET(self) -> None:
        with self._refusing():
            if self.path == wire.HEALTH:
                self._send(HTTPStatus.OK, {"status": "ok"})
                return
            self._check_token()
            if self.path != wire.DESCRIBE:
                raise Refused(HTTPStatus.NOT_FOUND, f"no {self.path} here; allowed: {wire.DESCRIBE}, {wire.HEALTH}")
            self._send(HTTPStatus.OK, self.server.describe())

    def do_POST(self) -> None:
        with self._refusing():
            self._check_token()
            self._send(HTTPStatus.OK, self.server.answer(self.path, self._content()))

    def _check_token(self) -> None:
        if not self.server.allows(self.headers.get("Authorization")):
            raise Refused(HTTPStatus.UNAUTHORIZED, "the token is missing or wrong")

    def _content(self) -> bytes:
        if self.headers.get_content_type() != "application/json":
            # A page in a browser can send other types to a loopback address without asking.
            raise Refused(HTTPStatus.UNSUPPORTED_MEDIA_TYPE, "allowed: Content-Type: application/json")
        length = self.headers.get("Content-Length", "")
        if not (length.isascii() and length.isdigit()):
            raise Refused(HTTPStatus.LENGTH_REQUIRED, "allowed: a request with its Content-Length")
        if int(length) > self.server.limits.max_request_bytes:
            raise Refused(
                HTTPStatus.REQUEST_ENTITY_TOO_LARGE,
                f"the request has {int(length):,} bytes; allowed: {self.server.limits.max_request_bytes:,}",
            )
        return self._take(int(length))

    def _take(self, length: int) -> bytes:
        """The body, which may neither pause nor drip for too long."""
        until, pieces = time.monotonic() + self.server.limits.answer_seconds, list[bytes]()
        while (missing := length - sum(map(len, pieces))) > 0:
            pieces.append(self.rfile.read1(min(missing, 2**20)))
            self._unread -= len(pieces[-1])
            if not pieces[-1]:
                raise Refused(HTTPStatus.BAD_REQUEST, f"{length - missing} of {length} bytes came")
            if self._unread > 0 and time.monotonic() > until:
                raise TimeoutError
        return b"".join(pieces)

    @contextlib.contextmanager
    def _refusing(self) -> Iterator[None]:
        length = self.headers.get("Content-Length", "")
        self._unread = int(length) if length.isascii() and length.isdigit() else 0
        try:
            yield
        except Refused as refused:
            self._send(refused.status, {"error": str(refused)})
        except TimeoutError:
            self._send(HTTPStatus.REQUEST_TIMEOUT, {"error": "the request did not come in time"})
        except OSError:
            log.info("a client left before its answer")
        except Exception as error:
            log.exception("a request failed")
            self._send(HTTPStatus.INTERNAL_SERVER_ERROR, {"error": f"{type(error).__name__}: {error}"})

    def _send(self, status: HTTPStatus, message: dict[str, Any]) -> None:
        try:
            content = wire.encode(message)
        except ValueError:  # NaN or infinite: damaged weights are no answer
            status, content = HTTPStatus.INTERNAL_SERVER_ERROR, wire.encode({"error": "the answer is not finite"})
        with contextlib.suppress(OSError):
            self.send_response(status)
            self.send_header("Content-Type", "application/json")
            self.send_header("Content-Length", str(len(content)))
            if status == HTTPStatus.UNAUTHORIZED:
                self.send_header("WWW-Authenticate", "Bearer")
            self.end_headers()
            self.wfile.write(content)
            self._drop_unread()

    def _drop_unread(self) -> None:
        """Take what a refused client still sends, within limits: a socket closed on it would lose the answer."""
        self.wfile.flush()
        left = min(self._unread, self.server.limits.max_request_bytes)
        until = time.monotonic() + self.server.limits.read_seconds
        while left > 0 and time.monotonic() < until and (got := len(self.rfile.read1(2**16))):
            left -= got

    def log_message(self, format: str, *args: Any) -> None:
        """Requests are no news."""
        log.debug(format, *args)
