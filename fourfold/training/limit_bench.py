"""`fourfold bench limit`: PPO steps of a configuration beside the time that an ideal program would need for them.

The steps are real ones, of the run's own models and prompts; where no reward model has been trained yet, one with a
random head does the same work. The rates of products and memory are measured afterwards in the same process, at the
shapes that the steps have (fourfold.planner.limit has the formula).
"""

from __future__ import annotations

import statistics
import tempfile
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import torch
from rich.box import SIMPLE_HEAD
from rich.table import Table

from fourfold.config.schema import CurriculumSection, RunConfig
from fourfold.diagnostics.machine import best_seconds, copy_rate, multiplied, product, read_rate
from fourfold.memory.meter import PhaseMeter
from fourfold.models.assembly import assemble, record_for
from fourfold.models.loading import Base, device_of, load_base
from fourfold.models.storage import save_role
from fourfold.planner.architectures import Architecture
from fourfold.planner.costs import WORKING
from fourfold.planner.hardware.machine import Cluster, Device, Node
from fourfold.planner.limit import Limit, Product, Rates, limits, products_of
from fourfold.planner.request import architectures_of
from fourfold.planner.scene import Lengths, Scene
from fourfold.planner.units import quantity, seconds, size
from fourfold.rollout.sampler import PromptBatch
from fourfold.training.folder import RunFolder, sft_model
from fourfold.training.inputs import encode_inputs, read_records
from fourfold.training.pipeline import prepare
from fourfold.training.ppo import build_trainer, reward_source

# For each shape: there are dozens, and the best repetition counts.
PRODUCT_SECONDS = 0.1
WHOLE_STEP = "step"
Say = Callable[[str], None]
Row = Mapping[str, float]


@dataclass(frozen=True)
class Line:
    """A phase of a step, or the whole: medians over the steps, and the limit."""

    phase: str
    seconds: float
    least_seconds: float
    greatest_seconds: float
    peak_bytes: int
    flops: float  # that the algorithm needs: without what checkpointing computes again
    bytes: float  # that no program can leave unmoved
    product_seconds: float
    memory_seconds: float
    limit_seconds: float
    share_of_limit: float  # limit_seconds / seconds
    mfu: float  # FLOPs / (seconds x the best rate of the trained roles' type)


@dataclass(frozen=True)
class Report:
    """What was measured in one process."""

    model: str
    compute: str
    steps: int
    threads: int
    prompt_tokens: float  # mean of a row
    response_tokens: float  # mean of a step
    tokens_per_second: float  # response tokens
    episodes_per_second: float
    bandwidth: float  # bytes/s
    products: tuple[tuple[Product, float], ...]  # with FLOP/s
    lines: tuple[Line, ...]

    def as_dict(self) -> dict[str, Any]:
        """For JSON."""
        return asdict(self)


def bench_limit(config: RunConfig, steps: int, say: Say) -> Report:
    """Measure `steps` PPO steps after one that warms up, then the machine; nothing is left in the run's folder."""
    with tempfile.TemporaryDirectory(prefix="fourfold-limit-") as name:
        return _bench(config, steps, Path(name), say)


def _bench(config: RunConfig, steps: int, folder: Path, say: Say) -> Report:
    sft = sft_model(config, RunFolder(Path(config.output).expanduser()))
    base, config, reward = _prepared(config, steps, folder, say)
    inputs = encode_inputs(config, base, read_records(config), say)
    meter = PhaseMeter(device_of(config))
    models = assemble(config, base, sft, reward)
    trainer = build_trainer(config, models, reward_source(config, models), inputs.prompts, [], folder / "ppo", meter)
    rows: list[Row] = []
    for number in range(1 + steps):
        rows.append(trainer.step())
        say(f"step {number + 1} of {1 + steps}: {seconds(rows[-1]['step_seconds'])}{'' if number else ', warms up'}")
    for tracker in trainer.trackers:
        tracker.close()
    rows = rows[1:]
    lengths = _lengths([trainer.prompts.batch(1 + number) for number in range(steps)], rows)
    device = device_of(config)
    scene = _scene(config, Architecture.from_config(base.config.to_dict()), device, lengths)
    say(f"measuring {len(products_of(scene))} shapes of products, and memory")
    rates = measure_rates(products_of(scene), device)
    return _report(config, scene, rates, rows)


def _prepared(config: RunConfig, steps: int, folder: Path, say: Say) -> tuple[Base, RunConfig, Path | None]:
    """The base, settings of a stage ppo alone in a folder of its own, and where its reward model is."""
    trained = RunFolder(Path(config.output).expanduser())
    changes: dict[str, Any] = {
        "output": str(folder),
        "stages": ("ppo",),
        "ppo": config.ppo.model_copy(update={"steps": 1 + steps}),
        "data": config.data.model_copy(update={"prompts_test": None}),
        "curriculum": CurriculumSection(),  # the whole size from the first step on
        "tracking": config.tracking.model_copy(update={"trackers": ()}),
    }
    reward = Path(config.reward.stored).expanduser() if config.reward.stored else None
    random_head = config.reward.trains and trained.finished("reward") is None
    if config.reward.trains:
        reward = folder / "reward" if random_head else trained.model("reward")
        changes["reward"] = config.reward.with_stored(str(reward))
    if random_head:
        (folder / "reward").mkdir()
    config = prepare(config.model_copy(update=changes))
    base = load_base(config)
    if random_head:
        say("reward: no model has been trained yet; one with a random head does the same work")
        _store_random_scorer(config, base, folder / "reward")
    return base, config, reward


def _store_random_scorer(config: RunConfig, base: Base, folder: Path) -> None:
    scorer = base.new_scorer()
    with torch.no_grad():
        scorer.head.linear.weight.normal_(std=0.02)
    save_role(folder, scorer, record_for(config, "scorer"))


def _lengths(drawn_from: Iterable[PromptBatch], rows: Sequence[Row]) -> Lengths:
    """Of the steps that count."""
    prompts = [len(tokens) for batch in drawn_from for tokens in batch.tokens]
    mean = statistics.mean(row["response_length_mean"] for row in rows)
    return Lengths(max(prompts), round(max(row["response_length_max"] for row in rows)), statistics.mean(prompts), mean)


def _scene(config: RunConfig, base: Architecture, device: torch.device, lengths: Lengths) -> Scene:
    """What was run, for the planner; the rates of this device are measured for its products alone."""
    assert device.type in ("cuda", "cpu"), device
    flops = dict.fromkeys({config.precision.compute, *multiplied(device)}, 1.0)
    cluster = Cluster(Node(Device("this machine", "cuda" if device.type == "cuda" else "cpu", 0, 1.0, flops)))
    others = config.reference.model or config.reward.classifiers
    models = (architectures_of(config)[0] if others else {}) | {"base": base}
    return Scene(config, models, cluster, lengths)


def measure_rates(products: Iterable[Product], device: torch.device) -> Rates:
    """FLOP/s of each product and bytes/s of memory: the greater rate of a copy and of a sum."""
    found: dict[Product, float] = {}
    for one in sorted(products):
        taken = best_seconds(product(device, *one), device, PRODUCT_SECONDS)
        found[one] = 2 * one.rows * one.inputs * one.outputs / taken
    return Rates(found, max(copy_rate(device), read_rate(device)))


def _report(config: RunConfig, scene: Scene, rates: Rates, rows: Sequence[Row]) -> Report:
    best, fastest = rates.best(scene.compute), limits(scene, rates)
    lines = [_line(phase, rows, fastest[phase], best) for phase in WORKING]
    whole = fastest["generate"] + fastest["score"] + fastest["learn"]
    lines.append(_line(WHOLE_STEP, rows, whole, best))
    step, episodes = lines[-1].seconds, config.ppo.rollout_batch_size
    return Report(
        model=config.model.path,
        compute=scene.compute,
        steps=len(rows),
        threads=torch.get_num_threads(),
        prompt_tokens=scene.lengths.mean_prompt,
        response_tokens=scene.lengths.mean_response * episodes,
        tokens_per_second=scene.lengths.mean_response * episodes / step,
        episodes_per_second=episodes / step,
        bandwidth=rates.bandwidth,
        products=tuple((one, rate) for one, rate in rates.products.items()),
        lines=tuple(lines),
    )


def _line(phase: str, rows: Sequence[Row], limit: Limit, best: float) -> Line:
    def taken(row: Row) -> float:
        return sum(row[f"{each}_seconds"] for each in (WORKING if phase == WHOLE_STEP else (phase,)))

    spent = [taken(row) for row in rows]
    peaks = [row[f"{each}_peak_bytes"] for row in rows for each in (WORKING if phase == WHOLE_STEP else (phase,))]
    median = statistics.median(spent)
    return Line(
        phase=phase,
        seconds=median,
        least_seconds=min(spent),
        greatest_seconds=max(spent),
        peak_bytes=round(max(peaks)),
        flops=limit.flops,
        bytes=limit.bytes,
        product_seconds=limit.product_seconds,
        memory_seconds=limit.memory_seconds,
        limit_seconds=limit.seconds,
        share_of_limit=limit.seconds / median,
        mfu=limit.flops / (median * best),
    )


def table(report: Report) -> Table:
    """The report for people."""
    title = (
        f"{report.model}, {report.compute}, {report.threads} threads: {report.response_tokens:,.0f} response tokens a "
        f"step, {report.tokens_per_second:,.1f} tokens/s, {report.episodes_per_second:,.2f} episodes/s"
    )
    best = max(rate for one, rate in report.products if one.dtype == report.compute)
    caption = f"measured: {quantity(best)}FLOP/s at best in {report.compute}, {quantity(report.bandwidth)}B/s of memory"
    made = Table(title=title, caption=caption, box=SIMPLE_HEAD)
    made.add_column("phase", no_wrap=True)
    for column in ("seconds", "limit", "share", "MFU", "FLOPs", "waits for", "peak"):
        made.add_column(column, justify="right", no_wrap=True)
    for line in report.lines:
        bound = "products" if line.product_seconds >= line.memory_seconds else "memory"
        made.add_row(
            line.phase,
            seconds(line.seconds),
            seconds(line.limit_seconds),
            f"{line.share_of_limit:.0%}",
            f"{line.mfu:.0%}",
            quantity(line.flops),
            bound,
            size(line.peak_bytes),
        )
    return made
