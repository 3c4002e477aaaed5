"""Which disease a run of PPO has, by its metrics and kept rollouts: `examine`."""

from __future__ import annotations

from fourfold.diagnostics.doctor.examine import DIAGNOSES, Examination, examine
from fourfold.diagnostics.doctor.verdict import Diagnosis, Unjudged, Verdict, by_severity

__all__ = ["DIAGNOSES", "Diagnosis", "Examination", "Unjudged", "Verdict", "by_severity", "examine"]
