"""What a command imports before it answers: the time in which it starts is the time of its imports."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
# Beside the standard library and Fourfold itself. `plan` reads settings (pydantic) and draws tables (rich).
HELP: frozenset[str] = frozenset()
PLAN = frozenset(
    {
        *("pydantic", "pydantic_core", "annotated_types", "typing_extensions", "typing_inspection", "tomli_w"),
        *("rich", "markdown_it", "mdurl", "pygments"),
    }
)
ON_A100 = ["--hardware", "a100-80"]
RUN = """
output = "runs/planned"
stages = ["ppo"]
model.path = "smollm2-135m"
reward = {source = "function", function = "rewards:length"}
critic.init = "actor"
data.prompts.path = "prompts.jsonl"
"""


def imported(code: str) -> set[str]:
    """Top-level packages and the modules in them that a fresh interpreter has imported after `code`."""
    before = "import sys; before = set(sys.modules); "
    after = "\nsys.stderr.write(' '.join(set(sys.modules) - before))"
    done = subprocess.run([sys.executable, "-c", before + code + after], capture_output=True, text=True, cwd=ROOT)
    assert done.returncode == 0, done.stderr
    return set(done.stderr.split())


def foreign(modules: set[str]) -> set[str]:
    """Packages that somebody else has written."""
    tops = {name.partition(".")[0] for name in modules}
    own = {*sys.stdlib_module_names, "fourfold"}
    return {name for name in tops if name not in own and not name.startswith("_sysconfigdata")}


@pytest.mark.parametrize(
    ("arguments", "allowed"),
    [
        (["--help"], HELP),
        (["plan", "--help"], HELP),
        (["run", "--help"], HELP),
        (["bench", "--help"], HELP),
        (["plan", "smollm2-135m", *ON_A100], PLAN),
    ],
    ids=lambda given: " ".join(given) if isinstance(given, list) else "",
)
def test_a_command_imports_no_more_than_it_needs(arguments: list[str], allowed: frozenset[str]) -> None:
    modules = imported(f"from fourfold.cli.main import main; main({arguments!r})")
    assert "fourfold.cli.main" in modules
    assert foreign(modules) - allowed == set()


def test_a_plan_of_a_runs_settings_imports_no_more(tmp_path: Path) -> None:
    config = tmp_path / "run.toml"
    config.write_text(RUN)
    modules = imported(f"from fourfold.cli.main import main; main({['plan', str(config), '--json', *ON_A100]!r})")
    assert foreign(modules) - PLAN == set()


def test_help_reads_no_settings() -> None:
    modules = imported("from fourfold.cli.main import main; main(['plan', '--help'])")
    assert {name for name in modules if name.startswith("fourfold.")} <= {
        "fourfold.cli",
        "fourfold.cli.errors",
        "fourfold.cli.main",
        "fourfold.cli.plan",
        "fourfold.errors",
    }


def test_models_come_without_what_only_detection_needs() -> None:
    """And whoever asks transformers afterwards is told of scipy again."""
    modules = imported(
        "from transformers.utils import is_scipy_available; before_import = is_scipy_available()\n"
        "from fourfold.models.pretrained import import_models; import_models()\n"
        "import transformers.utils; assert transformers.utils.is_scipy_available() == before_import"
    )
    assert "transformers.modeling_utils" in modules and "scipy.optimize" not in modules
