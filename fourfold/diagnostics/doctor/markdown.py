"""The text of docs/doctor.md, from the declarations."""

from __future__ import annotations

from fourfold.diagnostics.doctor.examine import FAMILIES
from fourfold.diagnostics.doctor.records import FEWEST_STEPS, MOST_STEPS
from fourfold.diagnostics.doctor.robust import GROUPS, MOST_AUTOCORRELATION
from fourfold.diagnostics.doctor.verdict import CONFIDENT

_TITLES = {"critic": "Critic", "policy": "Policy", "reward": "Reward", "system": "System"}
_HEAD = f"""# Doctor

Generated from the declarations in `fourfold/diagnostics/doctor/`; change them there.

    fourfold doctor RUN
    fourfold doctor RUN --json

`RUN` is the `output` folder of a run that has finished, goes on, was interrupted or has failed; it is read as far as it
got, without a model. The exit code is 0 when it could be read, whatever was found, and 2 when it could not.

What is read: the rows of `ppo/metrics.jsonl` ([metrics](metrics.md)), the settings, what stages have noted, and the
rollouts that evaluations keep (`evaluation.keep_rollouts`): the held-out one in `ppo/evaluations/step-NNNNNN.parquet`,
from which nothing is ever learned, with the critic's values as they were at that step, and the training rollout of the
same step in `ppo/rollouts/`. Without `data.prompts_test` there are none; `evaluation.every` says how often they are
kept. What could not be judged is listed with the reason.

A verdict has a severity ("ill": what was learned is in doubt; "warning": it costs something; "note": it wastes
something; "good": its family was looked at and nothing was found), evidence (the numbers), the steps that they are
from, a setting to change, and a confidence.

**Confidence.** A disease is a statistic x beyond a limit, and its confidence is Phi((x - limit) / s), with the standard
error s of x and the normal distribution function Phi: the probability that the true number is beyond the limit, as far
as noise goes. Several conditions give the smallest of theirs. It is named from {CONFIDENT:g} on. What is counted rather
than estimated has confidence 1. A good verdict has 1 less the largest confidence of any disease of its family; "critic
healthy" needs besides that values surely explain more than the limit of "critic underfit".

**Statistics.** The *spread* of numbers is 1.4826 x median |x - median(x)|, or 1.2533 x mean |x - median(x)| where more
than half of them are equal. The *level* of a metric over steps is its median; its error is 1.2533 x spread /
sqrt(n (1 - r) / (1 + r)), r being the correlation of neighbouring steps (between 0 and {MOST_AUTOCORRELATION:g}).
The first and the last *third* of the steps have at least {FEWEST_STEPS} and at most {MOST_STEPS} steps. Tokens of one
response are not independent: errors of what is read from rollouts count responses (by leaving out each of {GROUPS}
groups of them, or as the ratio of two sums). Limits are rules of thumb, so far from what healthy runs do that five
seeds of the healthy run of the tests stay clear of every one; each disease is shown by a run made ill on purpose
(`tests/diagnostics/test_doctor_*.py`).
"""


def doctor_markdown() -> str:
    """The whole page."""
    lines = [_HEAD.rstrip()]
    for family, diagnoses in FAMILIES.items():
        lines += ["", f"## {_TITLES[family]}", "", "| verdict | severity | meaning | formula | remedy |"]
        lines.append("|---|---|---|---|---|")
        for each in diagnoses:
            cells = (each.name, each.severity, each.meaning, each.formula, each.remedy)
            lines.append("| " + " | ".join(cell.replace("|", "\\|") for cell in cells) + " |")
    return "\n".join(lines) + "\n"
