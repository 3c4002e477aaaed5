"""Write a configuration with every setting, what it means, what is allowed and its default."""

from __future__ import annotations

import argparse
from pathlib import Path


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Arguments of `fourfold init`."""
    parser.add_argument("path", nargs="?", default="fourfold.toml", type=Path, help="file to write (%(default)s)")
    parser.add_argument("--force", action="store_true", help="overwrite a file that is there")


def run(args: argparse.Namespace) -> int:
    """Write the template; a file that is there is kept unless --force is given."""
    from fourfold.config.template import commented_template
    from fourfold.files import write_atomically

    path: Path = args.path
    if path.is_dir():
        raise ValueError(f"{path} is a folder; give the name of a file, such as {path / 'fourfold.toml'}")
    if path.exists() and not args.force:
        raise ValueError(f"{path} is there already and was left as it is; give another name or --force")
    if not path.parent.is_dir():
        raise ValueError(f"{path}: there is no folder {path.parent}; make it first, or give another name")
    write_atomically(path, commented_template())
    print(f"{path} written: set model.path and the data files in it, then: fourfold run {path}")
    return 0
