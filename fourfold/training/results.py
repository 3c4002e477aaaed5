"""Use what a run has made: samples beside the reference, and a plain Hugging Face folder."""

from __future__ import annotations

import copy
import os
import shutil
import sys
import tempfile
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from torch import nn

from fourfold.config.schema import RunConfig
from fourfold.data.records import Message, PromptRecord, read_prompts
from fourfold.data.tokenize import encode_prompts
from fourfold.memory.budget import BatchSizes
from fourfold.memory.precision import DTYPES, dtype_of
from fourfold.memory.quantization import dequantize, kind_of
from fourfold.models.adapters import is_adapted, merge_adapters
from fourfold.models.assembly import record_for
from fourfold.models.loading import Base, load_base, load_causal_lm
from fourfold.models.roles import Policy
from fourfold.models.split import Part, layout_of
from fourfold.models.storage import load_own_tensors, load_role
from fourfold.models.trunk import trainable_copy
from fourfold.planner.quantization import QUANTIZED
from fourfold.rollout.local import LocalSampler, SamplingSettings
from fourfold.rollout.sampler import PromptBatch, row_seed
from fourfold.scoring.sources import texts_of
from fourfold.training.checkpoint import CheckpointStore
from fourfold.training.folder import RunFolder, saved_config, sft_model

if TYPE_CHECKING:
    from transformers import PreTrainedModel


def load_actor(config: RunConfig, base: Base, folder: RunFolder, *, best: bool) -> Policy:
    """The trained actor of a run: of its last step, or of the best checkpoint."""
    actor = base.new_policy()
    if base.trunk is not None and config.trunk.train:
        actor.stand_on(trainable_copy(base.trunk, config.memory))
    if best:
        checkpoint = CheckpointStore(folder.stage("ppo") / "checkpoints", keep_last=1).load_best()
        if checkpoint is None:
            raise ValueError(f"{folder.root}: no checkpoint was marked as the best; leave out --best")
        load_own_tensors(actor, checkpoint.tensors("actor"), shares_head=base.shares_head)
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
) -> list[tuple[str, str, str]]:
    """(prompt, reference's response, actor's response) for each prompt, drawn with the same random numbers."""
    folder = RunFolder(Path(run).expanduser())
    config = saved_config(folder.root)
    base = load_base(config)
    tokens = _typed(config, base, prompts, chat=chat) if prompts else _held_out(config, base, folder)[:count]
    settings = SamplingSettings(
        max_new_tokens=max_new_tokens or config.sampling.max_new_tokens,
        temperature=temperature or config.sampling.temperature,
        stop_strings=config.sampling.stop_strings,
    )
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


def _held_out(config: RunConfig, base: Base, folder: RunFolder) -> list[list[int]]:
    """The run's own prompts, as the run reads them."""
    section = config.data.prompts_test or config.data.prompts
    if section is None:
        raise ValueError(f"{folder.root}: the run has no prompts of its own; give --prompt")
    data = config.data
    return encode_prompts(
        base.tokenizer, read_prompts(section), max_tokens=data.max_prompt_tokens, truncation=data.truncation
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
    if target.exists() and (not target.is_dir() or any(target.iterdir())):
        raise ValueError(f"{target} exists and is not an empty folder; give another one")
    config = saved_config(folder.root)
    base = load_base(config)
    actor = load_actor(config, base, folder, best=best)
    # Shared weights are read in the type that the run held them in, which float32 holds exactly; trained are float32.
    held, compute = config.precision.frozen, actor.branch.compute_dtype
    floats = compute if held in QUANTIZED else dtype_of(held, compute)
    read_in = floats if base.shares_head else torch.float32
    model, tokenizer = load_causal_lm(config.model.path, Path(config.model.cache), read_in)
    model = model.float()
    _copy_branch(actor, model)
    _copy_quantized(base.trunk, model)
    assert model.generation_config is not None, "a causal language model has one"
    ends = sorted(base.eos_ids)
    model.generation_config.eos_token_id = ends if len(ends) > 1 else ends[0]
    model.generation_config.pad_token_id = base.pad_id
    model.to(DTYPES[dtype])  # pyright: ignore[reportArgumentType]  # the library's wrapper hides `self`
    target.parent.mkdir(parents=True, exist_ok=True)
    partial = Path(tempfile.mkdtemp(prefix=f".partial-{target.name}-", dir=target.parent))
    try:
        model.save_pretrained(partial)
        tokenizer.save_pretrained(partial)
        if target.exists():
            target.rmdir()
        os.chmod(partial, 0o755)
        os.rename(partial, target)
    except BaseException:
        shutil.rmtree(partial, ignore_errors=True)
        raise
    return target


def _copy_branch(actor: Policy, model: PreTrainedModel) -> None:
    """Put the actor's own layers in their places of the whole model."""
    if is_adapted(actor.branch):
        actor = copy.deepcopy(actor)  # with a base of its own, in float32: the sum is rounded once, at the very end
        merge_adapters(actor.branch.float())
    layout = layout_of(model)
    whole, body = getattr(model, layout.body), actor.branch.body
    layers, own = getattr(whole, layout.layers), getattr(body, layout.layers)
    for target, source in zip(layers[len(layers) - len(own) :], own, strict=True):
        _copy_layer(source, target)
    if actor.trunk is not None:
        for target, source in zip(layers, actor.trunk.layers, strict=False):  # those above are the branch's
            _copy_layer(source, target)
    names = [layout.norm]
    if actor.branch.takes_ids:
        names += [name for name in (layout.embedding, layout.learned_positions) if name]
        linear: Any = model.get_output_embeddings()
        linear.weight.copy_(actor.head.weight)
    for name in names:
        getattr(whole, name).load_state_dict(getattr(body, name).state_dict())


def _copy_quantized(trunk: Part | None, model: PreTrainedModel) -> None:
    """Of a quantised trunk, what the actor was trained above."""
    if trunk is not None and kind_of(trunk):
        layers = getattr(getattr(model, layout_of(model).body), layout_of(model).layers)
        for source, target in zip(trunk.layers, layers, strict=False):
            _copy_layer(source, target)


def _copy_layer(source: nn.Module, target: nn.Module) -> None:
    """Put a decoder layer's numbers into another one: quantised ones are what their codes stand for."""
    if kind_of(source):
        source = copy.deepcopy(source)
        dequantize(source)
    state = source.state_dict()
    for name, module in source.named_modules():
        if isinstance(module, nn.Linear) and not isinstance(target.get_submodule(name), nn.Linear):
            state[f"{name}.weight"] = module.weight.t()  # GPT-2's own layers keep [inputs, outputs]
    target.load_state_dict(state)
