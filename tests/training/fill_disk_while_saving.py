"""Saves where a file may not grow beyond a limit, which is what a full disk looks like from inside a write.

Run by test_checkpoint.py with a folder as its argument; prints the two errors.
"""

from __future__ import annotations

import resource
import sys
from pathlib import Path

import torch
from test_checkpoint import CheckpointStore, save

from fourfold.errors import RunFailed

if __name__ == "__main__":
    store = CheckpointStore(Path(sys.argv[1]), 1)
    save(store, 1)
    hard = resource.getrlimit(resource.RLIMIT_FSIZE)[1]
    for limit, tensors in ((20_000, {"actor": {"w": torch.zeros(30_000)}}), (3, {})):
        resource.setrlimit(resource.RLIMIT_FSIZE, (limit, hard))
        try:
            store.save(2, tensors, {"much": 1})
        except RunFailed as error:
            print(error)
