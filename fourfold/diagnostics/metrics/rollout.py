"""Metrics of what was sampled: counters, scores, KL, lengths."""

from __future__ import annotations

from fourfold.diagnostics.metrics.metric import Band, Metric

# What was sampled, what of it has a score, and what of that is learned from: `ppo.truncation` = "drop" and scores that
# are not valid make three different numbers of these.
SAMPLED = "responses of the rollout"
VALID = "responses of the rollout with a valid score"
LEARNED = "responses learned from"
SAMPLED_TOKENS = "response tokens of the rollout"
LEARNED_TOKENS = "response tokens of the responses learned from"

# Besides the types of `precision.compute`, what a band can depend on: a sampler that draws from another distribution.
QUANTISED = "quantised sampler"

# Of each part of a combined reward: moment, its formula, what is healthy, what to do if not.
PARTS = (
    (
        "mean",
        "sum",
        "rises, or stays where another part must not spoil it",
        "falls while score_mean rises: the other parts outweigh it; raise its weight in `reward.parts`",
    ),
    (
        "std",
        "standard deviation",
        "times its weight of the size of the other parts'",
        "0: the part tells no responses apart; much larger than the others': it alone is learned; change its weight in "
        "`reward.parts`",
    ),
)

COUNTERS = (
    Metric("step", "count", "PPO steps finished", "none", "rises by 1 a row", "none needed"),
    Metric("episodes", "count", "responses sampled since the start", "none", "rises", "none needed"),
    Metric("optimizer_steps", "count", "optimizer steps of the actor since the start", "none", "rises", "none needed"),
    Metric("tokens", "count", "response tokens sampled since the start", "none", "rises", "none needed"),
)

ROLLOUT = (
    Metric("policy_version", "count", "step of the policy that sampled the rollout", "none", "step - 1", "none needed"),
    Metric(
        "score_mean",
        "score",
        "sum of the reward's scores, before normalisation, clipping and penalties",
        VALID,
        "rises, then levels off",
        "flat: raise `ppo.learning_rate` or lower `ppo.kl_coef`; rising while texts get worse: raise `ppo.kl_coef`",
    ),
    Metric(
        "score_shaped_mean",
        "score",
        "sum of scores after normalisation, clipping and penalties",
        LEARNED,
        "rises",
        "far below score_mean: penalties dominate; lower `ppo.missing_eos_penalty` or `ppo.length_penalty`",
    ),
    Metric(
        "score_std",
        "score",
        "standard deviation of the scores of score_mean",
        VALID,
        "well above 0",
        "near 0: all responses score alike, so nothing can be learned; look at samples, raise `ppo.kl_coef`",
    ),
    Metric(
        "score_raw_min",
        "score",
        "smallest of the scores of score_mean",
        "none",
        "within the range seen in reward training",
        "far outside: set `ppo.score_clip`",
    ),
    Metric(
        "score_raw_max",
        "score",
        "largest of the scores of score_mean",
        "none",
        "within the range seen in reward training",
        "far outside: set `ppo.score_clip`; read that response, it may exploit the reward model",
    ),
    *(
        Metric(
            f"score_{moment}/NAME",
            "score",
            f"{words} of the raw scores of part NAME of the reward, before its weight",
            VALID,
            healthy,
            remedy,
            promised=False,
        )
        for moment, words, healthy, remedy in PARTS
    ),
    Metric(
        "invalid_scores",
        "count",
        "responses whose score is None, NaN or infinite (as float32)",
        "none",
        "0",
        "mend the reward; `reward.on_failure` and `reward.retries` say what happens meanwhile",
        band=Band(high=0),
    ),
    Metric(
        "dropped_rows",
        "count",
        "responses left out of learning: no valid score, or cut by length under `ppo.truncation` = 'drop'",
        "none",
        "0 or few",
        "raise `sampling.max_new_tokens`, or choose another `ppo.truncation`",
    ),
    Metric(
        "reward_per_sequence_mean",
        "reward",
        "sum over tokens of the shaped reward (score after shaping - kl_coef x KL)",
        LEARNED,
        "rises",
        "falls while score_mean rises: KL costs more than the score gains; lower `ppo.learning_rate`",
    ),
    Metric(
        "kl_per_sequence_mean",
        "nats",
        "sum over tokens of KL(actor, reference) by `ppo.kl_estimator`: the number that is penalised",
        SAMPLED,
        "near 0 at first, then below about 10",
        "too large: raise `ppo.kl_coef` or set `ppo.kl_controller` = 'adaptive' with `ppo.kl_target`",
        band=Band(high=10),
    ),
    Metric(
        "kl_per_token_mean",
        "nats",
        "sum over tokens of the same KL",
        SAMPLED_TOKENS,
        "near 0 at first, then below about 0.5",
        "as for kl_per_sequence_mean",
        band=Band(high=0.5),
    ),
    Metric(
        "kl_k1_per_sequence_mean",
        "nats",
        "sum over tokens of log p(actor) - log p(reference): unbiased, can be negative on few samples",
        SAMPLED,
        "about kl_k3_per_sequence_mean; slightly negative now and then is noise",
        "negative for many steps: responses are not drawn from the actor; look at sampler_gap_mean",
    ),
    Metric(
        "kl_k3_per_sequence_mean",
        "nats",
        "sum over tokens of exp(-d) - 1 + d with d = log p(actor) - log p(reference): never negative",
        SAMPLED,
        "about kl_k1_per_sequence_mean",
        "far above it: a few tokens have nearly left the reference; raise `ppo.kl_coef`",
    ),
    Metric(
        "kl_step_0_per_sequence_mean",
        "nats",
        "sum over tokens of log p(actor) - log p(actor at step 0): how far the actor has gone, where the KL that is "
        "penalised is taken to another prior (`reference`, `reference.log_step_0`)",
        SAMPLED,
        "below about 10, as a KL to the actor at step 0 should be",
        "grows while kl_per_sequence_mean stays small: the reference goes along; set `reference.prior` = 'step_0'",
        promised=False,
        band=Band(high=10),
    ),
    Metric(
        "kl_coef",
        "factor",
        "factor of the KL in this step's rewards",
        "none",
        "constant, or settling when adaptive",
        "runs away when adaptive: raise `ppo.kl_horizon`, or choose another `ppo.kl_target`",
    ),
    Metric(
        "entropy_first_epoch_per_token_mean",
        "nats",
        "sum of the entropy of the tempered policy over the first epoch alone",
        "tokens of the first epoch",
        "near -log p of the tokens drawn, because the policy has hardly moved from what drew them",
        "see `sampling mismatch` in docs/doctor.md",
        promised=False,
    ),
    Metric(
        "sampler_gap_mean",
        "nats",
        "sum over tokens of |sampler_log_probs - log_probs|",
        SAMPLED_TOKENS,
        "below 1e-4 in float32, 0.05 in bfloat16",
        "larger: sampler and trainer disagree, so ratios start off 1; try `precision.compute` = 'float32'",
        band={"float32": Band(high=1e-4), "bfloat16": Band(high=0.05)},
    ),
    Metric(
        "sampler_gap_max",
        "nats",
        "largest |sampler_log_probs - log_probs|",
        "none",
        "below 1e-3 in float32, 1 in bfloat16",
        "as for sampler_gap_mean",
        band={"float32": Band(high=1e-3), "bfloat16": Band(high=1)},
    ),
    Metric(
        "sampler_kl_k3_per_token_mean",
        "nats",
        "sum over tokens of exp(-d) - 1 + d with d = sampler_log_probs - log_probs: KL(sampler, actor), never negative",
        SAMPLED_TOKENS,
        "below 1e-7 in float32, 0.01 in bfloat16, 0.05 from a quantised sampler",
        "larger: the actor learns from another policy's responses; set `ppo.importance` = 'token'",
        band={"float32": Band(high=1e-7), "bfloat16": Band(high=0.01), QUANTISED: Band(high=0.05)},
    ),
)

EVALUATION = (
    Metric(
        "eval_score_mean",
        "score",
        "mean of the reward's scores on held-out prompts, before shaping",
        "held-out responses",
        "rises with score_mean",
        "falls behind score_mean: the prompts are learned by heart; use more prompts or fewer `ppo.num_epochs`",
    ),
    Metric(
        "eval_judge_mean",
        "judge's unit",
        "mean verdict of the judge on prompt + response (`evaluation.judge`; VADER compound: -1 to 1)",
        "held-out responses",
        "rises with eval_score_mean",
        "falls while eval_score_mean rises: the reward model is exploited; raise `ppo.kl_coef`, train it on more pairs",
        promised=False,
    ),
    *(
        Metric(
            f"eval_score_{moment}/NAME",
            "score",
            f"{words} of the raw scores of part NAME of the reward, before its weight",
            "held-out responses",
            healthy,
            f"as for score_{moment}",
            promised=False,
        )
        for moment, words, healthy, _ in PARTS
    ),
    Metric(
        "eval_kl_per_sequence",
        "nats",
        "sum over tokens of KL(actor, reference) by `ppo.kl_estimator`",
        "held-out responses",
        "below about 10",
        "as for kl_per_sequence_mean",
        band=Band(high=10),
    ),
    Metric(
        "eval_ref_log_prob_per_token",
        "nats",
        "sum over tokens of the reference's log-prob",
        "held-out response tokens",
        "stays near the start's",
        "rises towards 0: responses get bland; falls: they get strange; raise `ppo.kl_coef`",
    ),
    Metric(
        "eval_kl_step_0_per_sequence",
        "nats",
        "sum over tokens of log p(actor) - log p(actor at step 0), where the KL is taken to another prior",
        "held-out responses",
        "below about 10",
        "as for kl_step_0_per_sequence_mean",
        promised=False,
        band=Band(high=10),
    ),
    Metric(
        "eval_step_0_log_prob_per_token",
        "nats",
        "sum over tokens of the log-prob under the actor at step 0, where the KL is taken to another prior",
        "held-out response tokens",
        "stays near the start's",
        "falls: the texts are ever less what sft has taught; set `reference.prior` = 'step_0'",
        promised=False,
    ),
    Metric(
        "eval_text_nll_per_token",
        "nats",
        "sum over tokens but the first, and but told weights (`sft.tell_weights`), of -log p(actor) of "
        "`data.texts_test` (at most `evaluation.max_texts`)",
        "those tokens of the texts",
        "rises by less than a few tenths",
        "rises far: the actor forgets the language of the texts; raise `ppo.kl_coef`, take a lower learning rate",
        promised=False,
    ),
    Metric(
        "eval_distinct_2",
        "share",
        "different pairs of neighbouring tokens in all responses",
        "all pairs of neighbouring tokens",
        "above 0.85 of the start's",
        "falls: responses repeat themselves; raise `ppo.kl_coef` or `ppo.entropy_coef`, take fewer `ppo.steps`",
        band=Band(low=0.85, of_start=True),
    ),
    Metric(
        "eval_mean_length",
        "tokens",
        "sum of response lengths, EOS included",
        "held-out responses",
        "stays near the start's",
        "as for response_length_mean",
    ),
    Metric(
        "eval_eos_share",
        "share",
        "responses that ended by an EOS id or a stop string",
        "held-out responses",
        "above 0.9 once trained",
        "as for eos_share",
        band=Band(low=0.9),
    ),
    Metric(
        "eval_explained_variance",
        "share",
        "1 - var(returns - values) / var(returns) of responses that are never learned from, returns as in training",
        "held-out response tokens",
        "near explained_variance",
        "far below it: the critic knows its prompts by heart; fewer `ppo.num_epochs`, a larger rollout, "
        "`critic.weight_decay`",
    ),
    Metric(
        "eval_value_return_spearman",
        "correlation",
        "Spearman's rank correlation of values and returns of those responses",
        "held-out response tokens",
        "near value_return_spearman",
        "as for eval_explained_variance",
    ),
    Metric(
        "eval_value_bias",
        "return",
        "sum over tokens of values - returns of those responses",
        "held-out response tokens",
        "near value_bias",
        "as for value_bias",
    ),
)
