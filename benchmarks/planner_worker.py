"""One measured run of benchmarks/planner.py and planner_time.py, in a process of its own: bytes and seconds.

Takes a number of PPO steps, reads a configuration (JSON) from standard input, and prints a JSON object: bytes by
moment, as resident memory and (with memory.count_tensors) tensor by tensor, seconds of each step's phases, and the
lengths that were drawn.
"""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any

import torch

from fourfold.config.loading import parse_config
from fourfold.config.schema import RunConfig
from fourfold.data.records import read_prompts
from fourfold.data.tokenize import encode_prompts
from fourfold.memory.budget import give_back
from fourfold.memory.meter import PhaseMeter, Span
from fourfold.models.assembly import assemble
from fourfold.models.loading import device_of, load_base
from fourfold.training.pipeline import prepare
from fourfold.training.ppo import build_trainer, check_trained_gradients, reward_source


def main() -> int:
    """Measure and print."""
    print(json.dumps(measured(parse_config(json.load(sys.stdin), "the benchmark"), steps=int(sys.argv[1]))))
    return 0


def measured(config: RunConfig, steps: int) -> dict[str, Any]:
    """Bytes of the moments of `steps` PPO steps and of a checkpoint, and seconds of the steps' phases."""
    config, folder = prepare(config), Path(config.output)
    device = device_of(config)
    meter = PhaseMeter(device, count_tensors=config.memory.count_tensors)
    with meter.phase("load"):
        base = load_base(config)
        models = assemble(config, base, None, Path(config.reward.checkpoint) if config.reward.of_the_base else None)
    reward, section = reward_source(config, models), config.data.prompts
    assert section is not None, "the benchmark gives it"
    prompts, _ = encode_prompts(
        base.tokenizer, read_prompts(section), max_tokens=config.data.max_prompt_tokens, truncation="error"
    )
    trainer = build_trainer(config, models, reward, prompts, [], folder / "ppo", meter)
    trainer.check()
    check_trained_gradients(models)
    spans = meter.take_spans()
    spans = [span for span in spans if span.phase == "load"]
    give_back()
    resting = meter.current_bytes()
    rows = [trainer.step() for _ in range(steps)]
    trainer.save(is_best=False)
    spans += meter.take_spans()
    for tracker in trainer.trackers:
        tracker.close()
    return {
        "tensors": {moment(span): span.tensor_peak_bytes for span in spans},
        "resident": {moment(span): span.peak_bytes for span in spans},
        "resting": resting,
        "seconds": {phase: [row[f"{phase}_seconds"] for row in rows] for phase in ("generate", "score", "learn")},
        "response_length_mean": [row["response_length_mean"] for row in rows],
        "response_length_max": [row["response_length_max"] for row in rows],
        "torch": torch.__version__,
    }


def moment(span: Span) -> str:
    """As the planner writes it."""
    return f"{span.phase}/{span.role}" if span.role else span.phase


if __name__ == "__main__":
    sys.exit(main())
