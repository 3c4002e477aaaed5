"""A llama-server as the reference: it draws the given ids, and says how probable they were."""

from __future__ import annotations

import contextlib
import importlib.util
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

from fourfold.config import ConfigError
from fourfold.config.schema import ServiceSection
from fourfold.errors import RunFailed
from fourfold.models.llama_roles import EnginePolicy, probe_rows, torch_log_probs
from fourfold.scoring.service.llama_server import LlamaServer, ordinary_ids
from fourfold.training.ppo import describe_roles
from llama_stand_in import SLOTS, real_one, stand_in
from models.test_loading import write_gguf
from tiny import BOS, EOS, PAD, UNK, VOCABULARY, tiny_directory, tiny_model, tiny_tokenizer
from training.runs import Tree, by_function, make_config, make_trainer, merged, settings, steps_of

# A package with prebuilt wheels of llama.cpp's server; what its server answers, the stand-in answers by torch.
REAL = "xllamacpp"
KINDS = [
    "stand-in",
    pytest.param(REAL, marks=pytest.mark.skipif(not importlib.util.find_spec(REAL), reason=f"{REAL} is missing")),
]


def section(url: str) -> ServiceSection:
    return ServiceSection(url=url, retries=0)


@pytest.fixture(scope="module")
def urls(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Any]:
    """Addresses of servers of the tiny llama, by kind; started when they are asked for."""
    with contextlib.ExitStack() as open_ones:
        started: dict[str, str] = {}

        def url(kind: str) -> str:
            if kind not in started:
                model = tiny_model("llama")
                if kind == REAL:
                    model.config.max_position_embeddings = 512  # more than the longest row of the probe
                    file = tmp_path_factory.mktemp("gguf") / "tiny.gguf"
                    write_gguf(file, model, tiny_tokenizer(pad_is_eos=False))
                    library = importlib.import_module(REAL)
                    started[kind] = open_ones.enter_context(real_one(library, file))
                else:
                    started[kind] = open_ones.enter_context(stand_in(model)).url
            return started[kind]

        yield url


def test_ids_that_a_grammar_can_force() -> None:
    tokenizer = tiny_tokenizer(pad_is_eos=False)
    ordinary = ordinary_ids(tokenizer)
    assert not ordinary & {PAD, EOS, UNK, BOS} and len(ordinary) > 100
    assert all("\ufffd" not in tokenizer.decode([token]) for token in ordinary)


@pytest.mark.parametrize("kind", KINDS)
def test_log_probs_are_those_of_torch(urls: Any, kind: str) -> None:
    """Of ordinary ids, of those that end a response or stand for nothing, in rows of several lengths."""
    model = tiny_model("llama")
    server = LlamaServer(section(urls(kind)), ordinary_ids(tiny_tokenizer(pad_is_eos=False)))
    rows = [[20, 31, 40, 55, 60, EOS], [33, 34, UNK, 50, PAD, 77, 80], [90, 91, 92], [7, BOS, 120], [60, EOS]]
    starts = [2, 1, 2, 1, 1]
    expected = torch.cat([torch_log_probs(model, row)[s - 1 :] for row, s in zip(rows, starts, strict=True)])
    found = server.log_probs(rows, starts, 1.0)
    torch.testing.assert_close(found, expected, rtol=0, atol=0.05)
    assert server.take()["moved_bytes"] > 1000 and server.take()["moved_bytes"] == 0


def test_a_request_forces_a_run_of_ordinary_ids_and_each_slot_keeps_its_row() -> None:
    with stand_in(tiny_model("llama")) as served:
        LlamaServer(section(served.url), range(20, VOCABULARY)).log_probs([[20, 30, 40, 50, EOS]], [1], 1.0)
        grammar, bias = served.requests
        assert grammar["grammar"] == "root ::= <[30]> <[40]> <[50]>" and grammar["n_predict"] == 3
        assert bias["prompt"] == [20, 30, 40, 50] and bias["logit_bias"][0][0] == EOS and "grammar" not in bias
        assert grammar["id_slot"] == bias["id_slot"] < SLOTS and grammar["samplers"] == []


def test_answers_about_other_ids_stop_the_run() -> None:
    with stand_in(tiny_model("llama")) as served:
        served.shift = 1
        server = LlamaServer(section(served.url), range(20, VOCABULARY))
        with pytest.raises(RunFailed, match=r"was to draw the ids \[30, 40\] and drew \[31, 41\]; it is too old"):
            server.log_probs([[20, 30, 40]], [1], 1.0)


def served_by(folder: Path, url: str, **changes: Any) -> Tree:
    tree = settings(folder, by_function("pays_by_hash", steps=2))
    reference = {"engine": "llama_cpp", "residency": "service"}
    return merged(tree, {"reference": reference, "service": {"url": url, "retries": 0}, **changes})


@pytest.mark.parametrize("kind", KINDS)
def test_a_run_whose_reference_is_a_llama_server(tmp_path: Path, urls: Any, kind: str) -> None:
    """The server's model is the actor at step 0: nearly the run with torch, and its bias is measured."""
    trainer = make_trainer(make_config(served_by(tmp_path, urls(kind))))
    assert isinstance(trainer.models.reference, EnginePolicy)
    report = trainer.check()
    assert report.reference_bias is not None and abs(report.reference_bias.per_token_mean) < 0.01
    assert f"computed elsewhere (at {urls(kind)}, llama.cpp)" in (report.warning() or "")
    assert "reference" not in trainer.models.frozen_checksums(), "another process holds it"
    assert urls(kind) in describe_roles(trainer)
    rows = steps_of(trainer)
    by_torch = merged(settings(tmp_path, by_function("pays_by_hash", steps=2)), {"output": str(tmp_path / "torch")})
    plain = steps_of(make_trainer(make_config(by_torch)))
    for row, expected in zip(rows, plain, strict=True):
        assert row["kl_per_sequence_mean"] == pytest.approx(expected["kl_per_sequence_mean"], abs=0.05)
        assert row["reference_pass_seconds"] > 0 < row["reference_moved_bytes"]


def test_what_a_server_rounds_of_a_model_of_its_own_is_measured_on_the_probe(tmp_path: Path) -> None:
    """The distance to the actor, which has other weights, hides it in every rollout."""
    own = tiny_directory(tmp_path / "own", "llama", seed=1)
    with stand_in(tiny_model("llama", seed=1)) as served:
        tree = merged(served_by(tmp_path, served.url), {"reference": {"model": str(own)}})
        report = make_trainer(make_config(tree)).check()
    assert report.own_reference and report.reference_bias is not None
    assert abs(report.reference_bias.per_token_mean) < 1e-3 < report.kl_gap_mean
    assert report.reference_bias.sequences == len(probe_rows(tiny_tokenizer(pad_is_eos=False)))


def test_a_server_of_another_model_is_refused(tmp_path: Path) -> None:
    with (
        stand_in(tiny_model("llama", seed=1)) as served,
        pytest.raises(ValueError, match=rf"reference.engine: on a probe .* {served.url} holds another model"),
    ):
        make_trainer(make_config(served_by(tmp_path, served.url)))


@pytest.mark.parametrize(
    ("changes", "problem"),
    [
        ({"sampling": {"temperature": 0.7}}, r"sampling.temperature: given 0.7 .* probabilities of temperature 1 only"),
        ({"reference": {"engine": "llama_cpp_q8_0"}}, r"reference.engine: .* the server's file has its own types"),
        ({"service": {"url": ""}}, r"service.url: not given, but reference.residency = 'service' .* a llama-server"),
        ({"service": {"max_rows": 8}}, r"service.max_rows: given, but a llama-server is asked about one row"),
        ({"ppo": {"kl_estimator": "full"}}, r"reference.engine: given 'llama_cpp' beside ppo.kl_estimator = 'full'"),
    ],
)
def test_what_a_llama_server_cannot_do_is_refused(tmp_path: Path, changes: Tree, problem: str) -> None:
    with pytest.raises(ConfigError, match=problem):
        make_config(merged(served_by(tmp_path, "http://127.0.0.1:1"), changes))


def test_a_llama_server_is_no_fourfold_serve_and_the_other_way_round(tmp_path: Path) -> None:
    with stand_in(tiny_model("llama")) as served:
        tree = merged(served_by(tmp_path, served.url), {"reference": {"engine": "torch"}})
        with pytest.raises(RunFailed, match=r"refused /v1/describe with status 404: .*llama-server for 'llama_cpp'"):
            make_trainer(make_config(tree))
