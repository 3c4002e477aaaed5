"""`fourfold report RUN`: read a run, ask the doctor, and write the page."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

from fourfold.config import RunConfig
from fourfold.diagnostics.doctor_says import examination_of
from fourfold.diagnostics.predicted import memory_of, time_of
from fourfold.diagnostics.report_page import Contents, report_page
from fourfold.diagnostics.run_record import read_run
from fourfold.diagnostics.token_texts import tokenizer_of
from fourfold.diagnostics.xray import Xray, make_xray
from fourfold.files import write_atomically


@dataclass(frozen=True)
class Asked:
    """What is asked of a report: how many samples the x-ray has, and whether of training rollouts."""

    samples: int = 6
    training: bool = False


def write_report(root: Path, file: Path, asked: Asked) -> Contents:
    """Write the page of a run as it stands; returns what is on it."""
    record = read_run(root)
    contents = Contents(
        record, examination_of(record), _xray(root, record.config, asked), memory_of(record), time_of(record)
    )
    write_atomically(file, report_page(contents))
    return contents


def _xray(root: Path, config: RunConfig, asked: Asked) -> Xray | str:
    if not asked.samples:
        return "left out by --samples 0"
    try:
        return make_xray(root, config, tokenizer_of(config), asked.samples, training=asked.training)
    except (ValueError, OSError) as error:  # nothing is kept, a damaged file, or a model that is not there any more
        return str(error)
