"""Settings that nothing reads beside others: giving one is an error, and none is saved."""

from __future__ import annotations

from collections.abc import Iterator
from typing import TYPE_CHECKING, Any, Protocol

if TYPE_CHECKING:
    from fourfold.config.schema import PartSection, RewardSection, RunConfig, TrunkSection

# What training a reward model reads; nothing of it is used when the reward comes from elsewhere.
REWARD_TRAINING = (
    *("optimizer", "learning_rate", "schedule", "warmup_steps", "betas", "eps", "weight_decay", "max_grad_norm"),
    *("init", "num_epochs", "batch_size", "micro_batch_size", "max_pairs", "standardise"),
)

# What only a reward model of another family reads.
REWARD_OWN_MODEL = ("model", "label", "template", "max_tokens", "device", "engine")

# What each kind of part of a combined reward reads, besides its source and weight.
FAILING = ("timeout_seconds", "on_failure")
PART_KEYS = {
    "function": ("function", "retries", *FAILING),
    "rules": ("rules",),
    "verifiable": ("task", "task_settings", "size", "seed", "prompt_template", "answer_tag", *FAILING),
    "http": ("url", "token_env", "max_rows", "retries", *FAILING),
    "model": REWARD_OWN_MODEL,
    "trained": ("checkpoint",),
}
# What each kind of rule reads, besides its kind and score.
RULE_KEYS = {
    "regex": ("pattern", "each", "at_most", "inverted"),
    "keywords": ("words", "each", "at_most", "inverted"),
    "length": ("unit", "shortest", "longest", "inverted"),
    "excess": ("unit", "shortest", "longest", "at_most"),
    "format": ("format", "inverted"),
}


class Because(Protocol):
    """Notes keys of a section that nothing reads, and why."""

    def __call__(self, reason: str, section: str, *names: str) -> None: ...


def ignored_keys(config: RunConfig) -> dict[str, str]:
    """Dotted keys that nothing reads with these settings, and why: giving one is an error, and none is saved."""
    ignored: dict[str, str] = {}

    def because(reason: str, section: str, *names: str) -> None:
        ignored.update({f"{section}.{name}": reason for name in names})

    mode = config.sharing.mode
    if mode == "none":
        because("sharing.mode = 'none' has no trunk", "trunk", *type(config.trunk).model_fields)
    if mode == "adapters":
        because("sharing.mode = 'adapters' cuts by adapters.layers", "trunk", *type(config.trunk).model_fields)
    else:
        because(f"sharing.mode = {mode!r} has no adapters", "adapters", *type(config.adapters).model_fields)
    _of_precision(config, because)
    if mode == "trunk":
        _of_the_trunk(config.trunk, because, shared_by_critic=config.critic.of_the_run)
    if not config.critic.of_the_run:
        because("critic.model brings its own weights", "critic", "init", "layers")
    if config.memory.checkpointing == "none":
        because("memory.checkpointing = 'none' keeps every activation", "memory", "checkpoint_every")
    if "ppo" not in config.stages:
        because("stages has no ppo, and a plan is one of ppo", "memory", "levers")
    if "service" not in (config.reference.residency, config.reward.residency):
        reason = "no role has residency = 'service'"
        because(reason, "service", *type(config.service).model_fields)
    _of_the_reward(config.reward, because)
    _of_the_values(config, because)
    if config.ppo.kl_controller == "fixed":
        because("ppo.kl_controller = 'fixed' keeps kl_coef as it is", "ppo", "kl_target", "kl_horizon")
    if config.ppo.kl_loss_coef == 0:
        because("ppo.kl_loss_coef = 0 puts no KL into the loss", "ppo", "kl_loss_estimator")
    if config.importance == "none":
        because(f"ppo.importance = {config.ppo.importance!r} weighs all tokens alike here", "ppo", "importance_cap")
    if not config.sampling.differs:
        because("the local sampler draws from what is trained", "sampling", "max_gap")
    if config.sampling.engine != "local":
        because(f"sampling.engine = {config.sampling.engine!r} holds its weights itself", "sampling", "weights")
        because(
            f"sampling.engine = {config.sampling.engine!r} draws as many rows at once as fit", "sampling", "batch_size"
        )
    if config.sampling.engine != "vllm":
        reason = f"sampling.engine = {config.sampling.engine!r} asks no server"
        because(reason, "sampling", "url", "token_env", "requests", "timeout_seconds", "retries")
    if config.curriculum.steps == 0:
        reason = "curriculum.steps = 0 lets nothing grow"
        because(reason, "curriculum", "start_new_tokens", "start_rollout_batch_size")
    if config.ppo.length_penalty == 0:
        because("ppo.length_penalty = 0 penalises no length", "ppo", "length_range")
    if not {"wandb", "trackio"} & set(config.tracking.trackers):
        because("tracking.trackers holds neither 'wandb' nor 'trackio'", "tracking", "project")
    if config.data.texts_test is None:
        because("without data.texts_test there are no held-out texts", "evaluation", "max_texts")
    if config.data.prompts_test is None:
        reason = "without data.prompts_test nothing is evaluated"
        because(reason, "evaluation", *type(config.evaluation).model_fields)
        if config.checkpoint.best_metric.startswith("eval_"):
            because(reason, "checkpoint", "best_metric", "best_mode")
    return ignored


def _of_precision(config: RunConfig, because: Because) -> None:
    given = config.precision
    if config.sharing.mode == "none":
        because("sharing.mode = 'none' shares no frozen weights", "precision", "frozen")
    if given.compute != "float16":
        because(f"precision.compute = {given.compute!r} scales no losses", "precision", "loss_scale")
    _of_the_reference(config, because)


def _of_the_reference(config: RunConfig, because: Because) -> None:
    given = config.reference
    _of_the_prior(config, because)
    if given.engine != "torch":
        reason = f"reference.engine = {given.engine!r} runs on the CPU and holds its weights itself"
        because(reason, "precision", "reference")
        if given.residency == "service":
            because("a llama-server is asked about one row at a time", "service", "max_rows")
    if not config.reference_differs:
        reason = f"precision.reference = {config.precision.reference!r} computes as the actor does"
        because(reason, "precision", "max_reference_bias")


def _of_the_prior(config: RunConfig, because: Because) -> None:
    given, kind = config.reference, config.reference.kind
    if kind in ("checkpoint", "model"):
        because(f"reference.{kind} names the policy that the KL is taken to", "reference", "prior")
    if kind != "moving":
        because(f"reference.prior = {given.prior!r} does not move", "reference", "decay", "copy_every")
    elif given.copy_every:
        because("reference.copy_every copies the actor and forms no average", "reference", "decay")
    if kind == "step_0":
        because("the KL is taken to the actor of step 0 already", "reference", "log_step_0")
    elif given.residency == "service":
        because("reference.residency = 'service' leaves no weights here", "reference", "log_step_0")
    if kind == "uniform":
        because("reference.prior = 'uniform' has no weights", "precision", "reference")
        if not given.log_step_0:
            because("reference.prior = 'uniform' has no weights", "reference", "residency")


def _of_the_reward(reward: RewardSection, because: Because) -> None:
    if not reward.has_model:
        because(f"reward.source = {reward.source!r} has no reward model", "reward", "residency")
        because(f"reward.source = {reward.source!r} has no reward model", "precision", "reward")
    if reward.source != "combined":
        because(f"reward.source = {reward.source!r} adds nothing up", "reward", "parts", "weights")
    if reward.weights == "fixed":
        because("reward.weights = 'fixed' draws none", "reward", "weights_concentration")
    if reward.source != "checkpoint":
        because(f"reward.source = {reward.source!r} loads no reward model", "reward", "checkpoint")
    if reward.source != "function":
        # A model answers the same way every time: no use to ask it again, and a score that is not finite stops the run.
        reason = f"reward.source = {reward.source!r} calls no function"
        because(reason, "reward", "function", "retries", *FAILING)
    if reward.source != "model":
        reason = f"reward.source = {reward.source!r} brings no model of another family"
        because(reason, "reward", *REWARD_OWN_MODEL)
    for key, each in reward.classifiers.items():
        if each.engine != "torch":
            because(f"{key}.engine = {each.engine!r} runs on the CPU and holds its weights itself", key, "device")
    if reward.has_model and not reward.of_the_base and all(r.engine != "torch" for r in reward.classifiers.values()):
        key, each = next(iter(reward.classifiers.items()))
        reason = f"{key}.engine = {each.engine!r} runs on the CPU and holds its weights itself"
        because(reason, "reward", *([] if reward.residency == "service" else ["residency"]))
        because(reason, "precision", "reward")
    if not reward.trains:
        reason = f"reward.source = {reward.source!r} trains no reward model"
        because(reason, "reward", *REWARD_TRAINING)
        because(reason, "data", "pairs", "pairs_test")
    for name, part in reward.used_parts.items():
        _of_a_part(f"reward.parts.{name}", part, because)


def _of_a_part(key: str, part: PartSection, because: Because) -> None:
    read = ("source", "weight", *PART_KEYS[part.source])
    others = (name for name in type(part).model_fields if name not in read)
    because(f"{key}.source = {part.source!r} does not read it", key, *others)
    for rule, given in part.rules.items() if part.source == "rules" else ():
        read, table = ("kind", "score", *RULE_KEYS[given.kind]), f"{key}.rules.{rule}"
        others = [name for name in type(given).model_fields if name not in read]
        if given.kind in ("regex", "keywords") and not given.each:
            because(f"{table}.each = false counts one match", table, "at_most")
        because(f"{table}.kind = {given.kind!r} does not read it", table, *others)


def _of_the_values(config: RunConfig, because: Because) -> None:
    critic = config.critic
    if critic.heads == "scalar":
        reason = "critic.heads = 'scalar' has one value"
        because(reason, "critic", "head_width", "loss_balance", "loss_weights", "value_clip_eps")
        because(reason, "ppo", "whiten_dimensions")
        return
    if critic.heads != "multi":
        because(f"critic.heads = {critic.heads!r} has no layers of its own", "critic", "head_width")
    if critic.loss_balance != "fixed":
        because(f"critic.loss_balance = {critic.loss_balance!r} finds them", "critic", "loss_weights")


def _of_the_trunk(trunk: TrunkSection, because: Because, *, shared_by_critic: bool) -> None:
    if not trunk.train:
        training = (name for name in type(trunk).model_fields if name not in ("train", "branch_layers"))
        because("trunk.train = false freezes the trunk", "trunk", *training)
    elif not shared_by_critic:
        reason = "critic.model stands beside the trunk, which the actor alone trains then"
        because(reason, "trunk", "critic_grad_scale", "balance", "alternate", "decoupling")
    elif trunk.alternate:
        reason = "trunk.alternate keeps the trunk still in the critic's turns and the roles apart"
        because(reason, "trunk", "critic_grad_scale", "balance", "decoupling")
    elif trunk.critic_grad_scale == 0:
        because("trunk.critic_grad_scale = 0 keeps the critic's gradient out of the trunk", "trunk", "balance")


def is_given(config: RunConfig, key: str) -> bool:
    """Whether a dotted key was written down (rather than left at its default)."""
    section: Any = config
    *path, name = key.split(".")
    for part in path:
        if part not in (section if isinstance(section, dict) else section.model_fields_set):
            return False
        section = section[part] if isinstance(section, dict) else getattr(section, part)
    return name in section.model_fields_set


def ignored(config: RunConfig) -> Iterator[str]:
    for key, reason in ignored_keys(config).items():
        if is_given(config, key):
            yield f"{key}: given, but {reason}, so it would be ignored; leave it out"
