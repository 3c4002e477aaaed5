"""What `fourfold.planner.footprint` predicts beside what runs take: peak bytes of phases and roles, config by config.

`python -m benchmarks.planner` runs each case for a PPO step in a process of its own, on models of random weights;
--case TEXT runs those with that text in their names, --dry prints the result. Tensors are counted one by one
(memory.count_tensors), which is exactly what the formulas are about; resident memory, which also holds what the
allocator keeps, is compared more loosely.
"""

from __future__ import annotations

import argparse
import json
import shutil
import statistics
import subprocess
import sys
import tempfile
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from benchmarks.results import ROOT, Figure, Result, commit, hardware, today, versions, write_result
from fourfold.config.loading import apply_override, parse_config
from fourfold.planner.architectures import Architecture
from fourfold.planner.bill import Footprint, Moment
from fourfold.planner.footprint import footprint
from fourfold.planner.hardware.machine import Cluster, Device, Node
from fourfold.planner.scene import Lengths, Scene

PHASES = ("generate", "score", "learn")
PACKAGES = ("torch", "transformers", "peft", "bitsandbytes", "torchao")
MIB = 2**20
Work = Callable[[Mapping[str, Any], int], dict[str, Any]]
TRUNK, ADAPTERS, SEPARATE = 'sharing.mode="trunk"', 'sharing.mode="adapters"', 'sharing.mode="none"'
HALF = 'precision.compute="bfloat16"'


@dataclass(frozen=True)
class Case:
    """A model, a batch (rows x prompt + response tokens, rows of a micro-batch), and settings."""

    model: str
    settings: tuple[str, ...]
    batch: tuple[int, int, int, int] = (16, 16, 16, 8)
    ragged: bool = False
    critic: str = ""  # the model of a critic with one of its own

    @property
    def name(self) -> str:
        """For people, and for --case."""
        rows, prompt, response, micro = self.batch
        given = [setting.replace('"', "") for setting in self.settings]
        said = ", ".join(given + [f"critic.model={self.critic}"] * bool(self.critic)) or "defaults"
        shape = f"{rows} x {prompt} + {response} by {micro}{' of several lengths' * self.ragged}"
        return f"{self.model}: {said}; {shape}"


def _frozen(kind: str) -> str:
    return f'precision.frozen="{kind}"'


CASES = (
    Case("smollm2-135m", (TRUNK,), (8, 16, 16, 8)),
    Case("smollm2-135m", (TRUNK, HALF), (8, 16, 16, 4)),
    Case("smollm2-135m", (ADAPTERS,), (4, 8, 8, 4)),
    Case("smollm2-135m", (ADAPTERS, HALF), (8, 16, 16, 4)),
    Case("llama", (SEPARATE,)),
    Case("llama", (SEPARATE,), ragged=True),
    Case("llama", (SEPARATE, HALF)),
    Case("llama", (SEPARATE,), (32, 64, 64, 8)),
    Case("llama", (TRUNK,), (64, 64, 64, 32)),
    Case("llama", (TRUNK, HALF), (32, 32, 32, 32)),
    Case("llama", (TRUNK, "trunk.train=true")),
    Case("llama", (ADAPTERS,), (32, 32, 32, 16)),
    Case("llama", (ADAPTERS, HALF)),
    Case("llama", (ADAPTERS, "adapters.layers=2"), (32, 32, 32, 16)),
    Case("qwen3", (SEPARATE,), ragged=True),
    Case("qwen3", (TRUNK, HALF), (32, 32, 32, 16)),
    Case("gemma", (SEPARATE,)),
    Case("gemma", (TRUNK, HALF), (32, 32, 32, 16)),
    Case("gpt2", (SEPARATE,)),
    Case("gpt2", (TRUNK, HALF), (32, 32, 32, 16)),
    Case("gpt_neox", (SEPARATE,)),
    Case("gpt_neox", (ADAPTERS, HALF)),
    Case("llama", (SEPARATE, 'memory.checkpointing="layers"'), (32, 32, 32, 32)),
    Case("llama", (SEPARATE, 'memory.checkpointing="attention"'), (32, 32, 32, 32)),
    Case("llama", (SEPARATE, "memory.activation_offload=true"), (32, 32, 32, 32)),
    Case("llama", (SEPARATE, 'reference.residency="park"', 'reward.residency="park"')),
    Case("llama", (SEPARATE, 'reference.residency="stream"', 'reward.residency="stream"')),
    Case("llama", (SEPARATE, 'memory.optimizer_residency="park"')),
    Case("llama", (SEPARATE, HALF, 'memory.optimizer_residency="offload"')),
    Case(
        "llama",
        (SEPARATE, "memory.optimizer_in_backward=true", "ppo.max_grad_norm=0.0", "critic.max_grad_norm=0.0"),
        (16, 16, 16, 16),
    ),
    Case("llama", (SEPARATE, 'ppo.optimizer="adamw_8bit"', 'critic.optimizer="adamw_8bit"')),
    Case("llama", (TRUNK, _frozen("int8"))),
    Case("llama", (ADAPTERS, _frozen("nf4"), HALF)),
    Case("llama", (TRUNK, _frozen("float16"), 'precision.reference="float16"', 'precision.reward="float16"')),
    Case("llama", (SEPARATE, "critic.layers=2")),
    Case("llama", (TRUNK, HALF), (32, 32, 32, 16), critic="gpt2"),
    Case("llama", (ADAPTERS, "critic.ensemble=4", "ppo.value_clip_eps=0.0"), critic="tiny"),
)


def settings(case: Case, folder: Path) -> dict[str, Any]:
    """The configuration of a case, but for its model and reward model."""
    rows, prompt, response, micro = case.batch
    tree: dict[str, Any] = {
        "output": str(folder / "run"),
        "stages": ["ppo"],
        "model": {"path": str(folder / case.model)},
        "sharing": {"mode": "trunk"},
        "precision": {"compute": "float32"},
        "memory": {"count_tensors": True},
        "system": {"device": "cpu", "threads": 1},
        "data": {"prompts": {"path": str(folder / "prompts.jsonl")}, "max_prompt_tokens": prompt},
        "reward": {"source": "checkpoint", "checkpoint": str(folder / "reward")},
        "critic": {"learning_rate": 1e-7},
        "sampling": {"max_new_tokens": response},
        "ppo": {
            "steps": 1,
            "rollout_batch_size": rows,
            "mini_batch_size": rows,
            "micro_batch_size": micro,
            "num_epochs": 1,
            "learning_rate": 1e-7,
        },
    }
    for setting in case.settings:
        apply_override(tree, setting)
    if case.critic:
        tree["critic"]["model"] = str(folder / f"critic-{case.critic}")
    if "trunk.train=true" in case.settings or tree["sharing"]["mode"] == "trunk":
        tree["trunk"] = {"branch_layers": 2} | tree.get("trunk", {})
    return tree


@dataclass(frozen=True)
class Measured:
    """Bytes by moment, as the planner writes moments."""

    tensors: Mapping[str, int]
    resident: Mapping[str, int]
    resting: int
    lengths: Lengths


def in_a_process(tree: Mapping[str, Any], steps: int) -> dict[str, Any]:
    """What benchmarks/planner_worker.py finds; ValueError when it fails."""
    done = subprocess.run(
        [sys.executable, "-W", "ignore", "-m", "benchmarks.planner_worker", str(steps)],
        cwd=ROOT, input=json.dumps(tree), stdout=subprocess.PIPE, text=True,
    )  # fmt: skip
    if done.returncode != 0:
        raise ValueError(f"the worker ended with {done.returncode}; its messages stand above")
    return json.loads(done.stdout.strip().splitlines()[-1])


def carry_out(case: Case, folder: Path, steps: int = 1, work: Work = in_a_process) -> tuple[dict[str, Any], Lengths]:
    """A run of the case, in a process of its own unless `work` says otherwise: what it found, its texts' lengths."""
    from benchmarks.planner_models import make_model, make_reward

    rows, prompt, _, _ = case.batch
    make_model(case.model, folder / case.model)
    if case.critic:
        make_model(case.critic, folder / f"critic-{case.critic}")
    lengths = [prompt - (row % 3 if case.ragged else 0) for row in range(rows)]
    texts = (" ".join(f"w{(7 * row + i) % 50}" for i in range(length)) for row, length in enumerate(lengths))
    (folder / "prompts.jsonl").write_text("".join(json.dumps({"prompt": text}) + "\n" for text in texts))
    tree = settings(case, folder)
    shutil.rmtree(folder / "run", ignore_errors=True)  # or the worker would go on with the run of the case before
    make_reward(tree, folder / "reward")
    found = work(tree, steps)
    longest, mean = max(found["response_length_max"]), statistics.mean(found["response_length_mean"])
    return found, Lengths(prompt, longest, statistics.mean(lengths), mean)


def measure(case: Case, folder: Path, work: Work = in_a_process) -> Measured:
    """Bytes of a run of the case."""
    found, lengths = carry_out(case, folder, work=work)
    return Measured(found["tensors"], found["resident"], found["resting"], lengths)


def scene_of(case: Case, folder: Path, lengths: Lengths, cluster: Cluster) -> Scene:
    """The same run as the planner is told of it."""
    config = parse_config(settings(case, folder), "the benchmark")
    folders = {"base": folder / case.model} | ({"critic": Path(config.critic.model)} if case.critic else {})
    shapes = {role: json.loads((place / "config.json").read_text(encoding="utf-8")) for role, place in folders.items()}
    return Scene(config, {role: Architecture.from_config(shape) for role, shape in shapes.items()}, cluster, lengths)


def predict(case: Case, folder: Path, lengths: Lengths) -> Footprint:
    """The planner's bill of the same run."""
    return footprint(scene_of(case, folder, lengths, Cluster(Node(this_cpu()))))


def this_cpu() -> Device:
    """The types that it multiplies, which is all that its bytes depend on."""
    import torch

    from fourfold.algorithms.products import product_dtype

    known = {"float32": torch.float32, "bfloat16": torch.bfloat16, "float16": torch.float16}
    rates = {name: 1.0 for name, dtype in known.items() if product_dtype("cpu", dtype) == dtype}
    return Device("this machine", "cpu", 1, 1.0, rates)


def tensors(bill: Footprint, moment: Moment) -> int:
    """What of a moment is tensors."""
    return bill.held(moment) - bill.by(lambda item: item.kind, moment).get("framework", 0)


@dataclass
class Compared:
    """Predicted and measured bytes of one case."""

    case: Case
    measured: Measured
    bill: Footprint
    errors: dict[str, float] = field(default_factory=dict)  # of tensors, by phase and by moment
    resident_errors: dict[str, float] = field(default_factory=dict)

    def __post_init__(self) -> None:
        for name, bytes_there in self.measured.tensors.items():
            if name.split("/")[0] in PHASES:
                self.errors[name] = self.predicted(name) / bytes_there - 1
                whole = self._whole(name)
                self.resident_errors[name] = whole / self.measured.resident[name] - 1

    def predicted(self, name: str) -> int:
        """Bytes of tensors of a phase or moment."""
        return max(tensors(self.bill, moment) for moment in self._moments(name))

    def _whole(self, name: str) -> int:
        return max(self.bill.held(moment) for moment in self._moments(name))

    def _moments(self, name: str) -> list[Moment]:
        phase, _, role = name.partition("/")
        return [each for each in self.bill.moments if each.phase == phase and role in ("", each.role)]


def figures(found: Sequence[Compared]) -> list[Figure]:
    """Errors over all cases, then the bytes of every phase of every case."""
    errors = [abs(error) for each in found for error in each.errors.values()]
    resident = [abs(error) for each in found for error in each.resident_errors.values()]
    summary = [
        ("error of tensors, median", statistics.median(errors), "<= 0.05"),
        ("error of tensors, worst", max(errors), "<= 0.15"),
        ("error of resident memory, median", statistics.median(resident), None),
        ("error of resident memory, worst", max(resident), None),
        ("besides tensors, resident at rest", _framework(found) / MIB, None),
    ]
    listed = [
        Figure(
            name=name, value=value, unit="MiB" if "rest" in name else "share", spread=None, against=None, target=target
        )
        for name, value, target in summary
    ]
    for each in found:
        for phase in PHASES:
            pair = {"measured": each.measured.tensors[phase], "predicted": each.predicted(phase)}
            for what, size in pair.items():
                name = f"{each.case.name}: {phase} {what}"
                listed.append(Figure(name=name, value=size / MIB, unit="MiB", spread=None, against=None, target=None))
    return listed


def _framework(found: Sequence[Compared]) -> float:
    """Resident memory that is no tensor, while nothing is computed: the median over all cases."""
    return statistics.median(each.measured.resting - each.measured.tensors["save"] for each in found)


def asked(
    parser: argparse.ArgumentParser, cases: Sequence[Case], arguments: Sequence[str] | None
) -> tuple[argparse.Namespace, list[Case]]:
    """The options that measurements of the planner have, and the cases that they choose."""
    parser.add_argument("--case", action="append", metavar="TEXT", help="only cases whose name has this text")
    parser.add_argument("--dry", action="store_true", help="print the result instead of writing it")
    args = parser.parse_args(arguments)
    chosen = [case for case in cases if not args.case or any(text in case.name for text in args.case)]
    if not chosen:
        parser.error(f"--case {args.case}: none of {len(cases)} cases has that in its name")
    return args, chosen


def main(arguments: Sequence[str] | None = None) -> int:
    """Measure, then write or print the result."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks.planner", description=__doc__)
    args, cases = asked(parser, CASES, arguments)
    found = []
    with tempfile.TemporaryDirectory(prefix="fourfold-planner-") as name:
        for case in cases:
            measured = measure(case, Path(name))
            found.append(Compared(case, measured, predict(case, Path(name), measured.lengths)))
            said = ", ".join(f"{moment} {error:+.1%}" for moment, error in found[-1].errors.items())
            print(f"{case.name}: {said}", file=sys.stderr, flush=True)
    result = Result(
        name="planner",
        date=today(),
        hardware=hardware(),
        versions=versions(PACKAGES),
        commit=commit(),
        config={"planner": [case.name for case in cases]},
        figures=tuple(figures(found)),
    )
    print(result.model_dump_json(indent=2) if args.dry else write_result(result).relative_to(ROOT))
    return 0


if __name__ == "__main__":
    sys.exit(main())
