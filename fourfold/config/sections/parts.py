"""The parts of a combined reward."""

from __future__ import annotations

from typing import Annotated, Literal

from pydantic import Field

from fourfold.config.sections.base import Count, Section

FUNCTION = (
    "'module:name' of a Python function (source = 'function'): "
    "takes prompts and responses (lists of str), returns a list of float."
)


class PartSection(Section):
    source: Literal["function"] = Field(description="Where the part's score comes from.")
    weight: Annotated[float, Field(allow_inf_nan=False)] = Field(
        default=1.0, description="Factor of the part's raw score in the sum. 0: it is logged, and not learned from."
    )
    function: str = Field(default="", description=FUNCTION)
    retries: Count = Field(default=2, description="How often a part that fails is asked again.")
    on_failure: Literal["stop", "drop"] = Field(
        default="stop",
        description="What a part without a valid score does after the retries: stop the run, or drop the rows.",
    )
