"""Settings that are each allowed alone, and wrong or ignored together."""

from __future__ import annotations

import tomllib
from typing import Any

import pytest

from fourfold.config import ConfigError
from fourfold.config.checks import ignored_keys, is_given
from fourfold.config.checks.ignored import REWARD_TRAINING
from fourfold.config.loading import apply_override, parse_config
from fourfold.config.schema import OptimizerSection, RewardSection

BASE = """
output = "runs/x"
[model]
path = "owner/model"
[data]
texts.path = "a.csv"
pairs.path = "b.csv"
prompts.path = "c.csv"
"""


def found(*overrides: str, base: str = BASE) -> list[str]:
    """Problems of `base` with these overrides; NO_PAIRS takes the pairs out."""
    tree: dict[str, Any] = tomllib.loads(base)
    for override in overrides:
        if override == NO_PAIRS:
            del tree["data"]["pairs"]
        else:
            apply_override(tree, override)
    try:
        parse_config(tree, "test")
    except ConfigError as error:
        return list(error.problems)
    return []


NO_PAIRS = "without pairs"
LOADED = [NO_PAIRS, "reward.source=checkpoint", "reward.checkpoint=x"]
CALLED = [NO_PAIRS, "reward.source=function", "reward.function=a:b", "critic.init=actor"]
PARTS = [
    *(NO_PAIRS, "reward.source=combined", "critic.init=actor"),
    *(f"reward.parts.{name}={{source = 'function', function = 'a:b'}}" for name in ("kind", "brief")),
]
OWN_MODEL = [NO_PAIRS, "reward.source=model", "reward.model=owner/judge", "critic.init=actor"]
EVALUATED = "data.prompts_test.path=d.csv"
TRAINED = ["trunk.train=true"]
UNCLIPPED = [f"{section}.max_grad_norm=0" for section in ("sft", "reward", "ppo", "critic")]

REFUSED = [
    (
        ["ppo.mini_batch_size=12", "ppo.micro_batch_size=4"],
        "ppo.mini_batch_size: 12 does not divide ppo.rollout_batch_size = 32; .* try 8",
    ),
    (["ppo.micro_batch_size=5"], "ppo.micro_batch_size: 5 does not divide ppo.mini_batch_size = 32"),
    (["ppo.rollout_batch_size=16"], "ppo.mini_batch_size: 32 does not divide ppo.rollout_batch_size = 16; .* try 16"),
    (
        ["sampling.responses_per_prompt=3"],
        "sampling.responses_per_prompt: 3 does not divide ppo.rollout_batch_size = 32",
    ),
    (["sft.micro_batch_size=33"], "sft.micro_batch_size: 33 does not divide sft.batch_size = 32"),
    (
        ["reward.batch_size=7", "reward.micro_batch_size=2"],
        "reward.micro_batch_size: 2 does not divide reward.batch_size = 7",
    ),
    (
        ["sharing.mode=none", "trunk.branch_layers=4"],
        "trunk.branch_layers: given, but sharing.mode = 'none' has no trunk",
    ),
    (["trunk.branch_layers=0"], "trunk.branch_layers: given 0, .* allowed: 1 or more; try 4, or trunk.train = true"),
    (["trunk.lr_scale=1"], "trunk.lr_scale: given, but trunk.train = false freezes the trunk"),
    (["trunk.alternate=1"], "trunk.alternate: given, but trunk.train = false"),
    ([*TRAINED, "trunk.alternate=1", "trunk.critic_grad_scale=1"], "trunk.critic_grad_scale: given, but trunk.alt"),
    ([*TRAINED, "trunk.alternate=1", "trunk.decoupling=1"], "trunk.decoupling: given, but trunk.alternate"),
    ([*TRAINED, "trunk.critic_grad_scale=0", "trunk.balance=grad_norm"], "trunk.balance: given, but .* = 0 keeps"),
    ([*TRAINED, "trunk.branch_layers=0", "trunk.decoupling=1"], "trunk.decoupling: given 1 beside .*branch_layers = 0"),
    (
        [*TRAINED, "trunk.alternate=4"],
        "trunk.alternate: given 4, but a rollout has 4 mini-batches in all .* never has a turn; allowed: at most 3",
    ),
    (
        [*TRAINED, "memory.optimizer_in_backward=true", *UNCLIPPED],
        "trunk.train: true puts the trunk's gradient together from the actor's and the critic's",
    ),
    (
        [*TRAINED, "trunk.alternate=3", "ppo.steps=5", "ppo.warmup_steps=6"],
        "ppo.warmup_steps: given 6, but there are 5 optimizer steps",
    ),
    (["sharing.mode=none", "trunk.train=true"], "trunk.train: given, but sharing.mode = 'none' has no trunk"),
    (["ppo.kl_loss_coef=0.1"], "ppo.kl_loss_coef: given 0.1 beside ppo.kl_coef = 0.05: KL would be charged twice"),
    (["ppo.dual_clip=1"], "ppo.dual_clip: given 1.0; allowed: 0 .off. or a number > 1"),
    (["ppo.dual_clip=0.5"], "ppo.dual_clip: given 0.5"),
    (["critic.betas=[0.9, 1]"], "critic.betas: given .0.9, 1.0.; allowed: two numbers >= 0 and < 1"),
    (["ppo.length_penalty=1", "ppo.length_range=[9, 2]"], "ppo.length_range: given .9, 2.; .* try .2, 9."),
    (
        ["ppo.length_penalty=1", "ppo.length_range=[30, 0]"],
        "ppo.length_range: given .30, 0., but no response is longer than sampling.max_new_tokens = 24",
    ),
    (["ppo.length_penalty=1"], "ppo.length_penalty: given 1.0, but ppo.length_range = .0, 0. leaves every length free"),
    (["ppo.length_range=[1, 9]"], "ppo.length_range: given, but ppo.length_penalty = 0"),
    (["ppo.kl_target=3"], "ppo.kl_target: given, but ppo.kl_controller = 'fixed'"),
    (["ppo.kl_horizon=3"], "ppo.kl_horizon: given, but ppo.kl_controller = 'fixed'"),
    (["ppo.kl_controller=adaptive", "ppo.kl_coef=0"], "ppo.kl_controller: 'adaptive' multiplies kl_coef"),
    (["ppo.kl_loss_estimator=k3"], "ppo.kl_loss_estimator: given, but ppo.kl_loss_coef = 0"),
    (["ppo.missing_eos_penalty=1", "ppo.truncation=drop"], "ppo.missing_eos_penalty: given 1.0, but .* 'drop'"),
    ([NO_PAIRS, "reward.source=checkpoint"], "reward.checkpoint: not given"),
    (["reward.checkpoint=x"], "reward.checkpoint: given, but reward.source = 'train' loads no reward model"),
    (["reward.function=a:b"], "reward.function: given, but reward.source = 'train' calls no function"),
    ([*CALLED, "reward.function=''"], "reward.function: given '', but .* needs 'module:name'"),
    ([*CALLED, "reward.function=a.b"], "reward.function: given 'a.b'"),
    ([*CALLED, "critic.init=reward"], "critic.init: 'reward' copies the reward model"),
    ([*OWN_MODEL, "reward.model=''"], "reward.model: given '', but .* needs a sequence classifier"),
    ([*OWN_MODEL, "reward.model=x.gguf"], "reward.model: given 'x.gguf', but .* which GGUF files do not hold"),
    ([*OWN_MODEL, "reward.model=package:a/b"], "reward.model: given 'package:a/b'"),
    ([*OWN_MODEL, "critic.init=reward"], "critic.init: 'reward' copies the reward model, .* is of another family"),
    ([*OWN_MODEL, "reward.label.GOOD=0.0"], "reward.label: given {'GOOD': 0.0}; allowed: factors of"),
    ([*OWN_MODEL, "reward.label.GOOD=inf"], "reward.label.GOOD: given inf; allowed: finite"),
    ([*OWN_MODEL, "reward.template='{prompt}'"], "reward.template: given '{prompt}', which leaves the resp"),
    ([*OWN_MODEL, "reward.template='{answer}'"], "reward.template: given '{answer}', which asks for 'answer'"),
    ([*OWN_MODEL, "reward.template='{response'"], "reward.template: given '{response', which cannot be read"),
    ([*OWN_MODEL, "reward.template='{response:5}'"], "reward.template: given .*, which formats a text as"),
    ([*OWN_MODEL, "reward.standardise=true"], "reward.standardise: given, but reward.source = 'model'"),
    ([*OWN_MODEL, "reward.retries=3"], "reward.retries: given, but reward.source = 'model' calls no function"),
    (["reward.engine=onnx"], "reward.engine: given, but reward.source = 'train' brings no model of another family"),
    ([*LOADED, "reward.model=x/y"], "reward.model: given, but reward.source = 'checkpoint'"),
    ([*OWN_MODEL, "reward.engine=onnx", "precision.reward=bfloat16"], "precision.reward: given, but reward.engine"),
    ([*OWN_MODEL, "reward.engine=onnx_int8", "reward.residency=park"], "reward.residency: given, but .* holds its"),
    ([*OWN_MODEL, "reward.engine=onnx", "reward.device=cpu"], "reward.device: given, but reward.engine = 'onnx'"),
    ([*OWN_MODEL, "reward.residency=cpu"], "reward.residency: given 'cpu' beside .* try reward.device = 'cpu'"),
    (
        ["reference.model=a/b", "reference.residency=service", "service.url=http://a:1", "precision.reference=int8"],
        "precision.reference: given 'int8' beside reference.residency = 'service'",
    ),
    ([*LOADED, "reward.num_epochs=2"], "reward.num_epochs: given, but"),
    ([*LOADED, "reward.init=base"], "reward.init: given, but reward.source = 'checkpoint' trains no reward model"),
    (["reward.retries=3"], "reward.retries: given, but reward.source = 'train' calls no function"),
    ([*LOADED, "reward.retries=3"], "reward.retries: given, but reward.source = 'checkpoint' calls no function"),
    ([*LOADED, "reward.on_failure=drop"], "reward.on_failure: given, but reward.source = 'checkpoint'"),
    (LOADED[1:], "data.pairs: given, but reward.source = 'checkpoint' trains no reward model"),
    (CALLED[1:], "data.pairs: given, but reward.source = 'function' trains no reward model"),
    ([*CALLED, "data.pairs_test.path=d.csv"], "data.pairs_test: given, but reward.source = 'function'"),
    (
        ["ppo.steps=3", "ppo.warmup_steps=13"],
        "ppo.warmup_steps: given 13, but there are 12 optimizer steps in all, .*; allowed: at most 12",
    ),
    (["ppo.steps=3", "critic.warmup_rollouts=1", "ppo.warmup_steps=9"], "ppo.warmup_steps: given 9, .* at most 8"),
    (
        ["ppo.steps=3", "ppo.mini_batch_size=8", "ppo.micro_batch_size=8", "critic.warmup_steps=49"],
        "critic.warmup_steps: given 49, but there are 48 optimizer steps",
    ),
    (["stages=[]"], "stages: given .., allowed: at least one"),
    (["stages=['ppo', 'sft']"], r"stages: given \['ppo', 'sft'\]; .* try \['sft', 'ppo'\]"),
    (["stages=['sft', 'sft']"], r"stages: given \['sft', 'sft'\]; .* try \['sft'\]"),
    (["critic.warmup_rollouts=30"], "critic.warmup_rollouts: given 30, so that the actor never moves"),
    (["sampling.stop_strings=['']"], "sampling.stop_strings: an empty text"),
    (["evaluation.every=5"], "evaluation.every: given, but without data.prompts_test nothing is evaluated"),
    (["checkpoint.best_metric=eval_kl_mean"], "checkpoint.best_metric: given, but without data.prompts_test"),
    (["checkpoint.best_mode=min"], "checkpoint.best_mode: given, but without data.prompts_test"),
    (["critic.head_width=8"], "critic.head_width: given, but critic.heads = 'scalar' has one value"),
    (["critic.heads=vector", "critic.head_width=8"], "critic.head_width: given, but critic.heads = 'vector' has no"),
    (["critic.loss_balance=uncertainty"], "critic.loss_balance: given, but critic.heads = 'scalar' has one value"),
    (["ppo.whiten_dimensions=true"], "ppo.whiten_dimensions: given, but critic.heads = 'scalar' has one value"),
    (
        ["critic.heads=vector", "critic.loss_balance=grad_norm", "critic.loss_weights.score=2.0"],
        "critic.loss_weights: given, but critic.loss_balance = 'grad_norm' finds them",
    ),
    (
        ["critic.heads=multi", "critic.loss_weights.kindness=2.0"],
        "critic.loss_weights.kindness: no value has this name; allowed: score, penalties",
    ),
    (["critic.heads=vector", "critic.value_clip_eps.score=-1.0"], "critic.value_clip_eps.score: given -1.0; allowed"),
    (
        ["critic.heads=vector", "critic.loss_weights={score = 0.0, penalties = 0.0}"],
        "critic.loss_weights: every one is 0",
    ),
    (
        [*PARTS, "reward.parts.penalties={source = 'function', function = 'a:b'}", "critic.heads=vector"],
        "reward.parts.penalties: a critic of several values has one of this name",
    ),
    (["reward.weights=sampled"], "reward.weights: given, but reward.source = 'train' adds nothing up"),
    ([*PARTS, "reward.weights_concentration=2.0"], "reward.weights_concentration: given, but reward.weights = 'fixed'"),
    (
        [*PARTS, "reward.weights=sampled", "reward.parts.kind.weight=-1.0"],
        "reward.parts.kind.weight: given -1.0 beside reward.weights = 'sampled', whose mean it is",
    ),
    (["data.texts.columns.txt=review"], "data.texts.columns: given txt; allowed on the left: text, prompt"),
    (["data.texts.path=''"], "data.texts.path: given an empty text"),
    (["output=''"], "output: given an empty text"),
    (["model.path=''"], "model.path: given an empty text"),
]  # fmt: skip


@pytest.mark.parametrize(("overrides", "message"), REFUSED)
def test_contradictions_are_refused(overrides: list[str], message: str) -> None:
    """FAULTS C8 (KL in the reward and in the loss) and N2 (requirements found at start) are among them."""
    import re

    problems = found(*overrides)
    assert len(problems) == 1, problems
    assert re.match(message, problems[0]), problems[0]


@pytest.mark.parametrize(
    "overrides",
    [
        [
            "ppo.rollout_batch_size=24",
            "ppo.mini_batch_size=12",
            "ppo.micro_batch_size=4",
            "sampling.responses_per_prompt=3",
        ],
        ["ppo.kl_coef=0", "ppo.kl_loss_coef=0.1", "ppo.kl_loss_estimator=k3"],
        ["ppo.kl_coef=0"],
        ["ppo.dual_clip=3"],
        ["ppo.kl_controller=adaptive", "ppo.kl_target=3", "ppo.kl_horizon=100"],
        ["ppo.length_penalty=0.1", "ppo.length_range=[8, 0]"],
        ["ppo.length_penalty=0.1", "ppo.length_range=[0, 9]"],
        ["ppo.missing_eos_penalty=1"],
        ["critic.heads=vector"],
        [*PARTS, "critic.heads=multi", "critic.loss_weights={brief = 2.0}", "critic.value_clip_eps.penalties=0.0"],
        [*PARTS, "critic.heads=vector", "critic.loss_balance=grad_norm", "ppo.whiten_dimensions=true"],
        [*PARTS, "reward.weights=sampled", "reward.weights_concentration=0.5"],
        [*CALLED, "reward.function=pack.mod:name", "critic.init=base"],
        [*CALLED, "reward.retries=0", "reward.on_failure=drop"],
        LOADED,
        OWN_MODEL,
        [*OWN_MODEL, "reward.template=chat", "reward.engine=onnx_int8", "reward.max_tokens=9", "reward.label.A=-1"],
        [
            *OWN_MODEL,
            "reward.template='Q: {{{prompt}}} A: {response}'",
            "precision.reward=bfloat16",
            "reward.device=cpu",
        ],
        [*OWN_MODEL, "critic.init=base", "reward.residency=stream", "reference.model=owner/larger"],
        [
            *OWN_MODEL,
            "precision.reward=int8",
            "reference.model=a/b",
            "precision.reference=nf4",
            "sharing.mode=adapters",
        ],
        [
            *OWN_MODEL,
            "reference.model=a/b",
            "reference.residency=cpu",
            "trunk.train=true",
            "precision.compute=bfloat16",
        ],
        [*OWN_MODEL, "sampling.overlap_scoring=true", "reward.residency=park", "sampling.batch_size=4"],
        ["reference.model=a/b", "reward.residency=service", "service.url=http://a:1", "precision.frozen=nf4"],
        [*OWN_MODEL, "reference.residency=service", "service.url=http://a:1"],
        [*OWN_MODEL, "reward.residency=service", "service.url=http://a:1", "precision.reward=int8"],
        [*OWN_MODEL, "reward.engine=onnx_int8", "reward.residency=service", "service.url=http://a:1"],
        ["reference.model=a/b", "reference.residency=service", "service.url=http://a:1"],
        ["stages=['ppo']"],
        ["stages=['reward']", "reward.init=sft"],
        ["ppo.steps=3", "critic.warmup_rollouts=1", "ppo.warmup_steps=8", "critic.warmup_steps=12"],
        ["sharing.mode=none"],
        [EVALUATED, "evaluation.every=5", "checkpoint.best_metric=eval_judge_mean", "checkpoint.best_mode=min"],
        ["checkpoint.best_metric=score_mean", "checkpoint.best_mode=min"],
        ["critic.betas=[0, 0.999]", "critic.warmup_rollouts=29"],
        ["data.pairs.columns={chosen = 'better', rejected = 'worse'}"],
    ],
)
def test_what_belongs_together_is_allowed(overrides: list[str]) -> None:
    assert found(*overrides) == []


BARE = 'output = "runs/x"\nmodel.path = "owner/model"\n'


def test_each_stage_needs_its_data() -> None:
    """FAULTS N2: missing requirements are found at start."""
    keys = [problem.partition(":")[0] for problem in found(base=BARE)]
    assert keys == ["reward.standardise", "data.texts", "data.prompts", "data.pairs"]
    assert found("data.texts.path=a.csv", "stages=['sft']", base=BARE) == []
    assert found("data.prompts.path=a.csv", "stages=['ppo']", base=BARE) == []
    assert found("data.pairs.path=a.csv", "stages=['reward']", "reward.standardise=false", base=BARE) == []
    assert found("data.prompts.path=a.csv", "stages=['reward', 'ppo']", *CALLED[1:], base=BARE) == []


def test_many_contradictions_are_listed_together() -> None:
    problems = found("ppo.mini_batch_size=5", "ppo.dual_clip=1", "sharing.mode=none", "trunk.branch_layers=2")
    keys = [problem.partition(":")[0] for problem in problems]
    assert keys == ["ppo.mini_batch_size", "ppo.micro_batch_size", "ppo.dual_clip", "trunk.branch_layers"]


def test_a_huge_batch_is_refused_at_once() -> None:
    assert "try 2" in found(f"sft.batch_size={2 * (10**9 + 7)}", "sft.micro_batch_size=3")[0]


def test_a_rollout_too_small_for_a_mini_batch_is_one_problem() -> None:
    """Turns over a trunk, which are off, are not counted in it."""
    [problem] = found("curriculum.steps=3", "curriculum.start_rollout_batch_size=3")
    assert problem.startswith("curriculum.start_rollout_batch_size: given 3; allowed: a multiple of 32")


def test_a_default_written_down_is_given() -> None:
    tree = tomllib.loads(BASE)
    apply_override(tree, "ppo.steps=30")
    config = parse_config(tree, "test")
    assert is_given(config, "ppo.steps") and not is_given(config, "ppo.num_epochs") and not is_given(config, "sft.eps")
    assert "ppo.kl_target" in ignored_keys(config)


def test_reward_training_lists_every_optimizer_setting() -> None:
    assert set(OptimizerSection.model_fields) <= set(REWARD_TRAINING) <= set(RewardSection.model_fields)


def test_paged_optimizers_on_a_cpu_are_refused() -> None:
    for section in ("sft", "reward", "ppo", "critic"):
        [problem] = found("system.device=cpu", f"{section}.optimizer=paged_adamw_8bit")
        assert problem.startswith(f"{section}.optimizer: given 'paged_adamw_8bit'") and "on the CPU" in problem
    assert found("system.device=cuda", "ppo.optimizer=paged_adamw") == []
    [problem] = found("system.device=cuda", "ppo.optimizer=paged_adamw", "memory.optimizer_residency=park")
    assert "both move the states" in problem


def test_steps_in_backward_exclude_what_needs_all_gradients() -> None:
    """Each problem says what to set; with all of that set there is none."""
    early = "memory.optimizer_in_backward=true"
    free = [f"{section}.max_grad_norm=0" for section in ("sft", "reward", "ppo", "critic")]
    problems = found(early)
    assert [p.split(":")[0] for p in problems] == [key.split("=")[0] for key in free]
    assert all(f"set {key.replace('=', ' = ')}" in p for p, key in zip(problems, free, strict=True))
    assert found(early, *free) == []
    for section, batch in (("sft", "batch_size"), ("reward", "batch_size"), ("ppo", "mini_batch_size")):
        [problem] = found(early, *free, f"{section}.micro_batch_size=16")
        assert f"set {section}.micro_batch_size = 32, or {section}.{batch} = 16" in problem
    for setting, said in (("micro_batch_tokens=64", "tokens = 0"), ("target_kl=0.1", "leave target_kl out")):
        [problem] = found(early, *free, f"ppo.{setting}")
        assert said in problem


def test_residency_of_what_is_not_there_is_ignored() -> None:
    function = ["reward.source=function", "reward.function=a:b", "critic.init=actor", NO_PAIRS]
    [problem] = found(*function, "reward.residency=park")
    assert "has no reward model" in problem
    # `fourfold sft CONFIG` and `fourfold ppo CONFIG` read the same file.
    assert found('stages=["sft"]', "reference.residency=park", "reward.residency=stream") == []


def test_roles_at_a_service_need_its_address() -> None:
    at = "reference.residency=service"
    [problem] = found(at)
    assert problem.startswith("service.url: not given, but reference.residency = 'service' needs")
    for url in ("127.0.0.1:8777", "ftp://a:1", "http://", "http://a:99999", "http://a:b"):
        [problem] = found(at, "reward.residency=service", f"service.url={url}")
        assert "is no http:// or https:// address, but reference.residency and reward.residency" in problem
    [problem] = found(at, "service.url=http://user:secret@host:1")
    assert "a token stands in service.token_env" in problem
    address = "service.url=http://127.0.0.1:8777"
    for url in ("https://scores.example/team", "http://localhost:1"):
        assert found(at, f"service.url={url}") == []
    [problem] = found(address)
    assert "no role has residency = 'service'" in problem
    [problem] = found(at, address, "service.max_rows=31")
    assert "fewer than the ppo.micro_batch_size = 32" in problem
    [problem] = found(at, address, "ppo.kl_estimator=full")
    assert "try residency = 'park'" in problem
    assert found("reward.residency=service", address, "ppo.kl_estimator=full") == []


def test_fewer_bits_for_what_is_not_there_are_ignored() -> None:
    for mode, given, why in (
        ("none", "precision.frozen=int8", "shares no frozen weights"),
        ("adapters", "precision.reference=nf4", "holds one base for all roles, as precision.frozen says"),
        ("adapters", "precision.reward=nf4", "holds one base for all roles"),
    ):
        [problem] = found(f"sharing.mode={mode}", given)
        assert problem.startswith(given.partition("=")[0]) and why in problem
    function = ["reward.source=function", "reward.function=a:b", "critic.init=actor", NO_PAIRS]
    [problem] = found(*function, "precision.reward=int8")
    assert "has no reward model" in problem
    assert found("sharing.mode=adapters", "precision.frozen=nf4") == []
    assert found("precision.frozen=int8", "precision.reference=int8_dynamic", "precision.reward=nf4") == []


def test_a_trained_trunk_has_weights_and_gradients_of_its_own() -> None:
    [problem] = found("trunk.train=true", "precision.frozen=int8")
    assert "trains a copy of the trunk's weights" in problem
    [problem] = found("trunk.train=true", "memory.optimizer_residency=offload")
    assert "allowed there: 'keep', 'park'" in problem


def test_a_role_at_a_service_is_held_as_this_run_would() -> None:
    for role in ("reference", "reward"):
        at = [f"{role}.residency=service", "service.url=http://127.0.0.1:8777", f"precision.{role}=int8"]
        assert any("must be this run's own" in problem for problem in found(*at))


def test_a_project_is_for_trackers_that_have_one() -> None:
    for also in ([], ["tracking.trackers=['tensorboard']"]):
        [problem] = found("tracking.project=mine", *also)
        assert "tracking.project" in problem and "neither 'wandb' nor 'trackio'" in problem
    assert found("tracking.project=mine", "tracking.trackers=['trackio']") == []
