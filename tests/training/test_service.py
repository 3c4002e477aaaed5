"""Runs whose reference and reward are at a service: what they hold, what they compute, and how they end without it."""

from __future__ import annotations

import os
import re
import signal
import subprocess
import sys
import threading
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file

from fourfold.cli.main import main
from fourfold.errors import RunFailed
from fourfold.training.ppo import describe_roles
from tiny import tiny_directory
from training.runs import (
    SEPARATE,
    Tree,
    by_function,
    by_model,
    give_value_head,
    make_config,
    make_trainer,
    merged,
    outcome,
    run,
    settings,
    weights_of,
    write_config,
)
from training.served import Watched, at_service, hosted_roles, listening, stop_at_call

ROOT = Path(__file__).parents[2]
BOTH = ("reference", "reward")


def separate(folder: Path, **ppo: Any) -> Tree:
    """Four models, so that a role's own weights are all of its weights."""
    return by_model(settings(folder, merged(by_function("pays_by_hash", **ppo), SEPARATE)), folder / "reward")


def test_a_vector_critic_is_not_compared_with_the_reward_model_at_a_service(tmp_path: Path) -> None:
    """It starts from it, and has two numbers where the service has one."""
    tree = merged(separate(tmp_path, steps=1), {"critic": {"init": "reward", "heads": "vector"}})
    with listening(hosted_roles(tree, "reward")) as server:
        trainer = make_trainer(make_config(at_service(tree, server.url, "reward")))
        assert trainer.models.critic.head.shape == (2,)
        assert trainer.step()["reward_pass_seconds"] > 0


@pytest.mark.parametrize("init", ["actor", "reward", "base"])
def test_a_run_without_the_weights_of_two_roles_learns_the_same_bits(tmp_path: Path, init: str) -> None:
    """Rows 35 and 44: bytes at the storages, and two steps with a pre-flight and an evaluation before them."""
    tree = merged(separate(tmp_path, steps=2), {"critic": {"init": init}})
    with listening(hosted_roles(tree, *BOTH)) as server:
        plain, away = (make_trainer(make_config(each)) for each in (tree, at_service(tree, server.url, *BOTH)))
        models = away.models
        assert models.reward is not None and plain.models.reward is not None
        for role, kept in ((models.reference, plain.models.reference), (models.reward, plain.models.reward)):
            held = {p.untyped_storage().data_ptr(): p.untyped_storage().nbytes() for p in role.parameters()}
            full = sum(p.numel() * p.element_size() for p in kept.parameters())
            assert sum(held.values()) <= 4 * len(list(role.parameters())) < full / 50
        if init != "reward":
            give_value_head(plain.models)
            give_value_head(models)
        rows = []
        for trainer in (plain, away):
            trainer.check()
            metrics = trainer.evaluate().metrics
            rows.append([metrics, trainer.step(), trainer.step()])
    names = ("score_mean", "kl_per_sequence_mean", "actor_grad_norm", "critic_grad_norm")
    for one, other in zip(*rows, strict=True):
        assert [one.get(name) for name in names] == [other.get(name) for name in names]
    assert rows[0][0] == rows[1][0]
    for role in ("actor", "critic"):
        ours, theirs = (weights_of(getattr(each.models, role)) for each in (plain, away))
        assert all(torch.equal(ours[name], theirs[name]) for name in ours)
    last = rows[1][-1]
    for role in BOTH:
        assert last[f"{role}_pass_seconds"] > 0 and 8 * 4 < last[f"{role}_moved_bytes"] < 4000
        line = next(line for line in describe_roles(away).splitlines() if line.strip().startswith(role))
        assert f"at {server.url}" in line and line.rstrip().endswith(" 0.0")
    assert last["offloaded_pass_seconds"] == sum(last[f"{role}_pass_seconds"] for role in BOTH)
    assert last["offloaded_per_generate_ratio"] == last["offloaded_pass_seconds"] / last["generate_seconds"]


def test_the_service_works_while_the_critic_does(tmp_path: Path) -> None:
    """Its answers wait here until the critic has begun: a run that waited for them first would never end."""
    tree = separate(tmp_path)
    critic_works, probed = threading.Event(), threading.Event()

    def wait_for_the_critic(role: str, message: Mapping[str, Any]) -> None:
        assert not probed.is_set() or critic_works.wait(20)

    with listening(Watched(hosted_roles(tree, *BOTH), wait_for_the_critic)) as server:
        trainer = make_trainer(make_config(at_service(tree, server.url, *BOTH, timeout_seconds=30.0)))
        trainer.models.critic.branch.register_forward_pre_hook(lambda *_: critic_works.set())
        probed.set()
        trainer.step()


def test_max_rows_is_the_most_of_one_request(tmp_path: Path) -> None:
    """In whole micro-batches of 2 rows, so that the numbers stay as they are; or of some tokens, one a request."""
    tree, found = separate(tmp_path), {}
    for max_rows, tokens, requests in ((256, 0, [8]), (5, 0, [4, 4]), (2, 0, [2, 2, 2, 2]), (256, 1, [1] * 8)):
        seen: list[int] = []
        hosted = Watched(
            hosted_roles(tree, "reward"), lambda _, message, seen=seen: seen.append(len(message["prompts"]))
        )
        with listening(hosted) as server:
            limited = merged(tree, {"ppo": {"micro_batch_tokens": tokens}})
            trainer = make_trainer(make_config(at_service(limited, server.url, "reward", max_rows=max_rows)))
            seen.clear()
            found[max_rows, tokens] = trainer.step()["score_mean"]
        assert seen == requests
    assert found.pop((256, 1)) == pytest.approx(found[256, 0]), "another order of sums"
    assert len(set(found.values())) == 1


# --- what is not this run's -------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("changes", "roles", "said"),
    [
        ({"precision": {"compute": "bfloat16"}}, BOTH, "compute is 'bfloat16' there, 'float32' here"),
        ({"memory": {"attention": "eager"}}, BOTH, "attention is 'eager' there"),
        ({"trunk": {"branch_layers": 1}}, BOTH, "layers is 1 there, 2 here"),
        ({}, ("reference",), "holds reference; start it with --roles reward"),
    ],
)
def test_a_service_of_another_run_is_refused(tmp_path: Path, changes: Tree, roles: tuple[str, ...], said: str) -> None:
    tree = by_model(settings(tmp_path, by_function("pays_by_hash")), tmp_path / "reward")
    other = by_model(merged(tree, changes), tmp_path / "other")
    with listening(hosted_roles(other, *roles)) as server, pytest.raises(ValueError, match=re.escape(said)):
        make_trainer(make_config(at_service(tree, server.url, *BOTH)))


@pytest.mark.parametrize("role", BOTH)
def test_other_weights_are_refused(tmp_path: Path, role: str) -> None:
    tree = by_model(settings(tmp_path, by_function("pays_by_hash")), tmp_path / "reward")
    other = settings(tmp_path / "other", by_function("pays_by_hash"), family="qwen2")
    if role == "reward":
        other = by_model(tree, tmp_path / "shaken")
        path = tmp_path / "shaken" / "model.safetensors"
        save_file({name: tensor + 1e-6 for name, tensor in load_file(path).items()}, path)
    said = r"is not this run's.*own_weights is '[0-9a-f]{32}' there"
    with listening(hosted_roles(other, role)) as server, pytest.raises(ValueError, match=said):
        make_trainer(make_config(at_service(tree, server.url, role)))


def test_numbers_of_another_kernel_are_refused(tmp_path: Path) -> None:
    """A service whose weights are right and whose numbers are not: the probe sees it."""
    tree = settings(tmp_path, by_function("pays_by_hash"))
    hosted = hosted_roles(tree, "reference")

    class Wrong:
        roles, describe = hosted.roles, hosted.describe

        def answer(self, role: str, message: dict[str, Any], deadline: float) -> dict[str, Any]:
            said = hosted.answer(role, message, deadline)
            return {"log_probs": [[number + 1e-2 for number in row] for row in said["log_probs"]]}

    with listening(Wrong()) as server, pytest.raises(RunFailed, match=r"log-probs of a probe differ by (9|1).*e-0[23]"):
        make_trainer(make_config(at_service(tree, server.url, "reference")))


@pytest.mark.parametrize(
    ("answer", "said"),
    [
        ({"scores": [float("nan")] * 8}, "status 500: the answer is not finite"),
        ({"scores": [0.0] * 7}, "8 numbers are wanted, given 7"),
        ({"scores": [None] * 8}, "None is no number"),
        ({}, "given NoneType"),
    ],
)
def test_what_is_no_score_stops_the_run(tmp_path: Path, answer: dict[str, Any], said: str) -> None:
    """FAULTS: a failure never becomes a 0."""
    tree = separate(tmp_path)
    hosted, probed = hosted_roles(tree, "reward"), threading.Event()

    class Wrong:
        roles, describe = hosted.roles, hosted.describe

        def answer(self, role: str, message: dict[str, Any], deadline: float) -> dict[str, Any]:
            return answer if probed.is_set() else hosted.answer(role, message, deadline)

    with listening(Wrong()) as server:
        trainer = make_trainer(make_config(at_service(tree, server.url, "reward")))
        probed.set()
        with pytest.raises(RunFailed, match=f"score: .*{re.escape(said)}"):
            trainer.step()


def test_a_wrong_token_stops_the_run_at_its_start(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    tree = separate(tmp_path)
    monkeypatch.setenv("TOKEN_OF_TEST", "wrong")
    with listening(hosted_roles(tree, "reference"), token="right") as server:
        config = make_config(at_service(tree, server.url, "reference", token_env="TOKEN_OF_TEST"))
        with pytest.raises(RunFailed, match="status 401"):
            make_trainer(config)
        monkeypatch.setenv("TOKEN_OF_TEST", "right")
        make_trainer(config)


# --- a service that dies ----------------------------------------------------------------------------------------------


def test_a_run_whose_service_dies_fails_and_goes_on_with_the_next_to_the_same_end(tmp_path: Path) -> None:
    """The next is `fourfold serve` in a process of its own, on another port; SIGTERM ends that with 0."""
    changes = merged(by_function("pays_by_hash", steps=4), {**SEPARATE, "checkpoint": {"every": 1}})
    tree = settings(tmp_path, merged(changes, {"output": str(tmp_path / "plain")}))
    run(tree)
    expected = outcome(tmp_path / "plain")

    tree = merged(tree, {"output": str(tmp_path / "away")})
    function = {"reward": {"function": "training.served:pays_and_stops_the_service"}}
    with listening(hosted_roles(tree, "reference")) as server:
        stop_at_call(14, server)  # in step 3: pre-flight asks once, evaluation and steps four times each
        # What step 3 had asked may have been answered by then.
        with pytest.raises(RunFailed, match=r"step [34]: score: the reference: .*failed 1 times.*checkpoint is kept"):
            run(at_service(merged(tree, function), server.url, "reference"))
        stop_at_call(0, server)

    environment = {**os.environ, "PYTHONPATH": f"{ROOT}:{ROOT / 'tests'}", "A_TOKEN": "secret"}
    program = [
        sys.executable,
        "-m",
        "fourfold",
        "serve",
        str(tmp_path / "away"),
        "--port",
        "0",
        "--token-env",
        "A_TOKEN",
    ]
    process = subprocess.Popen(program, env=environment, stderr=subprocess.PIPE, text=True)
    assert process.stderr is not None
    try:
        lines = iter(process.stderr.readline, "")
        [url] = next(found for line in lines if (found := re.findall(r"serving reference of .* at (http:\S+)", line)))
        os.environ["A_TOKEN"] = "secret"
        run(at_service(merged(tree, function), url, "reference", token_env="A_TOKEN"))
        process.send_signal(signal.SIGTERM)
        assert process.wait(20) == 0 and "stopped" in process.stderr.read()
    finally:
        os.environ.pop("A_TOKEN", None)
        process.kill()
        process.wait()
        process.stderr.close()
    found = outcome(tmp_path / "away")
    for each in (expected, found):
        each["state"].pop("frozen_checksums")
    known = [set(row) for row in expected["rows"]]
    found["rows"] = [
        {key: row[key] for key in row if key in keys} for row, keys in zip(found["rows"], known, strict=True)
    ]
    assert [name for name in expected if found[name] != expected[name]] == []


@pytest.mark.parametrize(
    ("changes", "arguments", "text"),
    [
        ({}, ["--roles", "reward"], "'function' has no reward model; give --roles reference, and"),
        ({"reference": {"engine": "llama_cpp"}}, [], "no role that a service can hold; the run holds them itself"),
    ],
)
def test_what_the_run_holds_itself_is_not_served(
    tmp_path: Path, changes: Tree, arguments: list[str], text: str, capsys: pytest.CaptureFixture[str]
) -> None:
    config = write_config(settings(tmp_path, merged(by_function("pays_by_hash"), changes)), tmp_path / "config.toml")
    assert main(["serve", str(config), "--port", "0", *arguments]) == 2
    assert re.search(text, capsys.readouterr().err)


def test_one_role_at_a_service_beside_a_reference_of_its_own(tmp_path: Path) -> None:
    """What a service holds is this run's own reward model, whatever the other role is."""
    other = tiny_directory(tmp_path / "other", layers=3, seed=5)
    tree = merged(separate(tmp_path), {"reference": {"model": str(other)}})
    with listening(hosted_roles(tree, "reward")) as server:
        rows = [make_trainer(make_config(each)).step() for each in (tree, at_service(tree, server.url, "reward"))]
    for name in ("score_mean", "kl_per_sequence_mean", "actor_grad_norm"):
        assert rows[0][name] == rows[1][name], name


@pytest.mark.parametrize(
    ("arguments", "text"),
    [
        (["--port", "70000"], "--port 70000: allowed are 0 to 65535"),
        (["--roles", "critic"], "'critic' is no role here; allowed: reference, reward"),
        (["--roles", "reward"], "reward.source = 'function' has no reward model"),
        (["--host", "0.0.0.0"], "there is no token"),
        (["--token-file", "nowhere"], "'nowhere' cannot be read"),
        (["--max-request-mib", "0"], "--max-request-mib 0.0: allowed are numbers above 0"),
    ],
)
def test_bad_arguments_are_refused(
    tmp_path: Path, arguments: list[str], text: str, capsys: pytest.CaptureFixture[str]
) -> None:
    config = write_config(settings(tmp_path, by_function("pays_by_hash")), tmp_path / "config.toml")
    assert main(["serve", str(config), "--port", "0", *arguments]) == 2
    assert text in capsys.readouterr().err
