"""Where texts, pairs and prompts come from."""

from __future__ import annotations

from typing import Literal

from pydantic import Field

from fourfold.config.sections.base import Count, PositiveInt, Section


class DatasetSection(Section):
    path: str = Field(description="A .jsonl, .parquet or .csv file, or a `datasets` hub id such as 'imdb:train'.")
    columns: dict[str, str] = Field(
        default_factory=dict,
        description="Column names where they differ from the standard ones, e.g. {text = 'review'}. "
        "Standard names: text; prompt, chosen, rejected; messages.",
    )
    max_rows: Count = Field(default=0, description="Use the first rows only; 0 means all.")


class DataSection(Section):
    texts: DatasetSection | None = Field(default=None, description="Texts for the sft stage.")
    texts_test: DatasetSection | None = Field(default=None, description="Held-out texts: the loss reported by sft.")
    pairs: DatasetSection | None = Field(default=None, description="Preference pairs for the reward stage.")
    pairs_test: DatasetSection | None = Field(default=None, description="Held-out pairs: the accuracy reported.")
    prompts: DatasetSection | None = Field(default=None, description="Prompts that PPO samples from.")
    prompts_test: DatasetSection | None = Field(default=None, description="Held-out prompts for evaluation.")
    max_prompt_tokens: PositiveInt = Field(default=64, description="Longest prompt, in tokens.")
    max_text_tokens: PositiveInt = Field(default=64, description="Longest text (prompt and answer), in tokens.")
    truncation: Literal["drop", "left", "right", "error"] = Field(
        default="drop",
        description="What happens to a row that is too long: leave it out, cut its left or right end, or stop. "
        "The counts are printed at start.",
    )
