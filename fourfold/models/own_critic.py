"""A critic with a whole model of its own, a smaller one for instance.

What it saves: of a trained critic's weights, gradients and moments whatever the model is smaller by. What it costs:
passes through all of its layers, where other roles' begin above a cached trunk; what roles share, it does not. What it
changes: the values. What it excludes: models whose tokenizer lacks a token of the run's. Their tokens end at other
places of a text, so that there is no value "before" a token of the actor's, and no exact way to carry one over. The
same tokens under other ids are mapped.
"""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from fourfold.batch import Rollout
from fourfold.config.schema import RunConfig
from fourfold.memory.attention import use_attention
from fourfold.memory.precision import DTYPES, resolve_compute
from fourfold.models.heads import ScalarHead
from fourfold.models.loading import (
    LOADABLE,
    SPLIT_TOLERANCE,
    Base,
    embedding_rows,
    out_of_the_file,
    require_positions,
    resolve_model,
)
from fourfold.models.pretrained import architectures_named, pretrained, without_weights
from fourfold.models.products import prepare_for_decoding
from fourfold.models.roles import Activations, Scorer
from fourfold.models.split import Part, cut_whole, layout_of, verify_whole
from fourfold.models.vocabulary import ids_of_the_same_tokens, special_difference, vocabulary_difference

if TYPE_CHECKING:
    from transformers import PreTrainedModel

# In the config of a sequence classifier that `fourfold distill` has written: what its score is short of the value.
VALUE_SHIFT = "value_shift"
ALLOWED = f"{LOADABLE}, or a folder that `fourfold distill` has written"


class OwnCritic(Scorer):
    """A critic over a whole model: it reads the rollout's ids, whatever the activations of the other roles are."""

    # Its own id of each of the run's ids [vocabulary]; None where they are the same.
    own_ids: Tensor | None

    def __init__(self, branch: Part, head: ScalarHead, own_ids: Sequence[int] | None = None) -> None:
        super().__init__(branch, head)
        self.register_buffer("own_ids", None if own_ids is None else torch.tensor(own_ids), persistent=False)

    def stand_on(self, trunk: Part) -> None:
        """Its own layers begin at the ids: no trunk is below them."""

    def reads(self, activations: Activations, rollout: Rollout) -> Activations:
        """The ids, as the critic's own vocabulary numbers them."""
        ids = rollout.sequences if self.own_ids is None else self.own_ids[rollout.sequences]
        return Activations(ids, rollout.attention_mask)


def load_critic(config: RunConfig, base: Base) -> tuple[OwnCritic, bool]:
    """`critic.model` in float32, and whether its head is new; ValueError where its tokens are not the run's."""
    model, tokenizer = pretrained(
        _kind(config), _place(config), torch.float32, given=_given(config), allowed=ALLOWED,
        instead="give a complete model",
    )  # fmt: skip
    own_ids = _own_ids(config, base, model, tokenizer)
    device, dtype = base.budget.device, DTYPES[resolve_compute(config.precision.compute, base.budget.device)]
    use_attention(model, config.memory.attention, device)
    branch = cut_whole(model, dtype)
    verify_whole(model, branch, tolerance=SPLIT_TOLERANCE[dtype])
    head, new = _head(config, model)
    critic = OwnCritic(branch, head, own_ids).to(device)
    out_of_the_file(critic)
    prepare_for_decoding(critic.branch)
    base.budget.watch(critic.branch.layers)
    return critic, new


def check_own_critic(config: RunConfig, base: Base) -> None:
    """ValueError where `critic.model` is none for this base. Its weights are not read."""
    model, tokenizer = without_weights(_kind(config), _place(config), given=_given(config), allowed=ALLOWED)
    _own_ids(config, base, model, tokenizer)
    _require_one_label(config, model)


def own_critic_bytes(config: RunConfig) -> int:
    """Float32 bytes of `critic.model` without a language head. Its weights are not read."""
    model, _ = without_weights(_kind(config), _place(config), given=_given(config), allowed=ALLOWED)
    body: Any = getattr(model, layout_of(model).body)
    return 4 * (sum(p.numel() for p in body.parameters()) + model.config.hidden_size + 1)


def _given(config: RunConfig) -> str:
    return f"critic.model = {config.critic.model!r}"


def _place(config: RunConfig) -> str:
    return resolve_model(config.critic.model, Path(config.model.cache), "critic.model")


def _kind(config: RunConfig) -> Any:
    """A sequence classifier, by what the model's config says of itself, or a causal language model."""
    from transformers import AutoModelForCausalLM, AutoModelForSequenceClassification

    named = architectures_named(_place(config), given=_given(config), allowed=ALLOWED)
    scores = any(name.endswith("ForSequenceClassification") for name in named)
    return AutoModelForSequenceClassification if scores else AutoModelForCausalLM


def _require_one_label(config: RunConfig, model: PreTrainedModel) -> None:
    score: Any = getattr(model, "score", None)
    if score is not None and len(score.weight) != 1:
        raise ValueError(
            f"{_given(config)}: a sequence classifier with {len(score.weight)} labels; allowed: one with a single "
            "label, whose logit is the value, or a causal language model"
        )


@torch.no_grad()
def _head(config: RunConfig, model: PreTrainedModel) -> tuple[ScalarHead, bool]:
    """The classifier's own head, or a new one."""
    head = ScalarHead(model.config.hidden_size)
    _require_one_label(config, model)
    score: Any = getattr(model, "score", None)
    if score is None:
        return head, True
    head.linear.weight.copy_(score.weight)
    head.linear.bias.fill_(getattr(model.config, VALUE_SHIFT, 0.0))
    if getattr(score, "bias", None) is not None:
        head.linear.bias.add_(score.bias)
    return head, False


def _own_ids(config: RunConfig, base: Base, model: PreTrainedModel, tokenizer: Any) -> list[int] | None:
    """The critic's id of each of the run's ids, None where they are the same; ValueError where a token is not there.

    A value belongs to the state before one of the actor's tokens, so every token must be one of both.
    """
    given, actors = _given(config), config.model.path
    helps = (
        "try a smaller model of the actor's family, critic.layers for the lowest layers of the run's own, or one that "
        "`fourfold distill` makes"
    )
    needed, own_ids = len(base.policy.head.weight), None
    found = vocabulary_difference(base.tokenizer, tokenizer)
    if found is not None and (own_ids := ids_of_the_same_tokens(base.tokenizer, tokenizer, needed)) is None:
        raise ValueError(
            f"{given} has another vocabulary than model.path = {actors!r} ({found}): tokenised anew, a response would "
            f"be cut at other places, so that no value would belong to a token of the actor's; {helps}"
        )
    if special := special_difference(base.tokenizer, tokenizer):
        raise ValueError(
            f"{given} has the vocabulary of model.path = {actors!r}, but other special tokens: {special}; what ends or "
            f"begins a text would mean another thing to it; {helps}"
        )
    rows = embedding_rows(model)
    if rows < (needed if own_ids is None else max(own_ids) + 1):
        raise ValueError(f"{given} has embeddings for {rows:,} ids, and the actor may write any of {needed:,}; {helps}")
    if layout_of(model).learned_positions:
        require_positions(config, model.config.max_position_embeddings)
    return own_ids
