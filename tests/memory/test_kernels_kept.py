"""What products in bfloat16 leave behind is bounded; in processes of their own, as libraries read settings once."""

from __future__ import annotations

import os
import subprocess
import sys

import pytest

from fourfold.memory.budget import KERNELS_KEPT
from fourfold.memory.precision import cpu_multiplies_bfloat16

VARIABLES = ("ONEDNN_PRIMITIVE_CACHE_CAPACITY", "LRU_CACHE_CAPACITY")
# Rows of 200 lengths through one matrix, and what the process has grown by, in MiB.
GROWTH = """
import torch
from fourfold.memory.budget import keep_few_kernels
from fourfold.memory.peaks import resident_bytes_reader

keep_few_kernels()
weight, resident = torch.zeros(1536, 576, dtype=torch.bfloat16), resident_bytes_reader()
def product(rows):
    torch.nn.functional.linear(torch.zeros(rows, 576, dtype=torch.bfloat16), weight)
product(500)
before = resident()
for rows in range(1, 201):
    product(rows)
print((resident() - before) / 2**20)
"""


def growth(**given: str) -> float:
    clean = {name: value for name, value in os.environ.items() if name not in VARIABLES}
    done = subprocess.run([sys.executable, "-c", GROWTH], env=clean | given, capture_output=True, text=True, check=True)
    return float(done.stdout)


@pytest.mark.skipif(not cpu_multiplies_bfloat16(), reason="other kernels serve processors without bfloat16 products")
def test_kernels_of_past_shapes_do_not_pile_up_and_a_users_own_setting_stands() -> None:
    """0.6 MiB a shape: 120 MiB where all are kept."""
    ours, unbounded = growth(), growth(**dict.fromkeys(VARIABLES, "1024"))
    assert ours < 1.5 * KERNELS_KEPT and ours < 0.7 * unbounded
