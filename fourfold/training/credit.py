"""`fourfold credit`: what a run's vector critic says of the tokens of a kept rollout."""

from __future__ import annotations

from pathlib import Path

from fourfold.config.loading import saved_config
from fourfold.diagnostics.credit import Credit, credit_of
from fourfold.diagnostics.kept import held_out_files, training_files
from fourfold.diagnostics.token_texts import tokenizer_of


def credit_report(run: str, *, step: int | None, training: bool, top: int) -> tuple[int, Credit]:
    """The report on a kept rollout of a run, held out or learned from, and its step; the last one without `step`.

    No weights are loaded: the texts of tokens need the tokenizer alone.
    """
    root = Path(run).expanduser()
    config = saved_config(root)
    files = training_files(root) if training else held_out_files(root)
    steps = files.steps()
    if not steps:
        raise ValueError(
            f"{root}: no rollouts are kept in {files.folder}; run it with data.prompts_test and "
            "evaluation.keep_rollouts = true"
        )
    if step is not None and step not in steps:
        raise ValueError(f"--step {step}: no rollout of this step is kept; allowed: {', '.join(map(str, steps))}")
    chosen = steps[-1] if step is None else step
    decode = tokenizer_of(config).decode
    return chosen, credit_of(files.read(chosen), config.value_dimensions, decode, top=top)
