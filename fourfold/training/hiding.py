"""What roles cost that are not kept where the others are or score beside sampling, and whether sampling hides it."""

from __future__ import annotations

from fourfold.memory.offload import residency_of
from fourfold.models.assembly import FourModels
from fourfold.scoring.ahead import Ahead


class Hiding:
    """Seconds and traffic of the scoring that sampling hides, or could hide, step by step and over the run."""

    def __init__(self, models: FourModels, ahead: Ahead | None = None) -> None:
        # The policy of step 0, where it is held, lies where the reference does and counts with it.
        roles = [("reference", models.reference), ("reference", models.step_0), ("reward", models.reward)]
        roles += [("reward", classifier) for classifier in models.classifiers.values()]
        self._offloaded = [(name, held) for name, role in roles if (held := residency_of(role)) is not None]
        self._ahead = ahead
        self._offloaded_seconds = self._ahead_seconds = self._hidden_seconds = 0.0

    def begin(self) -> None:
        """Forget what was done between two steps, in an evaluation or in pre-flight."""
        for _, held in self._offloaded:
            held.take()
        if self._ahead is not None:
            self._ahead.seconds()

    def step(self) -> dict[str, float]:
        """Metrics of a step; none where all roles are kept on the run's device and score in their own phase."""
        return self._offload() | self._overlap()

    def condition(self, generate_seconds: float) -> str:
        """How much of the scoring was hidden behind sampling, or whether that of offloaded roles could be.

        Empty where there is nothing to hide.
        """
        if self._ahead is not None:
            return (
                f"overlap: reference and reward scored for {self._ahead_seconds:.1f} s beside sampling "
                f"({generate_seconds:.1f} s), {self._hidden_seconds:.1f} s of it hidden"
            )
        if not self._offloaded:
            return ""
        roles = " and ".join(f"{name} ({held.where})" for name, held in self._offloaded)
        verdict = "could be" if self._offloaded_seconds < generate_seconds else "could not be"
        return (
            f"offload: scoring by {roles} took {self._offloaded_seconds:.1f} s, sampling {generate_seconds:.1f} s: it "
            f"{verdict} hidden behind the next batch's sampling (sampling.overlap_scoring)"
        )

    def _offload(self) -> dict[str, float]:
        """Seconds and traffic of the roles that are not kept where the others are."""
        found = dict[str, float]()
        for role, held in self._offloaded:
            for name, value in held.take().items():
                found[f"{role}_{name}"] = found.get(f"{role}_{name}", 0.0) + value
        if found:
            found["offloaded_pass_seconds"] = sum(found[f"{role}_pass_seconds"] for role in dict(self._offloaded))
            self._offloaded_seconds += found["offloaded_pass_seconds"]
        return found

    def _overlap(self) -> dict[str, float]:
        """Seconds of the scoring beside sampling, and how much of them nobody waited for."""
        if self._ahead is None:
            return {}
        worked, hidden = self._ahead.seconds()
        self._ahead_seconds += worked
        self._hidden_seconds += hidden
        return {"score_ahead_seconds": worked, "score_hidden_seconds": hidden, "score_hidden_share": hidden / worked}
