"""What a worker of a comparison takes and prints; each side runs in a process of its own.

A worker is started with WORKER_ARGUMENTS and prints one JSON object of the form of `WorkerReport` as the last line of
its standard output. Prompts come as JSONL rows {"prompt": text} whose text is exactly `--prompt-tokens` tokens long,
without a BOS. A worker draws `--batch` responses an update and learns from all of them `--epochs` times, in one
mini-batch.
"""

from __future__ import annotations

import argparse
import array
import base64
import json
import re
import statistics
import subprocess
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Annotated

from pydantic import BaseModel, ConfigDict, Field

Seconds = Annotated[float, Field(ge=0, allow_inf_nan=False)]
PHASES = ("generate", "score", "learn")


class WorkerReport(BaseModel):
    """One run of one side."""

    model_config = ConfigDict(frozen=True, extra="forbid", strict=True)

    what: str = Field(description="The library and how it trains, in words.")
    dtype: str = Field(description="Type of matrix products.")
    trainable_parameters: dict[str, Annotated[int, Field(ge=0)]] = Field(description="By role.")
    seconds_per_update: list[Seconds] = Field(min_length=2, description="Every update, the first included.")
    response_tokens_per_update: list[Annotated[int, Field(gt=0)]] = Field(min_length=2)
    peak_rss_mib: Annotated[float, Field(gt=0)] = Field(
        description="Highest resident memory; on a GPU what torch allocated."
    )
    phases: dict[str, Seconds] = Field(description="Mean seconds an update by phase, without the first update.")
    resident_mib: dict[str, float] = Field(default={}, description="What each role and what is shared holds, at start.")
    phase_peak_mib: dict[str, float] = Field(default={}, description="Highest resident memory by phase, as for phases.")
    moved: str = Field(default="", description="What the first update added to a sample of the trained weights.")
    log_prob_gap: float = Field(
        default=0.0,
        description="Mean |difference| from the log-probs of the side that drew the responses, nats a token.",
    )
    service_peak_mib: float = Field(default=0.0, description="As peak_rss_mib, of the process that holds other roles.")
    weights: str = Field(default="", description="Checksum of actor and critic after the last update.")
    versions: dict[str, str]
    threads: Annotated[int, Field(gt=0)]

    @property
    def steady_seconds(self) -> float:
        """Median seconds of the updates after the first, which also warms up."""
        return statistics.median(self.seconds_per_update[1:])

    @property
    def steady_tokens(self) -> float:
        """Mean response tokens of the updates after the first."""
        return statistics.mean(self.response_tokens_per_update[1:])

    def moves(self) -> array.array[float]:
        """`moved` as numbers; JSON has it in base64."""
        return array.array("f", base64.b64decode(self.moved))


def worker_parser(description: str) -> argparse.ArgumentParser:
    """The arguments that every worker takes; trl_worker.py, which cannot import this module, repeats them."""
    parser = argparse.ArgumentParser(description=description)
    parser.add_argument("--model", required=True, help="folder with safetensors and tokenizer")
    parser.add_argument("--prompts", required=True, help="JSONL file of prompts")
    parser.add_argument("--prompt-tokens", type=int, required=True)
    parser.add_argument("--new-tokens", type=int, required=True)
    parser.add_argument("--batch", type=int, required=True)
    parser.add_argument("--micro-batch", type=int, required=True, help="rows of a pass that learns")
    parser.add_argument("--epochs", type=int, required=True)
    parser.add_argument("--updates", type=int, required=True)
    parser.add_argument("--dtype", choices=("float32", "bfloat16"), required=True)
    parser.add_argument("--threads", type=int, required=True)
    parser.add_argument("--seed", type=int, required=True)
    return parser


def peak_rss_mib(process: int | None = None) -> float:
    """Highest resident memory of this process, or of another, since its program started.

    Not `ru_maxrss`: that also remembers the memory of the process that forked this one.
    """
    status = Path("/proc") / str(process or "self") / "status"
    found = re.search(r"^VmHWM:\s+(\d+) kB$", status.read_text(encoding="utf-8"), flags=re.MULTILINE)
    if found is None:
        raise ValueError(f"{status} holds no VmHWM; the peak memory is measured on Linux only")
    return int(found[1]) / 1024


def run_worker(command: Sequence[str], *, environment: Mapping[str, str], folder: Path) -> WorkerReport:
    """Run a worker to its end and read what it printed; its messages go to standard error."""
    done = subprocess.run(
        list(command), cwd=folder, env=dict(environment), stdin=subprocess.DEVNULL, stdout=subprocess.PIPE, text=True
    )
    if done.returncode != 0:
        raise ValueError(f"the worker ended with {done.returncode}; its messages stand above: {' '.join(command)}")
    return read_report(done.stdout)


def read_report(output: str) -> WorkerReport:
    """The report in the last line of a worker's output; its phases are those of the vocabulary."""
    lines = output.strip().splitlines()
    if not lines:
        raise ValueError("the worker printed nothing; its last line must be a JSON object")
    report = WorkerReport.model_validate_json(lines[-1])
    if tuple(report.phases) != PHASES:
        raise ValueError(f"phases: given {json.dumps(list(report.phases))}; allowed: {json.dumps(list(PHASES))}")
    return report
