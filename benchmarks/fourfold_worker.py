"""Fourfold's side of a comparison: PPO steps with a reward model of random head, in a process of its own."""

from __future__ import annotations

import base64
import sys
import tempfile
from collections.abc import Sequence
from importlib.metadata import version
from pathlib import Path

import torch
from torch import Tensor, nn

from benchmarks.replay import Replay
from benchmarks.service import free_address, serving
from benchmarks.worker import PHASES, WorkerReport, peak_rss_mib, worker_parser
from fourfold.config.loading import apply_override, parse_config
from fourfold.config.schema import RunConfig
from fourfold.data.records import read_prompts
from fourfold.data.tokenize import encode_prompts
from fourfold.diagnostics.tables import role_rows
from fourfold.memory.meter import PhaseMeter
from fourfold.memory.quantization import quiet_imports
from fourfold.models.assembly import FourModels, assemble, record_for
from fourfold.models.loading import Base, device_of, load_base, resolve_model
from fourfold.models.roles import checksum
from fourfold.models.storage import save_role
from fourfold.training.pipeline import prepare
from fourfold.training.ppo import build_trainer, reward_source
from fourfold.training.trainer import Trainer

# Numbers that a sample of all weights holds: a ratio of two norms is then off by about 1 %.
SAMPLE = 50_000


def settings(args, folder: Path) -> RunConfig:
    """The configuration that does the work of the arguments."""
    tree = {
        "output": str(folder / "run"),
        "seed": args.seed,
        "stages": ["ppo"],
        "model": {"path": args.model},
        "sharing": {"mode": args.sharing},
        "precision": {"compute": args.dtype},
        "system": {"device": args.device, "threads": args.threads},
        "data": {"prompts": {"path": args.prompts}},
        "reward": {"source": "checkpoint", "checkpoint": str(folder / "reward")},
        "sampling": {"max_new_tokens": args.new_tokens},
        "critic": {"learning_rate": 1e-5},
        "ppo": {
            "steps": args.updates,
            "rollout_batch_size": args.batch,
            "mini_batch_size": args.batch,
            "micro_batch_size": args.micro_batch,
            "num_epochs": args.epochs,
            "learning_rate": 1e-5,
        },
    }
    for override in args.set:
        apply_override(tree, override)
    if tree["reward"]["source"] == "model":
        del tree["reward"]["checkpoint"]
        tree["reward"]["model"] = str(folder / "judge")
    if "service" in (tree[role].get("residency") for role in ("reference", "reward") if role in tree):
        tree["service"] = {"url": free_address()}
    return parse_config(tree, "the benchmark")


def store_reward_model(config: RunConfig, base: Base, folder: Path) -> None:
    """A reward model on the base's own layers with a small random head: the work is that of a trained one."""
    scorer = base.new_scorer()
    with torch.no_grad():
        scorer.head.linear.weight.normal_(std=0.02)
    save_role(folder, scorer, record_for(config, "scorer"))


def store_judge(config: RunConfig, folder: Path) -> None:
    """A text classifier on a copy of the whole base, with a random head: the work is that of a trained one."""
    quiet_imports()
    from transformers import AutoModelForSequenceClassification, AutoTokenizer

    place = resolve_model(config.model.path, Path(config.model.cache))
    torch.manual_seed(0)
    judge = AutoModelForSequenceClassification.from_pretrained(
        place, num_labels=1, dtype=torch.float32, use_safetensors=True, trust_remote_code=False
    )
    tokenizer = AutoTokenizer.from_pretrained(place, trust_remote_code=False)
    judge.config.pad_token_id = tokenizer.eos_token_id if tokenizer.pad_token_id is None else tokenizer.pad_token_id
    judge.save_pretrained(folder)
    tokenizer.save_pretrained(folder)


def main(arguments: list[str] | None = None) -> int:
    """Run the updates and print the report."""
    parser = worker_parser(__doc__ or "")
    parser.add_argument("--sharing", choices=("trunk", "adapters", "none"), required=True)
    parser.add_argument("--device", choices=("cpu", "cuda"), default="cpu")
    parser.add_argument("--set", action="append", default=[], help="KEY=VALUE, as `fourfold run --set`")
    parser.add_argument(
        "--responses",
        metavar="NAME",
        help="file beside the prompts; the first update learns from its responses, which the first worker draws",
    )
    args = parser.parse_args(arguments)
    with tempfile.TemporaryDirectory(prefix="fourfold-worker-") as name:
        folder = Path(name)
        (folder / "reward").mkdir()  # which the settings name before there is anything in it
        config = settings(args, folder)
        if config.reward.source == "model":
            store_judge(config, folder / "judge")
        config = prepare(config)
        base = load_base(config)
        if config.reward.of_the_base:
            store_reward_model(config, base, folder / "reward")
        with serving(config, folder) as service:
            found = work(args, config, base, folder)
            if service is not None:
                found = found.model_copy(update={"service_peak_mib": peak_rss_mib(service)})
        print(found.model_dump_json())
    return 0


def work(args, config: RunConfig, base: Base, folder: Path) -> WorkerReport:
    """Four models, and all updates."""
    models = assemble(config, base, None, folder / "reward" if config.reward.of_the_base else None)
    section = config.data.prompts
    assert section is not None, "settings() has given it"
    prompts, _ = encode_prompts(
        base.tokenizer, read_prompts(section), max_tokens=args.prompt_tokens, truncation="error"
    )
    loading_mib = peak_mib(args.device)  # before the meter: it resets the peak at every phase
    meter = PhaseMeter(device_of(config))
    trainer = build_trainer(config, models, reward_source(config, models), prompts, [], folder / "ppo", meter)
    resident = {row.model: row.resident_bytes / 2**20 for row in role_rows(models)}
    start = sampled_weights([models.actor, models.critic])
    first, gap = first_update(trainer, Path(args.prompts).with_name(args.responses) if args.responses else None)
    moved = sampled_weights([models.actor, models.critic]) - start
    rows = [first, *(trainer.step() for _ in range(1, args.updates))]
    for tracker in trainer.trackers:
        tracker.close()
    found = report(args, config, models, rows)
    more = {
        "peak_rss_mib": max(loading_mib, found.peak_rss_mib),
        "resident_mib": resident,
        "weights": checksum([models.actor, models.critic]),
        "moved": base64.b64encode(moved.numpy().tobytes()).decode(),
        "log_prob_gap": gap,
    }
    return found.model_copy(update=more)


def first_update(trainer: Trainer, responses: Path | None) -> tuple[dict[str, float], float]:
    """The row of the first update, from the responses in the file where one is named, and their log-prob gap."""
    if responses is None:
        return trainer.step(), 0.0
    sampler, replay = trainer.sampler, Replay(trainer, responses)
    trainer.sampler = replay
    row = trainer.step()
    trainer.sampler = sampler
    return row, replay.log_prob_gap


def sampled_weights(roles: Sequence[nn.Module]) -> Tensor:
    """Up to SAMPLE numbers of the trained weights, always from the same places."""
    trained = [p.detach().flatten() for role in roles for p in role.parameters() if p.requires_grad]
    total = sum(len(weight) for weight in trained)
    places = torch.arange(total)
    if total > SAMPLE:
        places = torch.randint(total, (SAMPLE,), generator=torch.Generator().manual_seed(0))
    found, start = [], 0
    for weight in trained:
        inside = places[(places >= start) & (places < start + len(weight))]
        found.append(weight[inside - start].float())
        start += len(weight)
    return torch.cat(found)


def peak_mib(device: str) -> float:
    """Highest resident memory of the process, or what torch has allocated of a GPU at most."""
    return peak_rss_mib() if device == "cpu" else torch.cuda.max_memory_allocated() / 2**20


def report(args, config: RunConfig, models: FourModels, rows: list[dict[str, float]]) -> WorkerReport:
    """The rows as the comparison wants them."""
    steady = rows[1:]
    peaks = {phase: max(row[f"{phase}_peak_bytes"] for row in rows) / 2**20 for phase in PHASES}
    trained = {"actor": models.actor, "critic": models.critic}
    own = models.actor.branch.num_layers
    sharing = "four separate models, actor and critic trained in full"
    if config.sharing.mode == "adapters":
        sharing = f"one frozen base, actor and critic train adapters of rank {config.adapters.rank} on {own} layers"
    elif models.base.trunk is not None:
        sharing = f"a frozen trunk of {models.base.trunk.num_layers} layers, actor and critic train the {own} above it"
    tokens = [round(row["response_length_mean"] * args.batch) for row in rows]
    return WorkerReport(
        what=f"Fourfold: {sharing}, float32 masters",
        dtype=config.precision.compute,
        trainable_parameters={
            name: sum(p.numel() for p in role.parameters() if p.requires_grad) for name, role in trained.items()
        },
        seconds_per_update=[row["step_seconds"] for row in rows],
        response_tokens_per_update=tokens,
        peak_rss_mib=max(peak_mib(args.device), *peaks.values()),
        phase_peak_mib=peaks,
        phases={phase: sum(row[f"{phase}_seconds"] for row in steady) / len(steady) for phase in PHASES},
        versions={name: version(name) for name in ("torch", "transformers")},
        threads=torch.get_num_threads(),
    )


if __name__ == "__main__":
    sys.exit(main())
