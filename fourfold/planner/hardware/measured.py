"""This machine as fourfold.diagnostics.machine has measured it, in a JSON file in the user's cache folder."""

from __future__ import annotations

import os
import time
from collections.abc import Mapping
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Literal

from pydantic import BaseModel, ConfigDict, ValidationError

from fourfold.planner.hardware import host
from fourfold.planner.hardware.machine import Cluster

FORMAT = 2
DAYS = 30  # after which drivers, limits and what else runs here may have changed
MEASURE = "`fourfold bench machine` measures it in a few seconds"


class NotMeasured(ValueError):
    """There is no measurement of this machine as it is now."""


@dataclass(frozen=True, slots=True)
class Identity:
    """By what a machine is known again."""

    processor: str
    cores: int
    memory: int
    gpus: tuple[str, ...]

    @classmethod
    def of_this(cls) -> Identity:
        """The machine that this process runs on."""
        return cls(host.processor(), host.cores(), host.host_memory(), host.gpus())

    def changes(self, now: Identity) -> list[str]:
        """What is not as it was; memory may differ by what the kernel keeps at a start."""
        then, these = asdict(self), asdict(now)
        close = abs(self.memory - now.memory) <= 0.02 * self.memory
        return [
            f"{name} was {then[name]!r} and is {these[name]!r}"
            for name in then
            if then[name] != these[name] and not (name == "memory" and close)
        ]


class Measurement(BaseModel):
    """The file: what was measured, on which machine, when (seconds since 1970), and all single figures by name."""

    model_config = ConfigDict(frozen=True, extra="forbid", strict=True)

    format: Literal[2] = FORMAT
    measured_at: float
    identity: Identity
    cluster: Cluster
    findings: Mapping[str, float]  # the unit is in the name


def measurement_file() -> Path:
    """Where the measurement is kept (XDG Base Directory Specification)."""
    cache = os.environ.get("XDG_CACHE_HOME") or "~/.cache"
    return Path(cache).expanduser() / "fourfold" / "machine.json"


def read_measurement(file: Path | None = None) -> Measurement:
    """The measurement of this machine; `NotMeasured` where there is none, or a broken, old or foreign one."""
    file = file or measurement_file()
    try:
        found = Measurement.model_validate_json(file.read_bytes())
    except FileNotFoundError:
        raise NotMeasured(f'hardware "detect": this machine has not been measured; {MEASURE}') from None
    except OSError as error:
        raise NotMeasured(f'hardware "detect": {str(file)!r} cannot be read ({error.strerror}); {MEASURE}') from error
    except ValidationError as error:
        first = error.errors(include_url=False)[0]
        where = ".".join(map(str, first["loc"])) or "the file"
        raise NotMeasured(
            f'hardware "detect": {str(file)!r} is broken or of another version ({where}: {first["msg"]}); {MEASURE}'
        ) from None
    days = (time.time() - found.measured_at) / 86400
    changes = found.identity.changes(Identity.of_this())
    if not -1 <= days <= DAYS:
        changes.append(f"it is {days:.0f} days old, allowed are {DAYS}")
    if changes:
        raise NotMeasured(
            f'hardware "detect": {str(file)!r} is not of this machine now: {"; ".join(changes)}; {MEASURE}'
        )
    return found


def read_measured() -> Cluster:
    """This machine in its measured figures."""
    return read_measurement().cluster
