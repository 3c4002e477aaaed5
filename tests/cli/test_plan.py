"""`fourfold plan` in processes of its own: what it says, what it writes, how it refuses; never with torch."""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
import tomllib
from pathlib import Path
from typing import Any

import pytest

from fourfold.cli.main import main
from fourfold.config import load_config
from fourfold.config.loading import parse_config
from fourfold.planner.bill import KINDS, MOMENTS

ROOT = Path(__file__).parents[2]
MODEL = ("smollm2-135m", "--hardware", "a100-80")
WITHOUT_TORCH = """
import sys
from fourfold.cli.main import main
code = main(sys.argv[1:])
assert not {"torch", "transformers", "numpy"} & sys.modules.keys()
sys.exit(code)
"""


RUN = """
output = "runs/x"
stages = ["ppo"]
model.path = "smollm2-135m"
sharing.mode = "none"
memory = { levers = "exact", activation_offload = false, checkpointing = "none" }
data = { max_prompt_tokens = 512, prompts.path = "p.jsonl" }
reward = { source = "function", function = "m:f" }
critic.init = "actor"
sampling.max_new_tokens = 512
ppo.micro_batch_size = 32
"""


def plan(*arguments: str, code: int = 0, **variables: str) -> str:
    """What the command prints, 80 columns wide."""
    environment = {**os.environ, "PYTHONPATH": str(ROOT), "COLUMNS": "80", "PYTHONIOENCODING": "utf-8", **variables}
    done = subprocess.run(
        [sys.executable, "-c", WITHOUT_TORCH, "plan", *arguments],
        env=environment, capture_output=True, text=True, encoding="utf-8",
    )  # fmt: skip
    assert done.returncode == code, done.stderr
    return done.stdout if code in (0, 3) else done.stderr


def report(*arguments: str, code: int = 0) -> dict[str, Any]:
    return json.loads(plan(*arguments, "--json", code=code))


def test_a_critic_of_layers_that_the_model_has_not_is_no_plan() -> None:
    said = plan(*MODEL, "--set", "critic.layers=99", code=2)
    assert "critic.layers: given 99 of the model's 30 layers; allowed: " in said
    assert report(*MODEL, "--set", "critic.layers=29")["plans"]


@pytest.mark.parametrize("key", ["trunk.branch_layers", "adapters.layers"])
def test_a_cut_that_the_model_has_no_layers_for_is_no_plan(key: str) -> None:
    sharing = f'sharing.mode="{key.partition(".")[0]}"'
    said = plan(*MODEL, "--set", sharing, "--set", f"{key}=40", code=2)
    assert f"{key} = 40: the model has 30 layers, so 1 to 29 are allowed; or " in said


def test_the_terminal_shows_where_the_bytes_are_and_what_a_step_costs() -> None:
    text = plan(*MODEL, "--set", 'sharing.mode="none"', "--budget", "6GiB")
    lines = text.splitlines()
    assert max(map(len, lines)) <= 80
    assert re.match(r"smollm2-135m on A100-80GB: fits, .* of 6\.0 GiB", text)
    found = report(*MODEL, "--set", 'sharing.mode="none"', "--budget", "6GiB")
    best = found["plans"][0]
    for moment in best["moments"]:
        name = "/".join(filter(None, (moment["phase"], moment["role"])))
        row = next(line for line in lines if line.startswith(f"{name} "))
        assert f"{moment['device_bytes'] / 6 / 2**30:.0%}" in row and "│" in row
        assert row.endswith("peak") == (best["peaks"]["device"]["moment"] == name)
    assert len(best["levers"]) > 1
    for step in best["levers"][1:]:
        assert step["lever"] in text
        assert all(f"{key} = " in text for key in step["settings"])
    for title in (
        "Memory of the device",
        "By phase",
        "By holder",
        "Levers in the order",
        "One PPO step",
        "The best plans",
    ):
        assert title in text


def test_a_terminal_without_other_characters_than_ascii_is_enough() -> None:
    text = plan(*MODEL, PYTHONIOENCODING="ascii")
    assert text.isascii() and "#" in text and "< peak" in text


def test_the_json_is_whole_and_consistent() -> None:
    found = report(*MODEL, "--prompt-tokens", "100", "--response-tokens", "50", "--rollout", "24")
    assert found["schema"] == 1 and found["fits"] and len(found["plans"]) == 3
    assert found["lengths"] == {"prompt": 100, "response": 50, "mean_prompt": 100, "mean_response": 50}
    assert found["hardware"]["node"]["device"]["memory"] == found["budget_bytes"]
    best = found["plans"][0]
    moments = {"/".join(filter(None, (m["phase"], m["role"]))): m for m in best["moments"]}
    assert moments.keys() <= set(map(str, MOMENTS))
    for name, moment in moments.items():
        for tier in ("device", "host", "disk"):
            items = [item for item in best["items"] if item["tier"] == tier and name in item["moments"]]
            assert sum(item["bytes"] for item in items) == moment[f"{tier}_bytes"]
            assert {item["kind"] for item in items} <= set(KINDS)
    assert best["peaks"]["device"]["bytes"] == max(m["device_bytes"] for m in moments.values())
    assert best["step_seconds"] == pytest.approx(sum(best["phase_seconds"].values()))
    assert best["levers"][-1]["peak_bytes"] == best["peaks"]["device"]["bytes"] <= found["budget_bytes"]
    assert best["settings"]["ppo"]["rollout_batch_size"] == 24
    assert best["work"] and isinstance(best["traffic"], list)
    assert {"flops", "utilisation", "bubble_seconds", "hidden_seconds", "layout", "warnings"} <= best.keys()


def test_a_saved_plan_is_a_configuration_that_plans_to_itself(tmp_path: Path) -> None:
    saved = tmp_path / "plan.toml"
    narrow = (*MODEL, "--set", 'sharing.mode="none"', "--budget", "5GiB", "--set", "data.prompts.path=mine.jsonl")
    text = plan(*narrow, "--save", str(saved))
    assert f"fourfold run {saved}" in " ".join(text.split())
    best = report(*narrow)["plans"][0]
    config = load_config(saved)
    assert config == parse_config(best["settings"], "json")
    assert config.memory.budget_gib == 5 and config.model.path == "HuggingFaceTB/SmolLM2-135M"
    again = report(str(saved), "--hardware", "a100-80")
    assert again["plans"][0]["settings"] == best["settings"]
    assert again["plans"][0]["peaks"] == best["peaks"] and again["budget_bytes"] == 5 * 2**30
    for step in best["levers"][1:]:
        assert step["lever"] in saved.read_text(encoding="utf-8")


@pytest.mark.parametrize(("budget", "code"), [("6GiB", 0), ("1GiB", 3)])
def test_a_page_is_written_whether_a_plan_fits_or_not(tmp_path: Path, budget: str, code: int) -> None:
    page = tmp_path / "plan.html"
    text = plan(*MODEL, "--set", 'sharing.mode="none"', "--budget", budget, "--page", str(page), code=code)
    assert f"{page} written; open it in a browser" in text
    html = page.read_text(encoding="utf-8")
    assert "smollm2-135m on A100-80GB" in html and ("Does not fit" in html) == bool(code)


def test_settings_of_a_file_are_kept_and_freed(tmp_path: Path) -> None:
    file = tmp_path / "mine.toml"
    file.write_text(RUN, encoding="utf-8")
    tight = (str(file), "--hardware", "a100-80", "--budget", "8GiB")
    kept = report(*tight, code=3)
    assert "micro_batch_size" not in kept["plans"][0]["settings"].get("ppo", {}) and not kept["fits"]
    assert "does not fit: in learn/" in kept["shortage"]
    helped = {each["change"]: each["missing_bytes"] for each in kept["remedies"]}
    assert any("--allow ppo.micro_batch_size" in change and not missing for change, missing in helped.items())
    freed = report(*tight, "--allow", "ppo.micro_batch_size")
    assert freed["fits"] and freed["plans"][0]["settings"]["ppo"]["micro_batch_size"] < 32
    assert "levers" not in freed["plans"][0]["settings"].get("memory", {})
    text = plan(*tight, code=3)
    assert "does not fit: in learn/" in text and "What would help" in text
    given = report(*tight, "--as-given", code=3)["plans"]
    assert len(given) == 1 and len(given[0]["levers"]) == 1
    refused = report(*tight, "--allow", "ppo", "--refuse", "micro-batches", code=3)
    assert not any(step["lever"] == "micro-batches" for step in refused["plans"][0]["levers"])


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        (("smollm2-135n", "--hardware", "a100-80"), r"did you mean .*smollm2-135m"),
        (("smollm2-135m", "--hardware", "a100-81"), r"hardware 'a100-81' is not known"),
        ((*MODEL, "--budget", "40"), r"--budget 40: .*40GiB"),
        ((*MODEL, "--budget", "90GB"), r"A100-80GB has .*allowed: at most that"),
        ((*MODEL, "--rollout", "0"), r"--rollout 0: allowed are 1 or more"),
        ((*MODEL, "--allow", "memory.chekpointing"), r"--allow memory.chekpointing: a plan sets no such key; allowed"),
        ((*MODEL, "--refuse", "nf5 base"), r"--refuse 'nf5 base': no such lever; allowed: .*nf4 base"),
        ((*MODEL, "--set", "memory.chekpointing=1"), r"unknown key .*nearest known key: memory.checkpointing"),
        ((*MODEL, "--set", 'stages=["sft"]'), r"stages are \['sft'\]; a plan is one of the stage 'ppo'"),
        ((*MODEL, "--page", "."), r"--page \.: is a folder; give the name of a file, such as \./plan.html"),
        ((*MODEL, "--save", "no/such/plan.toml"), r"--save no/such/plan.toml: there is no folder 'no/such'; make it"),
        (("no-such.toml", "--hardware", "a100-80"), r"no-such.toml: 1 problem\n  no such file"),
    ],
)
def test_what_cannot_be_planned_is_refused(
    arguments: tuple[str, ...], said: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["plan", *arguments]) == 2
    assert re.search(said, capsys.readouterr().err)


def test_a_reward_model_of_its_own(tmp_path: Path) -> None:
    found = report(*MODEL, "--reward-model", "smollm2-360m", "--save", str(tmp_path / "plan.toml"))
    assert set(found["models"]) == {"base", "reward"}
    config = tomllib.loads((tmp_path / "plan.toml").read_text(encoding="utf-8"))
    assert config["reward"] == {"source": "model", "model": "HuggingFaceTB/SmolLM2-360M"}
