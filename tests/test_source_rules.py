"""Rules of the whole source that no linter knows: what must not be called, and what must not import torch."""

from __future__ import annotations

import ast
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parent.parent
SOURCES = sorted(path for folder in ("fourfold", "benchmarks", "tools") for path in (ROOT / folder).rglob("*.py"))
UNSAFE_MODULES = {"pickle", "cPickle", "dill", "cloudpickle", "marshal", "shelve", "joblib"}
UNSAFE_CALLS = {"torch.load", "yaml.load", "yaml.unsafe_load", "numpy.load", "np.load", "eval", "exec"}
DIAGNOSTICS = ("fourfold/diagnostics/pages", "fourfold/diagnostics/plan_page")
TORCH_FREE = ("fourfold/planner", "fourfold/config", "fourfold/cli", *DIAGNOSTICS)


def unsafe(text: str) -> list[str]:
    """Imports and calls that can run code out of data, by line."""
    found: list[tuple[int, str]] = []
    for node in ast.walk(ast.parse(text)):
        if isinstance(node, ast.Import):
            found += [(node.lineno, name.name) for name in node.names if name.name.split(".")[0] in UNSAFE_MODULES]
        elif isinstance(node, ast.ImportFrom) and node.module:
            names = {f"{node.module}.{name.name}" for name in node.names}
            found += [(node.lineno, name) for name in names & UNSAFE_CALLS]
            if node.module.split(".")[0] in UNSAFE_MODULES:
                found.append((node.lineno, node.module))
        elif isinstance(node, ast.Call):
            if ast.unparse(node.func) in UNSAFE_CALLS:
                found.append((node.lineno, ast.unparse(node.func)))
            found += [
                (node.lineno, k.arg) for k in node.keywords if k.arg == "trust_remote_code" and not _false(k.value)
            ]
    return [f"{line}: {what}" for line, what in sorted(found)]


def _false(node: ast.expr) -> bool:
    return isinstance(node, ast.Constant) and node.value is False


@pytest.mark.parametrize(
    "text",
    [
        "import pickle",
        "from pickle import loads",
        "from torch import load",
        "torch.load(path, weights_only=True)",
        "yaml.load(text)",
        "eval('1')",
        "AutoModel.from_pretrained(path, trust_remote_code=True)",
        "AutoModel.from_pretrained(path, trust_remote_code=flag)",
    ],
)
def test_the_check_sees_each_unsafe_form(text: str) -> None:
    assert len(unsafe(text)) == 1


def test_nothing_is_unpickled_and_no_remote_code_is_trusted() -> None:
    assert len(SOURCES) > 20
    found = [
        f"{path.relative_to(ROOT)}:{line}" for path in SOURCES for line in unsafe(path.read_text(encoding="utf-8"))
    ]
    assert found == []


@pytest.mark.parametrize("folder", TORCH_FREE)
def test_planner_settings_and_command_line_are_imported_without_torch(folder: str) -> None:
    """With torch and transformers made unimportable, every module still imports: `--help` and checks answer at once."""
    modules = [
        ".".join(path.relative_to(ROOT).with_suffix("").parts).removesuffix(".__init__")
        for path in sorted((ROOT / folder).rglob("*.py"))
    ]
    assert modules
    blocked = "import sys; sys.modules['torch'] = sys.modules['transformers'] = None\n"
    program = blocked + "\n".join(f"import {module}" for module in modules)
    done = subprocess.run([sys.executable, "-c", program], cwd=ROOT, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
