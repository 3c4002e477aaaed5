"""`fourfold COMMAND`: finds the command's module, parses, runs, and turns errors into exit codes.

Only the module of the command that is asked for is imported, so that help comes at once.
"""

from __future__ import annotations

import argparse
import difflib
import importlib
import os
import sys
from collections.abc import Sequence
from types import ModuleType

from fourfold.cli import errors

# Command: what `fourfold --help` says of it. The module is fourfold.cli.<command>.
COMMANDS = {
    "init": "write a commented configuration to start from",
    "data": "make a data set ready, such as the movie reviews of the example",
    "plan": "know before you run: memory, time and traffic, and the fastest settings that fit",
    "run": "carry out the stages of a configuration; finished ones are skipped, an interrupted one goes on",
    "sft": "the first stage alone: supervised fine-tuning",
    "reward": "the second stage alone: train the reward model on preference pairs",
    "ppo": "the third stage alone: PPO with actor, critic, reference and reward",
    "watch": "follow a run in the terminal: values, seconds by phase, what the doctor says",
    "report": "show a run as one page: curves, verdicts, samples, tokens, memory and time",
    "study": "run variants of a configuration side by side: priors, sharing, the critic's start, update ratios",
    "doctor": "say what is wrong with a run, with evidence, and which setting to change",
    "sample": "write with the trained actor beside the reference",
    "credit": "which tokens helped one part of the reward and hurt another, by a vector critic",
    "serve": "score for other runs: reference and reward as a service over HTTP",
    "distill": "make a smaller critic out of a run's reward model",
    "export": "turn the trained actor into a plain Hugging Face folder",
    "bench": "measure a run's steps against their limit, weights in fewer bits, or this machine",
}


def main(argv: Sequence[str] | None = None) -> int:
    """Run one command; returns the exit code (0 done, 2 bad input, 3 run failed, 130 interrupted)."""
    arguments = list(sys.argv[1:] if argv is None else argv)
    try:
        code = _run(arguments)
        sys.stdout.flush()
        return code
    except SystemExit as leave:  # argparse: 0 after --help, 2 after a mistake
        return leave.code if isinstance(leave.code, int) else errors.DONE if leave.code is None else errors.BAD_INPUT
    except BrokenPipeError:
        # The reader of our output has gone; without this Python complains once more when it closes stdout.
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return errors.FAILED
    except (Exception, KeyboardInterrupt) as error:
        return errors.report(error)


def _run(arguments: list[str]) -> int:
    command = arguments[0] if arguments and arguments[0] in COMMANDS else None
    module = importlib.import_module(f"fourfold.cli.{command}") if command else None
    parser = build_parser(command, module)
    if not arguments:
        parser.print_help(sys.stderr)
        return errors.BAD_INPUT
    if command is None and not arguments[0].startswith("-"):
        near = difflib.get_close_matches(arguments[0], COMMANDS, n=1)
        hint = f"did you mean {near[0]!r}? " if near else ""
        parser.error(f"unknown command {arguments[0]!r}; {hint}allowed: {', '.join(COMMANDS)}")
    parsed = parser.parse_args(arguments)
    assert module is not None, "without a command, argparse has left"
    return module.run(parsed)


def build_parser(command: str | None, module: ModuleType | None) -> argparse.ArgumentParser:
    """The parser of all commands, with the arguments of the one that is asked for."""
    parser = argparse.ArgumentParser(
        prog="fourfold",
        description="Train language models by PPO from human feedback, four models in the memory you have.",
        epilog="Exit codes: 0 done, 2 bad input, 3 run failed, 130 interrupted. FOURFOLD_TRACEBACK=1 shows where.",
        allow_abbrev=False,
    )
    parser.add_argument("--version", action=_Version, nargs=0, help="print the version and exit")
    subparsers = parser.add_subparsers(metavar="COMMAND", required=True)
    for name, text in COMMANDS.items():
        if name == command and module is not None:
            subparser = subparsers.add_parser(
                name,
                help=text,
                description=module.__doc__,
                formatter_class=argparse.RawDescriptionHelpFormatter,
                allow_abbrev=False,
            )
            module.add_arguments(subparser)
        else:
            subparsers.add_parser(name, help=text, add_help=False)
    return parser


class _Version(argparse.Action):
    """Looks the version up when it is asked for: importlib.metadata takes longer to import than all of this file."""

    def __call__(self, parser: argparse.ArgumentParser, *_: object) -> None:
        from importlib.metadata import PackageNotFoundError, version

        try:
            print(f"fourfold {version('fourfold')}")
        except PackageNotFoundError:
            print("fourfold, run from its source folder: not installed, so without a version")
        parser.exit(errors.DONE)
