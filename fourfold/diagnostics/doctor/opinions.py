"""What else than the reward tells how good a response is: so that a long good answer is not taken for a long one."""

from __future__ import annotations

import numpy

from fourfold.batch import Experience
from fourfold.diagnostics.doctor.records import Records
from fourfold.diagnostics.doctor.robust import Numbers
from fourfold.diagnostics.judges import make_judge
from fourfold.diagnostics.kept import response_tokens
from fourfold.diagnostics.token_texts import tokenizer_of


def second_opinions(records: Records, kept: Experience) -> dict[str, Numbers]:
    """A number a row of each that the run has, by what it is: the judge's verdict, and what others of the prompt got.

    Of a prompt with a single response the others are unknown: where there is one, the rollout has no such opinion.
    """
    found: dict[str, Numbers] = {}
    if (others := _of_others(kept)) is not None:
        found["the mean score of the prompt's other responses"] = others
    if (judged := _of_the_judge(records, kept)) is not None:
        found["the judge's verdict"] = judged
    return {name: numbers for name, numbers in found.items() if numbers.std() > 0}


def prompts_of(kept: Experience) -> list[tuple[int, ...]]:
    """The ids of every row's prompt."""
    ids = kept.sequences[:, : kept.prompt_length]
    return [tuple(row[real].tolist()) for row, real in zip(ids, kept.prompt_mask, strict=True)]


def _of_others(kept: Experience) -> Numbers | None:
    """(sum over the prompt's responses - own score) / (count - 1)."""
    scores = kept.scores.double().numpy()
    _, prompt, counts = numpy.unique(
        numpy.array([str(each) for each in prompts_of(kept)]), return_inverse=True, return_counts=True
    )
    if counts.min() < 2:
        return None
    sums = numpy.bincount(prompt, weights=scores)
    return (sums[prompt] - scores) / (counts[prompt] - 1)


def _of_the_judge(records: Records, kept: Experience) -> Numbers | None:
    """The judge reads prompt and response as one text; None without one, or where it cannot be asked again."""
    if records.config.evaluation.judge == "none":
        return None
    try:
        judge, tokenizer = make_judge(records.config.evaluation.judge), tokenizer_of(records.config)
    except (ValueError, OSError):  # the package or the model is not there any more
        return None
    assert judge is not None
    read = [
        "".join(tokenizer.decode(ids, skip_special_tokens=True) for ids in (list(prompt), response))
        for prompt, response in zip(prompts_of(kept), response_tokens(kept), strict=True)
    ]
    return numpy.array(judge(read), dtype=numpy.float64)
