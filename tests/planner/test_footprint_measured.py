"""The bill against real runs: a planner that drifts from what runs do fails here."""

from __future__ import annotations

from pathlib import Path

import pytest

from benchmarks.planner import PHASES, Case, Compared, measure, predict
from planner.scenes import in_this_process

# Without and with a trunk, several values, half precision, padding and a lever; benchmarks/planner.py has all of them.
CASES = (
    Case("tiny", ('sharing.mode="none"',), (8, 8, 24, 4)),
    Case("tiny", ('sharing.mode="none"', 'critic.heads="multi"', "critic.head_width=256"), (8, 8, 24, 4)),
    Case("tiny", ('sharing.mode="trunk"', 'precision.compute="bfloat16"'), (8, 8, 24, 8), ragged=True),
    # Critics of fewer layers, and with a model of their own beside adapters.
    Case("tiny", ('sharing.mode="none"', "critic.layers=2", "critic.ensemble=3", "ppo.value_clip_eps=0.0")),
    Case("tiny", ('sharing.mode="adapters"',), critic="gpt2"),
    Case("tiny", ('reference.prior="moving"', 'precision.compute="bfloat16"', 'sharing.mode="none"'), (8, 8, 24, 4)),
    Case("tiny", ('reference.prior="uniform"', 'sharing.mode="trunk"', 'ppo.kl_estimator="full"'), (8, 8, 24, 4)),
)


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("case", CASES, ids=lambda case: ",".join(case.settings[:2]))
def test_predicted_bytes_are_those_of_a_run(tmp_path: Path, case: Case) -> None:
    """Every phase and role within 5 % of the bytes of live tensors (the issue asks for 15 %)."""
    measured = measure(case, tmp_path, in_this_process)
    found = Compared(case, measured, predict(case, tmp_path, measured.lengths))
    assert set(PHASES) <= found.errors.keys() and "learn/actor" in found.errors
    assert {name: error for name, error in found.errors.items() if abs(error) > 0.05} == {}
