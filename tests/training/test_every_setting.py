"""FAULTS F13: every public setting changes something that can be seen.

Each setting of the schema is a row of ROWS (two values that lead to two results) or an entry of SHOWN (the test that
shows what it does). A new setting fails here until it is in one of the two.
"""

from __future__ import annotations

import ast
from collections.abc import Mapping
from pathlib import Path
from types import MappingProxyType
from typing import Any, NamedTuple

import pytest
from torch import Tensor

from fourfold.backends import local
from fourfold.config.checks import DATASETS
from fourfold.config.describe import all_settings
from training.observed import (
    Scene,
    See,
    adapter_sizes,
    attention_kernel,
    checkpoints,
    compute_type,
    evaluated_prompts,
    evaluations,
    judged,
    kept_files,
    metric,
    ppo_passes,
    prompts,
    records,
    samples_shown,
    sampling_passes,
    stage_checkpoints,
    supervised_passes,
    threads,
    tokens,
    trunk_layers,
    types_held,
    weights,
    what_a_failing_function_leads_to,
)
from training.shown_parts import OF_PARTS, OF_RULES

TESTS = Path(__file__).parents[1]
BEST = "training/test_pipeline.py::test_the_best_checkpoint_is_that_of_the_named_metric"
PRECISION = "training/test_half_roles.py"
OPTIMIZERS = "memory/test_optimizers.py"
NAMED = "training/test_every_setting.py::test_every_section_names_its_optimizer"
GROWS = "training/test_curriculum.py"
CONFLICTS, VECTOR = "training/test_conflicting_rewards.py", "training/test_vector_runs.py"
CRITICS, VLLM = "training/test_critics.py", "rollout/test_vllm.py"
SERVICE, SERVER = "training/test_service.py", "scoring/service/test_server.py"
ONLY_VALUE = "config/test_loading.py::test_an_error_says_key_given_and_allowed"
SHOWN = {
    "sft.tell_weights": "training/test_told_texts.py::test_a_policy_heeds_weights_by_the_texts_alone",
    "output": "training/test_pipeline.py::test_the_number_of_steps_is_the_number_of_rows",
    "stages": "training/test_pipeline.py::test_stages_one_by_one_equal_the_whole",
    "model.path": "models/test_loading.py::test_what_is_no_model_is_refused_with_what_is_allowed",
    "model.cache": "models/test_loading.py::test_a_gguf_file_is_converted_once_into_the_same_model",
    "sharing.mode": "models/test_roles.py::test_separate_models_share_no_tensor",
    "memory.activation_offload": "memory/test_activation_offload.py::test_a_step_with_activation_offload_is_bit_equal",
    "memory.budget_gib": "training/test_out_of_memory.py::test_a_real_budget_gib_halves_and_the_update_is_bit_equal",
    "memory.levers": "training/test_planned.py::test_a_run_chooses_levers_that_fit_and_goes_on_with_them",
    "memory.count_tensors": "training/test_timeline.py::test_count_tensors_fills_in_the_bytes_of_live_tensors",
    "system.device": "models/test_loading.py::test_a_cuda_device_that_is_absent_is_refused",
    "memory.optimizer_residency": f"{OPTIMIZERS}::test_parked_states_are_in_memory_for_one_parameter_in_the_step_only",
    "memory.optimizer_in_backward": f"{OPTIMIZERS}::test_steps_in_backward_are_the_same_and_gradients_go_at_once",
    "precision.reward": f"{PRECISION}::test_a_frozen_role_computes_as_a_model_rounded_to_its_type",
    "precision.max_reference_bias": f"{PRECISION}::test_a_reference_beyond_the_bound_is_refused",
    "reward.residency": "training/test_residency.py::test_roles_are_in_memory_in_their_phase_only",
    "service.url": f"{SERVICE}::test_a_run_whose_service_dies_fails_and_goes_on_with_the_next_to_the_same_end",
    "service.token_env": f"{SERVICE}::test_a_wrong_token_stops_the_run_at_its_start",
    "service.timeout_seconds": f"{SERVER}::test_a_slow_service_is_waited_for_no_longer_than_timeout_seconds",
    "service.retries": f"{SERVER}::test_what_fails_is_asked_again",
    "service.max_rows": f"{SERVICE}::test_max_rows_is_the_most_of_one_request",
    **dict.fromkeys(("sft.optimizer", "reward.optimizer", "critic.optimizer", "ppo.optimizer"), NAMED),
    "sft.checkpoint": "training/test_sft_checkpoint.py::test_a_whole_run_from_an_adapter_of_peft",
    "reward.source": "training/test_resume.py::test_every_checkpoint_of_the_reward_stage_is_a_reward_model",
    "reward.checkpoint": "training/test_resume.py::test_every_checkpoint_of_the_reward_stage_is_a_reward_model",
    "reward.function": "scoring/test_sources.py::test_a_function_is_found_by_name",
    "reward.timeout_seconds": "training/test_pipeline.py::test_a_function_alone_has_a_time_limit",
    "reward.on_failure": "training/test_pipeline.py::test_failed_scores_stop_the_run_or_are_dropped",
    **{f"reward.parts.NAME.{name}": test for name, test in OF_PARTS.items()},
    **{f"reward.parts.NAME.rules.NAME.{name}": f"scoring/test_rules.py::{test}" for name, test in OF_RULES.items()},
    "reward.weights": f"{CONFLICTS}::test_weights_that_were_sampled_in_training_can_be_chosen_afterwards",
    "reward.weights_concentration": (
        "data/test_told_weights.py::test_their_mean_is_that_of_the_settings_and_their_spread_that_of_dirichlet"
    ),
    "critic.loss_weights": f"{VECTOR}::test_fixed_weights_scale_the_losses_and_0_learns_nothing",
    "critic.value_clip_eps": f"{VECTOR}::test_a_clip_range_of_its_own",
    "reward.device": "models/test_external.py::test_where_and_how_wide_auto_is",
    "reference.checkpoint": "training/test_priors.py::test_another_checkpoint_is_the_reference",
    "evaluation.max_texts": "training/test_priors.py::test_evaluations_tell_the_drift_and_the_loss_on_held_out_texts",
    "reference.engine": "scoring/service/test_llama_server.py::test_a_run_whose_reference_is_a_llama_server",
    "reward.engine": "training/test_own_models.py::test_a_run_scored_by_onnx_runtime",
    "reward.model": "models/test_external.py::test_a_batch_is_scored_as_each_text_by_hand",
    "reward.init": "training/test_pipeline.py::test_a_reward_model_that_is_to_start_from_an_sft_needs_one",
    "critic.layers": "models/test_critics.py::test_a_critic_of_the_lowest_layers_computes_what_a_shorter_model_does",
    "critic.model": "models/test_critics.py::test_a_critic_with_a_model_of_its_own_shares_nothing_and_reads_ids",
    "critic.pretrain_rollouts": f"{CRITICS}::test_pretraining_learns_the_score_at_every_position_and_moves_nobody_else",
    "critic.updates_per_actor": f"{CRITICS}::test_the_critic_learns_n_mini_batches_before_each_of_the_actors",
    "critic.dropout": f"{CRITICS}::test_dropout_is_for_learning_only",
    "critic.ensemble": f"{CRITICS}::test_each_head_has_a_loss_of_its_own",
    "critic.init": "models/test_assembly.py::test_the_critic_starts_from_the_named_source",
    "ppo.importance": "training/test_importance.py::test_what_is_logged_of_the_weights",
    "critic.warmup_rollouts": "training/test_update.py::test_critic_warm_up_leaves_the_actor_alone",
    "sampling.overlap_scoring": "scoring/test_ahead.py::test_overlap_scoring_works_beside_sampling",
    "sampling.engine": "rollout/test_llama_sampler.py::test_it_draws_from_the_adapters_as_they_are_now",
    **dict.fromkeys(("sampling.requests", "sampling.token_env"), f"{VLLM}::test_rows_are_asked_for_so_many_at_a_time"),
    **dict.fromkeys(
        ("sampling.retries", "sampling.timeout_seconds"), f"{VLLM}::test_a_row_that_fails_is_asked_for_again"
    ),
    "sampling.url": f"{VLLM}::test_it_draws_from_the_adapters_as_they_are_now",
    "sampling.max_gap": "rollout/test_quantised.py::test_a_rollout_beyond_the_bound_is_drawn_again_and_says_so",
    "sampling.top_p": ONLY_VALUE,
    "sampling.top_k": ONLY_VALUE,
    **dict.fromkeys(
        ("curriculum.steps", "curriculum.start_new_tokens", "curriculum.start_rollout_batch_size"),
        f"{GROWS}::test_a_run_grows_and_says_so",
    ),
    "checkpoint.best_metric": BEST,
    "checkpoint.best_mode": BEST,
    "tracking.trackers": "training/test_pipeline.py::test_tensorboard_gets_every_row",
    "tracking.project": "training/test_pipeline.py::test_a_tracker_of_another_project_gets_every_row_with_the_settings",
}


class Row(NamedTuple):
    """A setting, two values, what differs between them, and what else both are given."""

    key: str
    one: Any
    other: Any
    see: See
    stage: str = "ppo"
    also: Mapping[str, Any] = MappingProxyType({})


def optimizer(section: str, stage: str, see: See) -> list[Row]:
    """The settings that every trained role has."""
    values: dict[str, tuple[Any, Any]] = {
        "learning_rate": (1e-2, 1e-3),
        "schedule": ("constant", "linear"),
        "warmup_steps": (0, 3),
        "betas": ([0.9, 0.95], [0.0, 0.5]),
        "eps": (1e-8, 1.0),
        "weight_decay": (0.0, 10.0),
        "max_grad_norm": (1.0, 1e-9),  # Adam does not see the scale of gradients, unless they are as small as eps
    }
    return [Row(f"{section}.{name}", *pair, see, stage) for name, pair in values.items()]


def supervised(section: str) -> list[Row]:
    """The settings that sft and reward share."""
    return [
        *optimizer(section, section, weights("role")),
        Row(f"{section}.num_epochs", 1, 2, weights("role"), section),
        Row(f"{section}.batch_size", 4, 8, weights("role"), section),
        Row(f"{section}.micro_batch_size", 4, 2, supervised_passes, section),
    ]


def dataset(name: str) -> list[Row]:
    """Where a data set comes from; without `columns` each has a column of its standard name."""
    standard = "text" if name.startswith("texts") else "prompt"
    key, wide = f"data.{name}", {f"data.{name}.path": "FOLDER/wide.jsonl"}
    return [
        Row(f"{key}.path", f"FOLDER/data/{name}.jsonl", "FOLDER/wide.jsonl", records(name), "all"),
        Row(f"{key}.columns", {}, {standard: "other"}, records(name), "all", wide),
        Row(f"{key}.max_rows", 8, 3, records(name), "all"),
    ]


ADAPTED = {"sharing.mode": "adapters", "trunk": None}
TRAINED = {"trunk.train": True}
MOVING = {"reference.prior": "moving"}
SEVERAL = {"critic.heads": "vector"}
ADAPTIVE = {"ppo.kl_controller": "adaptive", "ppo.kl_estimator": "k2", "ppo.steps": 3}
OWN_REWARD = {
    "reward.source": "model",
    "reward.model": "FOLDER/classifier",
    "reward.function": None,
    "reward.label": {"GOOD": 1.0},
}
ALL_TOKENS = list(range(4, 160))
ROWS = [
    Row("seed", 0, 1, prompts),
    Row("trunk.branch_layers", 2, 1, trunk_layers),
    Row("trunk.train", False, True, metric("trunk_drift")),
    Row("trunk.lr_scale", 0.1, 1.0, metric("trunk_drift"), also=TRAINED),
    Row("trunk.critic_grad_scale", 0.5, 0.0, metric("trunk_grad_norm"), also=TRAINED),
    Row("trunk.balance", "none", "grad_norm", metric("trunk_critic_scale_mean"), also=TRAINED),
    Row("trunk.alternate", 0, 1, metric("actor_optimizer_steps"), also=TRAINED),
    Row("trunk.decoupling", 0.0, 1.0, weights("critic"), also=TRAINED),
    Row("adapters.rank", 4, 2, adapter_sizes, also=ADAPTED),
    Row("adapters.alpha", 4.0, 64.0, weights("actor"), also=ADAPTED),
    Row("adapters.targets", [], ["q_proj"], adapter_sizes, also=ADAPTED),
    Row("adapters.layers", 0, 2, trunk_layers, also=ADAPTED),
    Row("adapters.dora", False, True, adapter_sizes, also=ADAPTED),
    Row("adapters.rslora", False, True, weights("actor"), also=ADAPTED),
    Row("precision.compute", "float32", "bfloat16", compute_type),
    Row("precision.critic", "float32", "bfloat16", metric("value_loss_per_token")),
    Row("reference.model", "", "FOLDER/other", metric("reference_score_flops")),
    Row("reference.prior", "step_0", "uniform", metric("kl_per_token_mean")),
    Row("reference.decay", 0.5, 0.9, metric("kl_per_token_mean"), also=MOVING),
    Row("reference.copy_every", 0, 1, metric("kl_per_token_mean"), also=MOVING),
    Row("reference.log_step_0", True, False, metric("reference_score_flops"), also=MOVING),
    Row("precision.frozen", "bfloat16", "int8", types_held),
    Row("precision.reference", "bfloat16", "int8", metric("kl_per_token_mean")),
    Row("precision.loss_scale", 64.0, 32.0, metric("loss_scale"), also={"precision.compute": "float16"}),
    Row("reference.residency", "keep", "park", metric("reference_moved_bytes")),
    Row("memory.checkpointing", "none", "layers", metric("actor_learn_flops")),
    Row("memory.attention", "sdpa", "eager", attention_kernel),
    Row("memory.checkpoint_every", 1, 2, metric("actor_learn_flops"), also={"memory.checkpointing": "layers"}),
    Row("system.threads", 1, 2, threads),
    *[row for name in DATASETS for row in dataset(name)],
    Row("data.max_prompt_tokens", 6, 2, tokens("prompts"), "all"),
    Row("data.max_text_tokens", 12, 9, tokens("texts"), "all"),
    Row("data.truncation", "right", "left", tokens("texts"), "all"),
    *supervised("sft"),
    Row("sft.max_texts", 0, 3, tokens("texts"), "all"),
    *supervised("reward"),
    Row("reward.max_pairs", 0, 3, tokens("pairs"), "all"),
    Row("reward.standardise", True, False, weights("role"), "reward"),
    Row(
        "reward.retries",
        0,
        1,
        what_a_failing_function_leads_to,
        also={"reward.function": "training.observed:fails_every_other_time"},
    ),
    Row("reward.label", {"GOOD": 1.0}, {"BAD": 1.0}, metric("score_mean"), also=OWN_REWARD),
    Row("reward.template", "", "a: {response}", metric("score_mean"), also=OWN_REWARD),
    Row("reward.max_tokens", 0, 4, metric("reward_forward_tokens"), also=OWN_REWARD),
    *optimizer("critic", "ppo", weights("critic")),
    Row("critic.heads", "scalar", "vector", weights("critic")),
    Row("critic.head_width", 4, 8, weights("critic"), also={"critic.heads": "multi"}),
    Row("critic.loss_balance", "fixed", "uncertainty", metric("value_loss_per_token"), also=SEVERAL),
    Row("sampling.weights", "as_trained", "nf4", metric("sampler_gap_mean")),
    Row("sampling.max_new_tokens", 4, 6, metric("response_length_max")),
    Row("sampling.temperature", 1.0, 0.5, metric("entropy_per_token_mean")),
    Row("sampling.responses_per_prompt", 1, 2, prompts),
    Row("sampling.batch_size", 0, 2, sampling_passes),
    Row("sampling.stop_strings", [], ["a", "e", "t", "s"], metric("response_length_mean")),
    Row("sampling.extra_eos_token_ids", [20, 21], ALL_TOKENS, metric("response_length_mean")),
    *optimizer("ppo", "ppo", weights("actor")),
    Row("ppo.steps", 2, 3, metric("episodes")),
    Row("ppo.rollout_batch_size", 4, 8, metric("episodes")),
    Row("ppo.mini_batch_size", 2, 4, metric("optimizer_steps")),
    Row("ppo.micro_batch_size", 2, 1, ppo_passes),
    Row("ppo.micro_batch_tokens", 0, 1, ppo_passes),
    Row("ppo.num_epochs", 1, 2, metric("epochs_run")),
    Row("ppo.clip_eps", 0.2, 1e-4, metric("policy_clip_fraction")),
    Row("ppo.clip_eps_high", 0.0, 1e-4, metric("policy_clip_fraction")),
    Row("ppo.dual_clip", 0.0, 1.001, metric("dual_clip_fraction")),
    Row(
        "ppo.importance_cap",
        2.0,
        0.5,
        metric("importance_weight_mean"),
        also={"ppo.importance": "token"},
    ),
    Row("ppo.value_clip_eps", 0.2, 1e-4, metric("value_clip_fraction")),
    Row("ppo.value_coef", 1.0, 2.0, metric("critic_grad_norm")),
    Row("ppo.entropy_coef", 0.0, 1.0, weights("actor")),
    Row("ppo.gamma", 1.0, 0.5, metric("return_mean")),
    Row("ppo.gae_lambda", 0.95, 0.0, metric("return_mean")),
    Row("ppo.whiten_advantages", True, False, metric("advantage_std")),
    Row("ppo.whiten_dimensions", False, True, metric("advantage_std"), also=SEVERAL | {"ppo.whiten_advantages": False}),
    Row("ppo.target_kl", None, 1e-9, metric("early_stopped")),
    Row("ppo.kl_coef", 0.05, 1.0, metric("reward_per_sequence_mean")),
    Row("ppo.kl_estimator", "k1", "k2", metric("kl_per_sequence_mean")),
    Row("ppo.kl_controller", "fixed", "adaptive", metric("kl_coef")),
    Row("ppo.kl_target", 6.0, 1e-4, metric("kl_coef"), also=ADAPTIVE),
    Row("ppo.kl_horizon", 10_000, 10, metric("kl_coef"), also=ADAPTIVE),
    Row("ppo.kl_loss_coef", 0.0, 1.0, weights("actor"), also={"ppo.kl_coef": 0.0}),
    Row(
        "ppo.kl_loss_estimator",
        "k2",
        "k3",
        metric("actor_grad_norm"),
        also={"ppo.kl_coef": 0.0, "ppo.kl_loss_coef": 1.0},
    ),
    Row("ppo.score_clip", 0.0, 0.1, metric("score_shaped_mean")),
    Row("ppo.reward_normalization", "none", "running", metric("score_shaped_mean")),
    Row("ppo.missing_eos_penalty", 0.0, 1.0, metric("score_shaped_mean")),
    Row("ppo.length_penalty", 0.5, 1.0, metric("score_shaped_mean"), also={"ppo.length_range": [2, 2]}),
    Row("ppo.length_range", [1, 1], [3, 3], metric("score_shaped_mean"), also={"ppo.length_penalty": 1.0}),
    Row("ppo.truncation", "terminal", "drop", metric("dropped_rows")),
    Row("evaluation.every", 0, 1, evaluations),
    Row("evaluation.max_prompts", 8, 3, tokens("prompts_test")),
    Row("evaluation.responses_per_prompt", 1, 2, evaluated_prompts),
    Row("evaluation.judge", "none", "vader", judged),
    Row("evaluation.samples", 8, 2, samples_shown),
    Row("evaluation.keep_rollouts", True, False, kept_files),
    Row("checkpoint.every", 1, 2, checkpoints),
    Row("checkpoint.keep_last", 1, 2, checkpoints),
    Row("checkpoint.stage_every", 100, 3, stage_checkpoints, "sft"),
]


def differ(one: Any, other: Any) -> bool:
    """Whether two observations differ by more than rounding."""
    if isinstance(one, Tensor):
        return one.shape != other.shape or float((one - other).abs().max()) > 1e-4
    if isinstance(one, list) and one and isinstance(one[0], float):
        return one != pytest.approx(other, rel=1e-6, abs=1e-9)
    return one != other


@pytest.fixture(scope="module")
def scene(tmp_path_factory: pytest.TempPathFactory) -> Scene:
    return Scene(tmp_path_factory.mktemp("scene"))


@pytest.mark.parametrize("row", ROWS, ids=lambda row: row.key)
def test_a_setting_changes_what_is_seen(scene: Scene, row: Row) -> None:
    one, other = (
        row.see(scene, scene.config(row.stage, {**row.also, row.key: value})) for value in (row.one, row.other)
    )
    assert differ(one, other), f"{row.key} = {row.one!r} and {row.other!r} give the same: {one!r}"


@pytest.mark.parametrize(
    ("stage", "see"),
    [("ppo", weights("actor")), ("ppo", weights("critic")), ("sft", weights("role")), ("reward", weights("role"))],
)
def test_the_same_settings_give_the_same(scene: Scene, stage: str, see: See) -> None:
    """Otherwise any row would pass."""
    fresh = Scene(scene.folder)
    config = scene.config(stage, {})
    assert not differ(see(scene, config), see(fresh, config))


def test_every_setting_is_shown_once() -> None:
    rows = [row.key for row in ROWS]
    assert len(rows) == len(set(rows)) and not set(rows) & SHOWN.keys()
    assert set(rows) | SHOWN.keys() == all_settings().keys()


@pytest.mark.parametrize("key", SHOWN)
def test_the_named_test_is_there_and_knows_the_setting(key: str) -> None:
    file, _, name = SHOWN[key].partition("::")
    text = (TESTS / file).read_text(encoding="utf-8")
    assert name in {node.name for node in ast.walk(ast.parse(text)) if isinstance(node, ast.FunctionDef)}
    assert key.rpartition(".")[2] in text


@pytest.mark.parametrize("section", ["sft", "reward", "ppo", "critic"])
def test_every_section_names_its_optimizer(scene: Scene, section: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """What each does is shown in memory/test_optimizers.py; here, that every stage asks for what its section says."""
    asked: list[str] = []
    real = local.make_adamw

    def asks(parameters: Any, given: Any) -> Any:
        asked.append(given.optimizer)
        return real(parameters, given)

    monkeypatch.setattr(local, "make_adamw", asks)
    config = scene.config("ppo" if section == "critic" else section, {f"{section}.optimizer": "adamw_8bit"})
    scene.supervised(config) if section in ("sft", "reward") else scene.trainer(config)
    assert asked == {"ppo": ["adamw_8bit", "adamw"], "critic": ["adamw", "adamw_8bit"]}.get(section, ["adamw_8bit"])


def test_value_coef_scales_the_gradient_of_the_critic(scene: Scene) -> None:
    """Which Adam hides from the weights: three times the coefficient is three times the norm, in the first step."""
    norms = []
    for coef in (1.0, 3.0):
        config = scene.config("ppo", {"ppo.value_coef": coef, "ppo.mini_batch_size": 4, "ppo.steps": 1})
        norms.append(scene.ppo(config).rows[0]["critic_grad_norm"])
    assert norms[0] > 0 and norms[1] == pytest.approx(3 * norms[0], rel=1e-4)
