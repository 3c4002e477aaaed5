"""A package that stands for wandb or trackio where neither is installed."""

from __future__ import annotations

from importlib.machinery import ModuleSpec
from types import ModuleType, SimpleNamespace
from typing import Any


class StandIn(ModuleType):
    """Takes what the two packages take, and keeps it."""

    def __init__(self, name: str) -> None:
        super().__init__(name)
        self.__spec__ = ModuleSpec(name, None)  # by which is seen that a package is installed
        self.asked: list[dict[str, Any]] = []
        self.rows: list[tuple[int, dict[str, float]]] = []
        self.Settings = lambda **given: given

    def init(self, **asked: Any) -> Any:
        """Begin a run; what is asked is kept, and something is said on stdout, as trackio does."""
        self.asked.append(asked)
        print("a line of its own")
        return SimpleNamespace(log=lambda row, step: self.rows.append((step, row)), finish=self.finish)

    def finish(self) -> None:
        """Both forms are there: of the run, and of the module."""
