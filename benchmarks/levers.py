"""What each declared lever saves and costs on a real model: a process with it beside one without it, in turn.

`python -m benchmarks.levers` needs a quiet machine; --lever NAME measures one, or several, and keeps the rows of the
others, each with the hardware that it was measured on. One that fails is named and loses the others nothing. A lever
whose package is not installed, or that runs on another kind of device only, is left out. With --device cuda peaks are
what torch has allocated, and the result is levers-cuda; --model random:7b makes a model of that size. Levers come from
planner/levers.py with their settings, their baselines and what they promise: an exact one must leave actor and critic
bit for bit as they are without it. How far the others change an update is measured on its first, in which both sides
learn from the responses that the side without the lever has drawn (benchmarks/replay.py); later ones sample their own.
"""

from __future__ import annotations

import argparse
import importlib.util
import json
import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

from benchmarks.lever_rows import PLAIN, conflict, figures_of, merged, row_of
from benchmarks.peer_trl import CACHE, SHAPE, Side, measure, parse_arguments
from benchmarks.results import ROOT, Result, commit, hardware, newest, slug, today, write_result
from benchmarks.worker import WorkerReport
from fourfold.planner.lever import Change
from fourfold.planner.levers import LEVERS, SEPARATE

# A baseline that names them means one micro-batch, and names the sizes of the tests' tiny runs; here it is one anyway.
BATCH_SIZES = ("ppo.mini_batch_size", "ppo.micro_batch_size")
SHARING = "sharing.mode"
BASELINES = {"none": PLAIN, "trunk": "four models over a trunk"}
ON_CUDA = "levers-cuda"  # the result of a GPU
RANDOM = "random:"
# What a run on the CPU refuses, so that there is nothing to measure it with.
ONLY_ON_A_GPU = tuple(each.name for each in LEVERS if each.only_on == "cuda")


@dataclass(frozen=True)
class Subject:
    """Settings put on a baseline, and what they do to an update."""

    name: str
    settings: Mapping[str, Any]
    change: Change = "exact"
    baseline: Mapping[str, Any] = field(default_factory=dict)
    only_on: str = ""

    @property
    def without(self) -> Side:
        """The baseline; those of several subjects may be one."""
        return self._side(self._baseline)

    @property
    def having(self) -> Side:
        """The baseline with the lever."""
        added = {key: value for key, value in self.settings.items() if self.baseline.get(key) != value}
        return self._side(self._baseline | added, self.name)

    @property
    def _baseline(self) -> dict[str, Any]:
        kept = {key: value for key, value in self.baseline.items() if key not in BATCH_SIZES}
        return {**SEPARATE, **kept}

    def _side(self, settings: Mapping[str, Any], name: str = "") -> Side:
        """How the worker is started; a side without a name is called by its settings, and draws for those with one."""
        without = ", ".join([BASELINES[self._baseline[SHARING]], *_chosen(self._baseline)])
        given = [text for setting in _chosen(settings) for text in ("--set", setting)]
        arguments = ("--sharing", settings[SHARING], "--responses", f"{slug(without)}.parquet", *given)
        return Side(name or without, "fourfold", "float32", arguments)


def _chosen(settings: Mapping[str, Any]) -> list[str]:
    """All but how the models share, as KEY=VALUE."""
    return [f"{key}={json.dumps(value)}" for key, value in settings.items() if key != SHARING]


# What is not a lever of its own: others of their strengths, and those that save more where they are on together.
MORE = (
    Subject(
        "adapters over a trunk of all but 4 layers",
        {"sharing.mode": "adapters", "adapters.layers": 4},
        "other parameters",
    ),
    Subject("bfloat16 over a trunk", {"precision.compute": "bfloat16"}, "bounded", {"sharing.mode": "trunk"}),
    Subject("float16 over a trunk", {"precision.compute": "float16"}, "bounded", {"sharing.mode": "trunk"}),
    Subject("bfloat16 critic over a trunk", {"precision.critic": "bfloat16"}, "bounded", {"sharing.mode": "trunk"}),
    Subject("micro-batches of 4", {"ppo.micro_batch_size": 4}, "bounded"),
    Subject("park reference and reward", {"reference.residency": "park", "reward.residency": "park"}),
    Subject("stream reference and reward", {"reference.residency": "stream", "reward.residency": "stream"}),
    Subject("service reference and reward", {"reference.residency": "service", "reward.residency": "service"}),
)
SUBJECTS = (
    *(Subject(each.name, each.settings, each.change, each.baseline, each.only_on) for each in LEVERS),
    *MORE,
)


def result(
    subjects: Sequence[Subject], reports: Mapping[str, Sequence[WorkerReport]], args: argparse.Namespace
) -> Result:
    """All that is kept: for each lever its figures, what it stood against and when; and what the sides train."""
    told = [PLAIN, *(each.name for each in subjects if each.change == "other parameters")]
    sides = {
        name: {"what": run.what, "dtype": run.dtype, "trainable_parameters": run.trainable_parameters}
        for name, run in ((name, reports[name][0]) for name in told if name in reports)
    }
    found, rows = [], {}
    versions = next(iter(reports.values()))[0].versions
    machine = hardware(gpu=gpu_name()) if args.device == "cuda" else hardware()
    measured: dict[str, Any] = {"date": today(), "hardware": machine, "commit": commit(), "versions": versions}
    for each in subjects:
        against = each.without.name
        found += figures_of(each.name, each.change, against, reports[each.name], reports[against])
        rows[each.name] = row_of(each.change, against, args) | measured
    config = {**_shape(args), "sides": sides, "levers": rows}
    return Result(name=name_on(args.device), config=config, figures=tuple(found), **measured)


def name_on(device: str) -> str:
    """The result of a kind of device."""
    return ON_CUDA if device == "cuda" else "levers"


def gpu_name() -> str:
    """What the driver calls the GPU."""
    import torch

    return torch.cuda.get_device_name()


def model_of(given: str) -> str:
    """A model of random weights is made where one is asked for, once."""
    if not given.startswith(RANDOM):
        return given
    from benchmarks.planner_models import SHAPES, make_model

    name = given.removeprefix(RANDOM)
    if name not in SHAPES:
        raise ValueError(f"--model {given}: allowed: {', '.join(RANDOM + each for each in SHAPES)}")
    return str(make_model(name, CACHE.expanduser() / f"random-{name}"))


def placed(side: Side, device: str, dtype: str) -> Side:
    """The side on this kind of device, with products in this type where its settings name no other."""
    return replace(side, dtype=dtype, arguments=(*side.arguments, "--device", device))


def _shape(args: argparse.Namespace) -> dict[str, Any]:
    """What all rows of a table have in common; the lever "micro-batches of 4" has others of these."""
    same = {name: getattr(args, name) for name in ("model", *SHAPE) if name not in ("updates", "micro_batch")}
    return same | ({"dtype": args.dtype} if args.device == "cuda" else {})


def _runs_on(subject: Subject, device: str) -> bool:
    return subject.only_on in ("", device)


def parse(arguments: Sequence[str] | None) -> argparse.Namespace:
    """The shape of the comparison, on which kind of device, and the subjects that are measured there."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks.levers", description=__doc__, add_help=False)
    parser.add_argument("--lever", action="append", choices=[each.name for each in SUBJECTS])
    parser.add_argument("--device", choices=("cpu", "cuda"), default="cpu")
    parser.add_argument("--dtype", choices=("float32", "bfloat16"), default="float32", help="on a GPU, of products")
    own, rest = parser.parse_known_args(arguments)
    if own.device == "cpu" and own.dtype != "float32":
        parser.error(f"--dtype {own.dtype}: rows of a CPU stand on float32; allowed beside --device cuda")
    absent = {each.name for each in LEVERS if each.package and importlib.util.find_spec(each.package) is None}
    chosen = [each for each in SUBJECTS if (each.name in own.lever if own.lever else each.name not in absent)]
    here = [each for each in chosen if _runs_on(each, own.device)]
    if own.lever and here != chosen:
        elsewhere = next(each.name for each in chosen if each not in here)
        parser.error(f"--lever {elsewhere!r} runs on another kind of device than --device {own.device}")
    args = argparse.Namespace(**{**vars(parse_arguments(rest)), **vars(own), "subjects": here})
    earlier = None if args.dry else newest(name_on(own.device))
    if problem := conflict(earlier, _shape(args), [each.name for each in here]):
        parser.error(problem)
    return args


def main(arguments: Sequence[str] | None = None) -> int:
    """Measure, then write or print the result."""
    args = parse(arguments)
    subjects, earlier = args.subjects, newest(name_on(args.device))
    sides = {
        side.name: placed(side, args.device, args.dtype) for each in subjects for side in (each.without, each.having)
    }
    try:
        started = argparse.Namespace(**{**vars(args), "model": model_of(args.model)})
    except ValueError as error:
        print(error, file=sys.stderr)
        return 2
    reports = {name: runs for name, runs in measure(started, list(sides.values()), keep_going=True).items() if runs}
    failed = [each.name for each in subjects if each.name not in reports or each.without.name not in reports]
    subjects = [each for each in subjects if each.name not in failed]
    if failed:
        print(f"not measured: {', '.join(failed)}", file=sys.stderr)
    if not subjects:
        return 1
    found = result(subjects, reports, args)
    if args.dry:
        print(found.model_dump_json(indent=2))
    else:
        print(
            write_result(merged(earlier, found, [each.name for each in SUBJECTS]), instead_of=earlier).relative_to(ROOT)
        )
    return int(bool(failed))


if __name__ == "__main__":
    sys.exit(main())
