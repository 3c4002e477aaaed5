"""Tiny runs of which every part can be seen: what one setting changes is an observation of one of them."""

from __future__ import annotations

import contextlib
import copy
import io
import json
import tempfile
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file
from torch import Tensor, nn

from fourfold.backends.local import LocalOptimizer
from fourfold.cli.run import show
from fourfold.config import RunConfig, dump_toml
from fourfold.config.checks import DATASETS
from fourfold.diagnostics.tables import role_rows
from fourfold.errors import RunFailed
from fourfold.memory.meter import PhaseMeter
from fourfold.models.adapters import adapter_parameters
from fourfold.models.assembly import assemble
from fourfold.models.loading import Base, load_base
from fourfold.training.folder import RunFolder
from fourfold.training.inputs import Inputs, encode_inputs, read_records
from fourfold.training.pipeline import prepare, resolve
from fourfold.training.ppo import build_trainer, reward_source
from fourfold.training.reward_model import train_reward
from fourfold.training.supervised import train_sft
from fourfold.training.texts import TextCache
from fourfold.training.trainer import Trainer
from tiny import tiny_classifier, tiny_directory
from training.runs import Tree, by_function, make_config, merged, settings

SMALL: Tree = {
    "data": {name: {"max_rows": 8} for name in DATASETS} | {"max_text_tokens": 12, "max_prompt_tokens": 6},
    "sft": {"learning_rate": 1e-2, "batch_size": 4, "micro_batch_size": 4, "num_epochs": 2},
    "critic": {"learning_rate": 1e-2},
    "sampling": {"max_new_tokens": 4},
    "checkpoint": {"stage_every": 100},
}
PPO: Tree = {
    "learning_rate": 1e-2, "steps": 2, "rollout_batch_size": 4, "mini_batch_size": 2, "micro_batch_size": 2,
    "num_epochs": 1,
}  # fmt: skip
STAGES: dict[str, Tree] = {
    "all": {},
    "sft": {"stages": ["sft"]},
    "reward": {"stages": ["reward"], "reward": {"learning_rate": 1e-2, "batch_size": 4, "num_epochs": 2}},
    "ppo": by_function("pays_by_hash", **PPO),
}


def fails_every_other_time(prompts: list[str], responses: list[str]) -> list[float]:
    """A reward function that answers when it is asked again."""
    asked.append(None)
    if len(asked) % 2:
        raise ConnectionError("try again")
    return [0.0] * len(responses)


asked: list[None] = []


@dataclass
class Outcome:
    """What a few steps leave behind."""

    rows: list[dict[str, float]] = field(default_factory=list)
    weights: dict[str, Tensor] = field(default_factory=dict)
    files: list[str] = field(default_factory=list)
    backward_passes: int = 0


class Rows:
    """A tracker that keeps every row with its kind."""

    def __init__(self) -> None:
        self.rows: list[dict[str, Any]] = []

    def log(self, row: Any, kind: str) -> None:
        """Keep it."""
        self.rows.append({"kind": kind, **row})

    def close(self) -> None:
        """Nothing is open."""


class Scene:
    """A tiny model and data, and what settings act on; each configuration runs once."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.tree = settings(folder, SMALL)
        self._known: dict[Any, Any] = {}
        self._newest = self.folder
        rows = [{"text": "a b", "prompt": "a", "chosen": " c", "rejected": " d", "other": f" e {i}"} for i in range(8)]
        tiny_directory(folder / "other", layers=3, seed=5)
        tiny_classifier(folder / "classifier", labels=("BAD", "GOOD"), seed=3)
        (folder / "wide.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))

    def config(self, stage: str, changes: dict[str, Any]) -> RunConfig:
        """The small run of a stage with some settings changed."""
        tree = merged(self.tree, STAGES[stage])
        for key, value in changes.items():
            given: Any = value.replace("FOLDER", str(self.folder)) if isinstance(value, str) else value
            for part in reversed(key.split(".")):
                given = {part: given}
            tree = merged(tree, given)
        return make_config(tree)

    def once(self, key: Any, work: Callable[[], Any]) -> Any:
        """What `work` gave when it was asked for first."""
        if key not in self._known:
            self._known[key] = work()
        return self._known[key]

    def new_folder(self) -> Path:
        """An empty folder."""
        self._newest = Path(tempfile.mkdtemp(dir=self.folder))  # scenes that follow each other share the folder
        return self._newest

    def base(self, config: RunConfig) -> Base:
        """The model as the settings cut it, for one use."""
        adapters = config.adapters.model_dump_json()
        parts = (
            config.sharing.mode,
            config.trunk.branch_layers,
            config.trunk.train,
            adapters,
            config.precision.compute,
            config.precision.frozen,
            config.memory.attention,
        )
        base = self.once((*parts, config.sampling.extra_eos_token_ids), lambda: load_base(config))
        return replace(base, policy=copy.deepcopy(base.policy))

    def inputs(self, config: RunConfig) -> Inputs:
        """Token ids of what the stages read."""
        return encode_inputs(config, self.base(config), read_records(config), lambda line: None)

    def trainer(self, config: RunConfig) -> Trainer:
        """The trainer before its first step; its critic's head is not zero, so that values differ."""
        config = resolve(config)
        models = assemble(config, self.base(config), None, None)
        with torch.no_grad():
            models.critic.head.linear.weight.normal_(std=0.1, generator=torch.Generator().manual_seed(0))
        inputs, meter = self.inputs(config), PhaseMeter(torch.device("cpu"))
        reward, folder = reward_source(config, models), self.new_folder()
        trainer = build_trainer(config, models, reward, inputs.prompts, inputs.prompts_test, folder, meter)
        for tracker in trainer.trackers:
            tracker.close()
        trainer.trackers = [Rows()]
        return trainer

    def ppo(self, config: RunConfig) -> Outcome:
        """The steps of PPO, without evaluations and checkpoints."""

        def work() -> Outcome:
            trainer, outcome = self.trainer(config), Outcome()
            with counted(LocalOptimizer, "backward") as passes:
                outcome.rows = [trainer.step() for _ in range(config.ppo.steps)]
            outcome.backward_passes = len(passes)
            for name, role in (("actor", trainer.models.actor), ("critic", trainer.models.critic)):
                outcome.weights[name] = nn.utils.parameters_to_vector(role.branch.parameters()).detach()
            return outcome

        return self.once(("ppo", dump_toml(config)), work)

    def supervised(self, config: RunConfig) -> Outcome:
        """The stage sft or reward."""

        def work() -> Outcome:
            base, inputs, folder = self.base(config), self.inputs(config), self.new_folder()
            cache = TextCache(base)
            with counted(LocalOptimizer, "backward") as passes:
                if "sft" in config.stages:
                    train_sft(config, base, cache, inputs.texts, [], folder, lambda line: None)
                else:
                    train_reward(config, base, cache, inputs.pairs, [], inputs.texts, None, folder, lambda line: None)
            stored = load_file(folder / "model" / "model.safetensors")
            weights = {"role": torch.cat([tensor.flatten().float() for _, tensor in sorted(stored.items())])}
            files = sorted(path.name for path in (folder / "checkpoints").glob("step-*"))
            return Outcome([], weights, files, len(passes))

        return self.once((*config.stages, dump_toml(config)), work)

    def whole_ppo(self, config: RunConfig) -> Outcome:
        """The steps of PPO with evaluations and checkpoints."""
        trainer = self.trainer(config)
        checkpoints = self._newest / "checkpoints"
        trainer.run()
        [tracker] = trainer.trackers
        assert isinstance(tracker, Rows)
        return Outcome(tracker.rows, files=sorted(path.name for path in checkpoints.glob("step-*")))


@contextlib.contextmanager
def counted(owner: Any, name: str) -> Iterator[list[None]]:
    """Within, every call of a method leaves an item."""
    calls: list[None] = []
    real = getattr(owner, name)

    def call(*args: Any, **kwargs: Any) -> Any:
        calls.append(None)
        return real(*args, **kwargs)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(owner, name, call)
        yield calls


See = Callable[[Scene, RunConfig], Any]


def metric(name: str) -> See:
    """A metric of the steps."""
    return lambda scene, config: [row.get(name, 0.0) for row in scene.ppo(config).rows]


def weights(role: str) -> See:
    """The weights at the end: of actor or critic after PPO, of the stage's own role after sft and reward."""
    if role == "role":
        return lambda scene, config: scene.supervised(config).weights[role]
    return lambda scene, config: scene.ppo(config).weights[role]


def records(name: str) -> See:
    """The rows of a data set."""
    return lambda scene, config: getattr(read_records(config), name)


def tokens(name: str) -> See:
    """The token ids of a data set."""
    return lambda scene, config: getattr(scene.inputs(config), name)


def supervised_passes(scene: Scene, config: RunConfig) -> int:
    return scene.supervised(config).backward_passes


def ppo_passes(scene: Scene, config: RunConfig) -> int:
    return scene.ppo(config).backward_passes


def prompts(scene: Scene, config: RunConfig) -> list[int]:
    return list(scene.trainer(config).prompts.batch(0).prompt_ids)


def evaluated_prompts(scene: Scene, config: RunConfig) -> int:
    batch = scene.trainer(config).evaluation_prompts
    assert batch is not None
    return len(batch.tokens)


def evaluations(scene: Scene, config: RunConfig) -> int:
    return sum(row["kind"] == "evaluation" for row in scene.whole_ppo(config).rows)


def checkpoints(scene: Scene, config: RunConfig) -> list[str]:
    return scene.whole_ppo(config).files


def stage_checkpoints(scene: Scene, config: RunConfig) -> list[str]:
    return scene.supervised(config).files


def trunk_layers(scene: Scene, config: RunConfig) -> int:
    trunk = scene.base(config).trunk
    return 0 if trunk is None else trunk.num_layers


def adapter_sizes(scene: Scene, config: RunConfig) -> list[int]:
    return [p.numel() for p in adapter_parameters(scene.base(config).policy.branch)]


def compute_type(scene: Scene, config: RunConfig) -> torch.dtype:
    return scene.base(config).policy.branch.compute_dtype


def types_held(scene: Scene, config: RunConfig) -> dict[str, str]:
    return {row.model: row.dtype for row in role_rows(scene.trainer(config).models)}


def attention_kernel(scene: Scene, config: RunConfig) -> str | None:
    return scene.base(config).policy.branch.body.config._attn_implementation


def threads(scene: Scene, config: RunConfig) -> int:
    before = torch.get_num_threads()
    prepare(config)
    found = torch.get_num_threads()
    torch.set_num_threads(before)
    return found


def sampling_passes(scene: Scene, config: RunConfig) -> int:
    trainer = scene.trainer(config)
    trunk = trainer.models.base.trunk
    assert trunk is not None
    with counted(type(trunk), "forward") as passes:
        trainer.sampler.generate(trainer.prompts.batch(0), policy_version=0)
    return len(passes)


def what_a_failing_function_leads_to(scene: Scene, config: RunConfig) -> str:
    asked.clear()
    try:
        scene.trainer(config).step()
    except RunFailed as error:
        return str(error)
    return "scored"


def judged(scene: Scene, config: RunConfig) -> list[str]:
    return sorted(scene.trainer(config).evaluate().metrics)


def kept_files(scene: Scene, config: RunConfig) -> list[int]:
    trainer = scene.trainer(config)
    trainer.evaluate()
    return trainer.kept.held_out_files.steps()


def samples_shown(scene: Scene, config: RunConfig) -> int:
    folder = RunFolder(scene.new_folder())
    numbers = dict.fromkeys(("score_mean", "kl_per_sequence", "distinct_2", "mean_length", "eos_share"), 1.0)
    texts = {"prompts": ["p"] * 8, "responses": [f"response-{i}" for i in range(8)]}
    for name in ("before", "after"):
        folder.write_json(f"ppo/{name}.json", {"metrics": numbers, **texts})
    summary = {"stages": {}, "seconds": {}, "before": numbers, "after": numbers}
    with contextlib.redirect_stdout(io.StringIO()) as printed:
        show(config.model_copy(update={"output": str(folder.root)}), summary, "my.toml")
    return printed.getvalue().count("response-") // 2
