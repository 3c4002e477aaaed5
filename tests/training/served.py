"""Services for tests: in a thread of this process, on a port that was free."""

from __future__ import annotations

import contextlib
import threading
from collections.abc import Callable, Iterator, Mapping
from typing import Any

from fourfold.scoring.service.hosted import Hosted
from fourfold.scoring.service.server import Limits, ScoringServer
from fourfold.training.serve import load_hosted
from training.runs import Tree, make_config, merged, pays_by_hash


@contextlib.contextmanager
def listening(hosted: Any, *, token: str = "", limits: Limits | None = None) -> Iterator[ScoringServer]:
    """A server that answers as `hosted` does, and is gone afterwards."""
    server = ScoringServer("127.0.0.1", 0, hosted, token=token, limits=limits)
    thread = threading.Thread(target=server.serve_forever, kwargs={"poll_interval": 0.01})
    thread.start()
    try:
        yield server
    finally:
        stop(server)
        thread.join()


def stop(server: ScoringServer) -> None:
    """From here on nothing answers; may be called again."""
    server.shutdown()
    server.server_close()


def hosted_roles(tree: Tree, *roles: str) -> Hosted:
    """Roles of a run, loaded as `fourfold serve` loads them."""
    return load_hosted(make_config(tree), roles)


def at_service(tree: Tree, url: str, *roles: str, **service: Any) -> Tree:
    """The same run with these roles at a service."""
    given = {"url": url, "retries": 0, **service}
    return merged(tree, {**{role: {"residency": "service"} for role in roles}, "service": given})


class Watched:
    """Answers as real roles do; `before(role, message)` sees each request first, on the worker's thread."""

    def __init__(self, hosted: Hosted, before: Callable[[str, Mapping[str, Any]], None]) -> None:
        self._hosted = hosted
        self._before = before
        self.roles = hosted.roles
        self.describe = hosted.describe

    def answer(self, role: str, message: dict[str, Any], deadline: float) -> dict[str, Any]:
        """See it, then answer it."""
        self._before(role, message)
        return self._hosted.answer(role, message, deadline)


_stopping: dict[int, ScoringServer] = {}
_calls = 0


def stop_at_call(call: int, server: ScoringServer) -> None:
    """The given call of `pays_and_stops_the_service` from now on does what its name says; 0 is none."""
    global _calls
    _calls = 0
    _stopping.clear()
    _stopping[call] = server


def pays_and_stops_the_service(prompts: list[str], responses: list[str]) -> list[float]:
    """As `pays_by_hash`."""
    global _calls
    _calls += 1
    if _calls in _stopping:
        stop(_stopping[_calls])
    return pays_by_hash(prompts, responses)
