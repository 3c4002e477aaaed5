"""The golden run: 20 PPO steps of a tiny Llama in trunk mode, every stage before them included.

Run as a program it writes golden.json anew: `PYTHONPATH=.:tests python tests/training/golden.py`. Do so only when a
change of the numbers is wanted, and say in the change's description why they move.
"""

from __future__ import annotations

import json
import tempfile
from pathlib import Path
from typing import Any

from training.runs import Tree, deterministic, run, settings

GOLDEN = Path(__file__).with_name("golden.json")
CHANGES: Tree = {
    "critic": {"learning_rate": 2e-3, "schedule": "cosine", "warmup_rollouts": 2},
    "sampling": {"responses_per_prompt": 2, "temperature": 0.9},
    "ppo": {
        "steps": 20, "learning_rate": 1e-3, "schedule": "linear", "warmup_steps": 4, "entropy_coef": 1e-3,
        "kl_controller": "adaptive", "kl_target": 0.5, "kl_horizon": 200, "reward_normalization": "running",
        "missing_eos_penalty": 0.1,
    },
    "evaluation": {"every": 5},
    "checkpoint": {"every": 10},
}  # fmt: skip


def golden_run(folder: Path) -> dict[str, Any]:
    """Rows of metrics without times and bytes, and what the stages before report."""
    summary = run(settings(folder, CHANGES))
    rows = deterministic(folder / "run" / "ppo" / "metrics.jsonl")
    return {"stages": summary["stages"], "before": summary["before"], "after": summary["after"], "rows": rows}


def main() -> None:
    """Write golden.json: floats in full, one row a line."""
    with tempfile.TemporaryDirectory() as folder:
        result = golden_run(Path(folder))
    rows = ",\n".join(json.dumps(row) for row in result.pop("rows"))
    head = json.dumps(result)[:-1]
    GOLDEN.write_text(f'{head},\n"rows": [\n{rows}\n]}}\n', encoding="utf-8")


if __name__ == "__main__":
    main()
