"""What the user sees, and the exit code, when a command ends early."""

from __future__ import annotations

import os
import sys
import traceback

from fourfold.errors import Interrupted, RunFailed

DONE, BAD_INPUT, FAILED, INTERRUPTED = 0, 2, 3, 130


def report(error: BaseException) -> int:
    """Print an error for people on stderr and return the exit code; FOURFOLD_TRACEBACK=1 adds the traceback."""
    code, text = _explain(error)
    expected = isinstance(error, ValueError | RunFailed | Interrupted | OSError | KeyboardInterrupt)
    if not expected or os.environ.get("FOURFOLD_TRACEBACK") == "1":
        traceback.print_exception(error, file=sys.stderr)
    print(f"fourfold: {text}", file=sys.stderr)
    return code


def _explain(error: BaseException) -> tuple[int, str]:
    if isinstance(error, KeyboardInterrupt | Interrupted):
        return INTERRUPTED, str(error) or "interrupted"
    if isinstance(error, ValueError):
        return BAD_INPUT, f"error: {error}"
    if isinstance(error, RunFailed | OSError):
        return FAILED, f"the run failed: {error}"
    return FAILED, f"the run failed by a fault of the program: {type(error).__name__}: {error}"
