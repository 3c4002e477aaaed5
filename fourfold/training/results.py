"""Use what a run has made: samples beside the reference, and a plain Hugging Face folder."""

from __future__ import annotations

import sys
from collections.abc import Callable, Sequence
from pathlib import Path

import torch

from fourfold.config.loading import saved_config
from fourfold.config.schema import RunConfig
from fourfold.data.records import Message, PromptRecord, read_prompts
from fourfold.data.tokenize import encode_prompts
from fourfold.data.told_weights import ToldWeights
from fourfold.files import require_empty, whole_folder
from fourfold.memory.budget import BatchSizes
from fourfold.memory.precision import DTYPES
from fourfold.models.assembly import record_for
from fourfold.models.loading import Base, load_base
from fourfold.models.roles import Policy
from fourfold.models.storage import load_own_tensors, load_role
from fourfold.models.trunk import trainable_copy
from fourfold.models.whole import whole_model
from fourfold.rollout.decoder import SamplingSettings
from fourfold.rollout.local import LocalSampler
from fourfold.rollout.sampler import PromptBatch, row_seed
from fourfold.scoring.sources import texts_of
from fourfold.training.checkpoint import CheckpointStore
from fourfold.training.folder import RunFolder, sft_model
from fourfold.training.inputs import prompt_tokens


def load_actor(config: RunConfig, base: Base, folder: RunFolder, *, best: bool) -> Policy:
    """The trained actor of a run: of its last step, or of the best checkpoint."""
    actor = base.new_policy()
    if base.trunk is not None and config.trunk.train:
        actor.stand_on(trainable_copy(base.trunk, config.memory))
    if best:
        checkpoint = CheckpointStore(folder.stage("ppo") / "checkpoints", keep_last=1).load_best()
        if checkpoint is None:
            raise ValueError(f"{folder.root}: no checkpoint was marked as the best; leave out --best")
        load_own_tensors(actor, checkpoint.tensors("actor").unread(), shares_head=base.shares_head)
    elif folder.finished("ppo") is None:
        raise ValueError(f"{folder.root}: the stage ppo has not finished; run it to the end, or give --best")
    else:
        load_role(folder.model("ppo"), actor, record_for(config, "policy"))
    return actor


def load_reference(config: RunConfig, base: Base, folder: RunFolder) -> Policy:
    """The policy that the actor started from."""
    reference = base.new_policy()
    if (start := sft_model(config, folder)) is not None:
        load_role(start, reference, record_for(config, "policy"))
    return reference


def sample_beside_reference(
    run: str,
    *,
    prompts: Sequence[str],
    chat: bool,
    count: int,
    max_new_tokens: int | None,
    temperature: float | None,
    seed: int,
    best: bool,
    weights: str = "",
    say: Callable[[str], None] = lambda line: None,
) -> list[tuple[str, str, str]]:
    """(prompt, reference's response, actor's response) for each prompt, drawn with the same random numbers.

    `weights`, such as 'safety=0.8', are told in front of every prompt, as in a run that sampled them; without them such
    a run's prompts are told of the mean weights. Which weights those are in full is said.
    """
    folder = RunFolder(Path(run).expanduser())
    config = saved_config(folder.root)
    base = load_base(config)
    tokens = _typed(config, base, prompts, chat=chat) if prompts else _held_out(config, base, folder)[:count]
    settings = SamplingSettings(
        max_new_tokens=max_new_tokens or config.sampling.max_new_tokens,
        temperature=temperature or config.sampling.temperature,
        stop_strings=config.sampling.stop_strings,
    )
    tokens = _with_weights(config, base, tokens, weights, say)
    _require_positions(base, tokens, settings.max_new_tokens)
    actor, reference = load_actor(config, base, folder, best=best), load_reference(config, base, folder)
    batch = PromptBatch(tokens, range(len(tokens)), [row_seed("sample", seed, row) for row in range(len(tokens))])
    written = []
    for policy in (reference, actor):
        rollout, _ = LocalSampler(base, policy, settings, BatchSizes.of(config.ppo)).generate(batch, policy_version=0)
        written.append(texts_of(rollout, base.tokenizer))
    return list(zip(prompts or written[0][0], written[0][1], written[1][1], strict=True))


def _typed(config: RunConfig, base: Base, prompts: Sequence[str], *, chat: bool) -> list[list[int]]:
    """Prompts that somebody typed, whole: `data.max_prompt_tokens` and `data.truncation` are for the run's own data."""
    if chat and base.tokenizer.chat_template is None:
        raise ValueError(f"--chat: the tokenizer of {config.model.path!r} has no chat template; leave out --chat")
    records = [PromptRecord((Message("user", text),) if chat else text) for text in prompts]
    return encode_prompts(base.tokenizer, records, max_tokens=sys.maxsize, truncation="error")[0]


def _with_weights(
    config: RunConfig, base: Base, tokens: Sequence[Sequence[int]], weights: str, say: Callable[[str], None]
) -> Sequence[Sequence[int]]:
    told = ToldWeights.of(config, base.tokenizer)
    if told is None:
        if weights:
            raise ValueError(
                f"--weights: given {weights!r}, but the run was trained with the fixed weights of its reward, which no "
                "prompt was told of; allowed: a run with reward.weights = 'sampled'; leave out --weights"
            )
        return tokens
    tenths = told.parse(weights) if weights else told.mean
    say(f"prompts begin with {told.text(tenths).strip()}")
    return [told.tell(prompt, tenths) for prompt in tokens]


def _held_out(config: RunConfig, base: Base, folder: RunFolder) -> list[list[int]]:
    """The run's own prompts, as the run reads them."""
    section = config.data.prompts_test or config.data.prompts
    if section is None:
        raise ValueError(f"{folder.root}: the run has no prompts of its own; give --prompt")
    return encode_prompts(
        base.tokenizer,
        read_prompts(section),
        max_tokens=prompt_tokens(config, base),
        truncation=config.data.truncation,
    )[0]


def _require_positions(base: Base, tokens: Sequence[Sequence[int]], max_new_tokens: int) -> None:
    """No prompt is cut, so each must leave room for its response among the positions that the model knows."""
    limit = base.config.max_position_embeddings
    for row, ids in enumerate(tokens, start=1):
        if len(ids) + max_new_tokens > limit:
            raise ValueError(
                f"prompt {row} has {len(ids):,} tokens, which leaves no room for {max_new_tokens:,} new ones: the "
                f"model has {limit:,} positions; shorten the prompt, or give a smaller --max-new-tokens"
            )


@torch.no_grad()
def export_actor(run: str, out: str, *, dtype: str, best: bool) -> Path:
    """Write the actor as a Hugging Face folder, whole or not at all; returns the folder.

    Its generation config names every id that ended a response in the run, so that it stops where the actor learned to.
    """
    folder, target = RunFolder(Path(run).expanduser()), Path(out).expanduser()
    require_empty(target)
    config = saved_config(folder.root)
    base = load_base(config)
    actor = load_actor(config, base, folder, best=best)
    model, tokenizer = whole_model(config, base, actor)
    assert model.generation_config is not None, "a causal language model has one"
    ends = sorted(base.eos_ids)
    model.generation_config.eos_token_id = ends if len(ends) > 1 else ends[0]
    model.generation_config.pad_token_id = base.pad_id
    model.to(DTYPES[dtype])  # pyright: ignore[reportArgumentType]  # the library's wrapper hides `self`
    with whole_folder(target) as partial:
        model.save_pretrained(partial)
        tokenizer.save_pretrained(partial)
    return target
