"""The first call of a torch operation can take half a second on a busy machine: no time limit for a single example."""

from __future__ import annotations

from hypothesis import settings

settings.register_profile("no deadline", deadline=None)
settings.load_profile("no deadline")
