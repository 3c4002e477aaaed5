"""What every table of the settings is made of."""

from __future__ import annotations

from typing import Annotated

from pydantic import BaseModel, ConfigDict, Field

PositiveInt = Annotated[int, Field(gt=0)]
Count = Annotated[int, Field(ge=0)]
PositiveFloat = Annotated[float, Field(gt=0, allow_inf_nan=False)]
NonNegativeFloat = Annotated[float, Field(ge=0, allow_inf_nan=False)]
Fraction = Annotated[float, Field(ge=0, le=1)]


class Section(BaseModel):
    """Base of every table: immutable, refuses unknown keys, never converts a type silently.

    Its validator is made when it is first needed: that of a whole run contains those of all tables, and making them one
    by one as well took 50 ms of every start.
    """

    model_config = ConfigDict(frozen=True, extra="forbid", strict=True, defer_build=True)
