"""TRL's PPO trainer on the CPU, timed. Runs in the peer's own environment; started by benchmarks/peer_trl.py.

Policy and reference are the causal model, value and reward model are one-label sequence classifiers on the same
weights: TRL's usual set-up. Timers are wrapped around TRL's functions, its algorithm is not changed. The arguments and
the JSON object printed at the end are those of benchmarks/worker.py.
"""

from __future__ import annotations

import argparse
import json
import os
import platform
import random
import re
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

os.environ.update(HF_HUB_OFFLINE="1", TRL_EXPERIMENTAL_SILENCE="1", TOKENIZERS_PARALLELISM="false")

import numpy
import torch
import transformers
import trl
import trl.experimental.ppo.ppo_trainer as ppo_trainer
from datasets import Dataset
from transformers import AutoModelForCausalLM, AutoModelForSequenceClassification, AutoTokenizer, TrainerCallback
from trl.experimental.ppo import PPOConfig, PPOTrainer


def parse_arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__)
    for name in ("model", "prompts"):
        parser.add_argument(f"--{name}", required=True)
    for name in ("prompt-tokens", "new-tokens", "batch", "micro-batch", "epochs", "updates", "threads", "seed"):
        parser.add_argument(f"--{name}", type=int, required=True)
    parser.add_argument("--dtype", choices=("float32", "bfloat16"), required=True)
    return parser.parse_args()


class Stopwatch(TrainerCallback):
    """Seconds by phase of the update in progress, and of the updates that are done."""

    def __init__(self) -> None:
        self.generate = self.score = 0.0
        self.tokens = 0
        self.updates: list[dict[str, float]] = []
        self.token_counts: list[int] = []

    def on_train_begin(self, *_: Any, **__: Any) -> None:
        self.started = time.perf_counter()

    def on_step_end(self, *_: Any, **__: Any) -> None:
        now = time.perf_counter()
        total = now - self.started
        learn = total - self.generate - self.score
        self.updates.append({"total": total, "generate": self.generate, "score": self.score, "learn": learn})
        self.token_counts.append(self.tokens)
        self.generate, self.score, self.tokens, self.started = 0.0, 0.0, 0, now
        print(f"update {len(self.updates)}: {total:.2f} s", file=sys.stderr, flush=True)

    def timed_generation(self, generation: Callable[..., Any], pad_id: int) -> Callable[..., Any]:
        def timed(model: Any, queries: torch.Tensor, *rest: Any) -> Any:
            started = time.perf_counter()
            sequences, logits = generation(model, queries, *rest)
            self.generate += time.perf_counter() - started
            self.tokens += int((sequences[:, queries.shape[1] :] != pad_id).sum())
            return sequences, logits

        return timed

    def timed_scoring(self, function: Callable[..., Any]) -> Callable[..., Any]:
        """Forward passes without gradients are scoring, those with gradients belong to learning."""

        def timed(*arguments: Any, **named: Any) -> Any:
            started = time.perf_counter()
            result = function(*arguments, **named)
            if not torch.is_grad_enabled():
                self.score += time.perf_counter() - started
            return result

        return timed


def load_prompts(path: str, tokenizer: Any, prompt_tokens: int) -> Dataset:
    lines = Path(path).read_text(encoding="utf-8").splitlines()
    rows = [tokenizer(json.loads(line)["prompt"], add_special_tokens=False)["input_ids"] for line in lines]
    if wrong := [len(row) for row in rows if len(row) != prompt_tokens]:
        raise ValueError(f"{path}: prompts of {wrong} tokens; all must have {prompt_tokens}")
    return Dataset.from_list([{"input_ids": row, "attention_mask": [1] * len(row)} for row in rows])


def build_trainer(args: argparse.Namespace, tokenizer: Any, prompts: Dataset, out: str, watch: Stopwatch) -> PPOTrainer:
    dtype = getattr(torch, args.dtype)

    def classifier() -> Any:
        model = AutoModelForSequenceClassification.from_pretrained(args.model, num_labels=1, dtype=dtype)
        model.config.pad_token_id = tokenizer.pad_token_id
        return model

    settings = PPOConfig(
        output_dir=out,
        per_device_train_batch_size=args.micro_batch,
        gradient_accumulation_steps=args.batch // args.micro_batch,
        local_rollout_forward_batch_size=args.batch,
        total_episodes=args.batch * args.updates,
        num_ppo_epochs=args.epochs,
        num_mini_batches=1,
        response_length=args.new_tokens,
        temperature=1.0,
        kl_coef=0.05,
        learning_rate=1e-5,
        num_sample_generations=0,
        report_to="none",
        save_strategy="no",
        eval_strategy="no",
        logging_steps=1,
        bf16=False,
        fp16=False,
        use_cpu=True,
        gradient_checkpointing=False,
        seed=args.seed,
        disable_tqdm=True,
    )
    return PPOTrainer(
        args=settings,
        processing_class=tokenizer,
        model=AutoModelForCausalLM.from_pretrained(args.model, dtype=dtype),
        ref_model=AutoModelForCausalLM.from_pretrained(args.model, dtype=dtype),
        reward_model=classifier(),
        value_model=classifier(),
        train_dataset=prompts,
        eval_dataset=prompts.select(range(1)),
        callbacks=[watch],
    )


def trainable(model: Any) -> int:
    return sum(parameter.numel() for parameter in model.parameters() if parameter.requires_grad)


def peak_rss_mib() -> float:
    found = re.search(r"VmHWM:\s+(\d+) kB", Path("/proc/self/status").read_text(encoding="utf-8"))
    if found is None:
        raise ValueError("/proc/self/status holds no VmHWM; the peak memory is measured on Linux only")
    return int(found[1]) / 1024


def report(args: argparse.Namespace, trainer: PPOTrainer, watch: Stopwatch) -> dict[str, Any]:
    steady = watch.updates[1:] or watch.updates
    return {
        "what": f"TRL {trl.__version__}: four separate models, actor and critic trained in full, all in {args.dtype}",
        "dtype": args.dtype,
        "trainable_parameters": {
            "actor": trainable(trainer.model.policy),
            "critic": trainable(trainer.model.value_model),
        },
        "seconds_per_update": [update["total"] for update in watch.updates],
        "response_tokens_per_update": watch.token_counts,
        "peak_rss_mib": peak_rss_mib(),
        "phases": {
            phase: sum(update[phase] for update in steady) / len(steady) for phase in ("generate", "score", "learn")
        },
        "versions": {
            "python": platform.python_version(),
            "torch": torch.__version__,
            "transformers": transformers.__version__,
            "trl": trl.__version__,
        },
        "threads": torch.get_num_threads(),
    }


def main() -> None:
    args = parse_arguments()
    torch.set_num_threads(args.threads)
    random.seed(args.seed)
    numpy.random.seed(args.seed)
    torch.manual_seed(args.seed)
    tokenizer = AutoTokenizer.from_pretrained(args.model, padding_side="left")
    if tokenizer.pad_token_id is None or tokenizer.pad_token_id == tokenizer.eos_token_id:
        # PPOTrainer masks by pad id, so pad must not be the EOS; SmolLM2's id 0 is <|endoftext|>, which it hardly uses.
        tokenizer.pad_token = tokenizer.convert_ids_to_tokens(0)
    watch = Stopwatch()
    ppo_trainer.batch_generation = watch.timed_generation(ppo_trainer.batch_generation, tokenizer.pad_token_id)
    ppo_trainer.forward = watch.timed_scoring(ppo_trainer.forward)
    ppo_trainer.get_reward = watch.timed_scoring(ppo_trainer.get_reward)
    prompts = load_prompts(args.prompts, tokenizer, args.prompt_tokens)
    with tempfile.TemporaryDirectory(prefix="trl-ppo-") as out:
        trainer = build_trainer(args, tokenizer, prompts, out, watch)
        trainer.train()
    print(json.dumps(report(args, trainer, watch)))


if __name__ == "__main__":
    main()
