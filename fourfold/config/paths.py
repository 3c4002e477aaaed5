"""Whether what a configuration points at is there: data files, models, folders, optional packages."""

from __future__ import annotations

import importlib.util
import os
from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING, NamedTuple

from fourfold.config.checks import DATASETS, TASK
from fourfold.config.checks.memory import trained

if TYPE_CHECKING:
    from fourfold.config.schema import DatasetSection, RunConfig

DATA_EXTENSIONS = (".jsonl", ".parquet", ".csv")


def missing_paths(config: RunConfig) -> list[str]:
    """Every path that cannot be used; hub ids are not looked up. Relative paths start at the current folder."""
    return [*_causal_model("model.path", config.model.path), *_datasets(config), *_roles(config), *_folders(config)]


def missing_packages(config: RunConfig) -> list[str]:
    """Every optional package that a setting asks for and that is not installed."""
    wanted = {name: f"tracking.trackers holds {name!r}" for name in config.tracking.trackers}
    if config.evaluation.judge == "vader" and config.data.prompts_test is not None:
        wanted["vaderSentiment"] = "evaluation.judge = 'vader'"
    low_bit = [f"{name}.optimizer = {s.optimizer!r}" for name, s in trained(config).items() if s.optimizer != "adamw"]
    away = config.reward.residency == "service"  # another process holds the reward model, and needs its packages
    for kind, package in (("nf4", "bitsandbytes"), ("int8", "torchao")):
        held_here = {name: str(held) for name, held in config.precision if name != "reward" or not away}
        given = [f"precision.{name} = {held!r}" for name, held in held_here.items() if held.startswith(kind)]
        if config.sampling.weights.startswith(kind) and "ppo" in config.stages:
            given.append(f"sampling.weights = {config.sampling.weights!r}")
        reasons = given + (low_bit if package == "bitsandbytes" else [])
        if reasons:
            wanted[package] = " and ".join(reasons)
    for key, given in config.reward.classifiers.items():
        if given.engine != "torch" and not away:
            because = f"{key}.engine = {given.engine!r} (the extra onnx)"
            wanted |= dict.fromkeys(("onnx", "onnxruntime", "onnxscript"), because)
    for name, part in config.reward.used_parts.items():
        if part.source == "verifiable" and "ppo" in config.stages:
            wanted["reasoning_gym"] = f"reward.parts.{name}.source = 'verifiable' (the extra reasoning-gym)"
    in_process = config.reference.engine != "torch" and config.reference.residency != "service"
    if in_process and "ppo" in config.stages:
        wanted["llama_cpp"] = f"reference.engine = {config.reference.engine!r} (the extra llama-cpp)"
    if config.sampling.engine.startswith("llama_cpp") and "ppo" in config.stages:
        wanted["llama_cpp"] = f"sampling.engine = {config.sampling.engine!r} (the extra llama-cpp)"
    hub = [f"data.{name}.path = {dataset.path!r}" for name, dataset in _given_datasets(config) if _is_hub(dataset.path)]
    if hub:
        wanted["datasets"] = f"{' and '.join(hub)}, read from the hub"
    return [
        f"{reason}, but the Python package {name} is not installed; try: pip install {name}"
        for name, reason in wanted.items()
        if importlib.util.find_spec(name) is None
    ]


def looks_local(path: str) -> bool:
    """Whether a name can only be a path: absolute, ~, ./ or ../, or with more than the one slash of a hub id."""
    return path.startswith(("/", "~", "./", "../")) or path.count("/") > 1 or path.endswith("/")


class InPackage(NamedTuple):
    """What 'package:MODULE/FILE' says, and the folders of that module; none: it is not installed."""

    module: str
    file: str
    folders: tuple[Path, ...]

    @classmethod
    def of(cls, path: str) -> InPackage:
        """Nothing is imported."""
        module, _, file = path.removeprefix("package:").partition("/")
        spec = importlib.util.find_spec(module) if module.isidentifier() else None
        return cls(module, file, tuple(map(Path, (spec and spec.submodule_search_locations) or ())))

    def found(self) -> Path | None:
        """The file, where one of the folders has it."""
        files = (folder / self.file for folder in self.folders if self.file)
        return next((file for file in files if file.is_file()), None)

    def others(self) -> str:
        """The .gguf files that there are beside it."""
        place = Path(self.file).parent
        return ", ".join(sorted(p.name for folder in self.folders for p in (folder / place).glob("*.gguf"))) or "none"


def _resolved(path: str) -> Path:
    return Path(path).expanduser()


def _causal_model(key: str, path: str) -> Iterator[str]:
    if path.startswith("package:"):
        named = InPackage.of(path)
        if not named.folders:
            yield (
                f"{key}: {path!r} needs the Python package {named.module!r}, which is not installed; install "
                "it, or name another model"
            )
        elif named.found() is None:
            folders = ", ".join(map(str, named.folders))
            yield f"{key}: {path!r}: no file {named.file!r} in {folders}; allowed: 'package:MODULE/FILE'"
    elif path.endswith(".gguf"):
        if not _resolved(path).is_file():
            yield f"{key}: no file {path!r} (from {os.getcwd()})"
    else:
        yield from _model_folder(key, path, " or a .gguf file")


def _model_folder(key: str, path: str, other: str = "") -> Iterator[str]:
    if looks_local(path) and not _resolved(path).is_dir():
        separator = "," if other else " or"
        yield f"{key}: no folder {path!r} (from {os.getcwd()}); allowed: a model folder{separator} a hub id{other}"
    elif _resolved(path).is_dir() and not (_resolved(path) / "config.json").is_file():
        yield f"{key}: the folder {path!r} holds no config.json; allowed: a folder written by save_pretrained"


def _given_datasets(config: RunConfig) -> Iterator[tuple[str, DatasetSection]]:
    for name in DATASETS:
        dataset = getattr(config.data, name)
        if dataset is not None:
            yield name, dataset


def _is_hub(path: str) -> bool:
    """Whether a data path is a `datasets` id with its split, such as 'imdb:train'."""
    name, _, split = path.partition(":")
    if path.startswith(TASK):
        return False
    return bool(name and split) and not (_is_data_file(path) or looks_local(path) or _resolved(path).exists())


def _is_data_file(path: str) -> bool:
    return Path(path).suffix.lower() in DATA_EXTENSIONS


def _datasets(config: RunConfig) -> Iterator[str]:
    for name, dataset in _given_datasets(config):
        path = dataset.path
        if path.startswith(TASK):
            continue
        if _is_data_file(path):
            if not _resolved(path).is_file():
                yield f"data.{name}.path: no file {path!r} (from {os.getcwd()})"
        elif not _is_hub(path):
            yield (
                f"data.{name}.path: {path!r}; allowed: files that end in {', '.join(DATA_EXTENSIONS)}, or a hub id "
                "with its split, such as 'imdb:train'"
            )


def _roles(config: RunConfig) -> Iterator[str]:
    if config.sft.checkpoint and not _resolved(config.sft.checkpoint).is_dir():
        yield f"sft.checkpoint: no folder {config.sft.checkpoint!r} (from {os.getcwd()})"
    reward = config.reward
    if reward.stored and not _resolved(reward.stored).is_dir():
        yield f"{reward.stored_key}: no folder {reward.stored!r} (from {os.getcwd()})"
    for key, given in reward.classifiers.items():
        yield from _model_folder(f"{key}.model", given.model)
    if config.reference.checkpoint and not _resolved(config.reference.checkpoint).is_dir():
        yield f"reference.checkpoint: no folder {config.reference.checkpoint!r} (from {os.getcwd()})"
    if config.reference.model:
        yield from _causal_model("reference.model", config.reference.model)
    if config.critic.model:
        yield from _causal_model("critic.model", config.critic.model)


def _folders(config: RunConfig) -> Iterator[str]:
    """Folders that the run writes: the nearest one that exists must be a folder that we may write to."""
    folders = {"output": config.output}
    reward = config.reward
    exports = reward.residency != "service" and any(each.engine != "torch" for each in reward.classifiers.values())
    named = (config.model.path, config.reference.model, config.critic.model)
    if exports or any(path.endswith(".gguf") for path in named):
        folders["model.cache"] = config.model.cache
    for key, path in folders.items():
        folder = _resolved(path).absolute()
        while not folder.exists() and folder != folder.parent:
            folder = folder.parent
        if not folder.is_dir():
            yield f"{key}: {path!r} cannot be made, because {str(folder)!r} is not a folder"
        elif not os.access(folder, os.W_OK | os.X_OK):
            yield f"{key}: {path!r} cannot be made, because {str(folder)!r} may not be written to"
