"""Names of the files in a run's folder that are read outside training; that of the settings is in config.loading."""

from __future__ import annotations

PLAN = "plan.json"
SPENT = "spent.json"
STATE = "state.json"
SUMMARY = "summary.json"
TIMELINE = "memory.jsonl"
