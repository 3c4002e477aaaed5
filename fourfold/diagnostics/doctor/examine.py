"""From a run's folder to everything that the doctor has to say of it."""

from __future__ import annotations

from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from fourfold.diagnostics.doctor import critic, divergence, policy, reward, system
from fourfold.diagnostics.doctor.healthy import healthy
from fourfold.diagnostics.doctor.records import CannotJudge, Records, read_records
from fourfold.diagnostics.doctor.verdict import Diagnosis, Family, Finding, Unjudged, Verdict, by_severity
from fourfold.diagnostics.run_record import RunRecord

FAMILIES: dict[Family, tuple[Diagnosis, ...]] = {
    "critic": critic.DIAGNOSES,
    "policy": (*policy.DIAGNOSES, *divergence.DIAGNOSES),
    "reward": reward.DIAGNOSES,
    "system": system.DIAGNOSES,
}
DIAGNOSES: tuple[Diagnosis, ...] = tuple(each for family in FAMILIES.values() for each in family)


@dataclass(frozen=True)
class Examination:
    """Verdicts, the most serious first, and what could not be judged; `state` says how far the run is."""

    state: str
    verdicts: tuple[Verdict, ...]
    unjudged: tuple[Unjudged, ...]

    @property
    def too_early(self) -> bool:
        """Whether nothing serious was found, and nothing could be called healthy either."""
        return all(each.severity == "note" for each in self.verdicts)

    @property
    def silent(self) -> list[Family]:
        """The families of which nothing at all could be said, good or bad."""
        said = {each.name for each in self.verdicts}
        return [
            family
            for family, diagnoses in FAMILIES.items()
            if not said & {f"{family} healthy", *(each.name for each in diagnoses)}
        ]

    @property
    def reasons(self) -> dict[str, list[str]]:
        """What could not be judged, by the reason."""
        found: dict[str, list[str]] = {}
        for each in self.unjudged:
            found.setdefault(each.reason, []).append(each.name)
        return found

    def as_dict(self) -> dict[str, Any]:
        """For JSON."""
        return asdict(self)


def examine(run: Path | RunRecord) -> Examination:
    """Everything about a run's folder, or what was read of it, the most serious first; ValueError for no run.

    A run that goes on, was interrupted or has failed is read as far as it got.
    """
    return examined(read_records(run))


def examined(records: Records) -> Examination:
    """Everything that these records tell."""
    verdicts: list[Verdict] = []
    unjudged = [Unjudged("files", problem) for problem in records.run.problems]
    for family, diagnoses in FAMILIES.items():
        found, ill, missing = _family(diagnoses, records)
        verdicts += ill
        unjudged += missing
        if found and not ill:
            try:
                verdicts.append(healthy(family, records, found))
            except CannotJudge as reason:
                unjudged.append(Unjudged(f"{family} healthy", str(reason)))
    return Examination(_state(records), tuple(by_severity(verdicts)), tuple(unjudged))


def _family(diagnoses: tuple[Diagnosis, ...], records: Records) -> tuple[list[Finding], list[Verdict], list[Unjudged]]:
    """What was found, which of it is a disease, and what could not be judged."""
    found: list[Finding] = []
    ill: list[Verdict] = []
    missing: list[Unjudged] = []
    for diagnosis in diagnoses:
        try:
            found.append(finding := diagnosis.judge(records))
        except CannotJudge as reason:
            missing.append(Unjudged(diagnosis.name, str(reason)))
            continue
        if (verdict := diagnosis.verdict(finding)) is not None:
            ill.append(verdict)
    return found, ill, missing


def _state(records: Records) -> str:
    run = records.run
    done = f"{run.state.state}, {run.step} of {run.config.ppo.steps} steps"
    return f"{done}: {run.state.said}" if run.state.said else done
