"""The command line: quick help, exit codes, errors for people."""

from __future__ import annotations

import importlib
import os
import subprocess
import sys
from pathlib import Path

import pytest

from fourfold.cli import errors, main
from fourfold.errors import Interrupted, RunFailed


def fourfold(*arguments: str, cwd: Path | None = None, **environment: str) -> subprocess.CompletedProcess[str]:
    variables = {**os.environ, "PYTHONPATH": str(Path(__file__).parents[2]), **environment}
    return subprocess.run(
        [sys.executable, "-m", "fourfold", *arguments],
        capture_output=True,
        text=True,
        cwd=cwd,
        env=variables,
        timeout=60,
    )


def test_help_lists_every_command() -> None:
    done = fourfold("--help")
    assert done.returncode == 0
    assert all(f"    {command} " in done.stdout for command in main.COMMANDS)


@pytest.mark.parametrize("command", ["", *main.COMMANDS])
def test_help_imports_no_torch(command: str) -> None:
    code = (
        "import sys; from fourfold.cli.main import main; code = main(sys.argv[1:]); "
        "sys.exit(code or ' '.join({'torch', 'transformers', 'datasets'} & set(sys.modules)) or 0)"
    )
    arguments = [command, "--help"] if command else ["--help"]
    done = subprocess.run([sys.executable, "-c", code, *arguments], capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    assert done.stdout.startswith(f"usage: fourfold {command}".rstrip())


@pytest.mark.parametrize("command", main.COMMANDS)
def test_every_command_has_its_two_functions(command: str) -> None:
    module = importlib.import_module(f"fourfold.cli.{command}")
    assert callable(module.add_arguments) and callable(module.run) and module.__doc__


def test_version() -> None:
    done = fourfold("--version")
    assert done.returncode == 0 and done.stdout.startswith("fourfold")


@pytest.mark.parametrize(
    ("arguments", "text"),
    [
        ([], "usage: fourfold"),
        (["rnu"], "unknown command 'rnu'; did you mean 'run'? allowed: init, data, plan, run"),
        (["zzz"], "unknown command 'zzz'; allowed: init"),
        (["--colour"], "fourfold: error"),
        (["init", "a.toml", "--forc"], "unrecognized arguments: --forc"),
        (["init", "no-such-folder/a.toml"], "there is no folder no-such-folder"),
    ],
)
def test_bad_input_is_2(tmp_path: Path, arguments: list[str], text: str) -> None:
    done = fourfold(*arguments, cwd=tmp_path)
    assert done.returncode == 2 and text in done.stderr
    assert "Traceback" not in done.stderr and done.stdout == ""
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize(
    ("error", "code", "text"),
    [
        (ValueError("ppo.steps: given 0"), 2, "fourfold: error: ppo.steps: given 0\n"),
        (
            RunFailed("learn: the critic's loss is nan"),
            3,
            "fourfold: the run failed: learn: the critic's loss is nan\n",
        ),
        (OSError(28, "No space left on device"), 3, "fourfold: the run failed: [Errno 28] No space left on device\n"),
        (Interrupted("stopped after step 3 of 9"), 130, "fourfold: stopped after step 3 of 9\n"),
        (KeyboardInterrupt(), 130, "fourfold: interrupted\n"),
    ],
)
def test_exit_codes(
    error: BaseException, code: int, text: str, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delenv("FOURFOLD_TRACEBACK", raising=False)

    def fail(_: object) -> int:
        raise error

    monkeypatch.setattr("fourfold.cli.init.run", fail)
    assert main.main(["init"]) == code
    assert capsys.readouterr().err == text
    monkeypatch.setenv("FOURFOLD_TRACEBACK", "1")
    assert main.main(["init"]) == code
    shown = capsys.readouterr().err
    assert shown.startswith("Traceback") and shown.endswith(text)


def test_a_fault_of_the_program_shows_where(capsys: pytest.CaptureFixture[str]) -> None:
    try:
        raise RuntimeError("shapes differ")
    except RuntimeError as error:
        assert errors.report(error) == 3
    shown = capsys.readouterr().err
    assert "Traceback" in shown and "by a fault of the program: RuntimeError: shapes differ" in shown


def test_a_reader_that_leaves_is_not_a_traceback() -> None:
    code = "import sys; from fourfold.cli.main import main; sys.exit(main(['--help']))"
    read, write = os.pipe()
    os.close(read)
    done = subprocess.run([sys.executable, "-c", code], stdout=write, stderr=subprocess.PIPE, text=True)
    os.close(write)
    assert done.stderr == ""
