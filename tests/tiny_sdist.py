"""A miniature source distribution in the layout of the real one, made of the fixture's sentences."""

from __future__ import annotations

import gzip
import hashlib
import io
import os
import tarfile

import pytest

from fourfold.data import reviews
from tiny import sentences


def tar(members: dict[str, bytes]) -> bytes:
    buffer = io.BytesIO()
    with tarfile.open(fileobj=buffer, mode="w") as archive:
        for name, data in members.items():
            info = tarfile.TarInfo(name)
            info.size = len(data)
            archive.addfile(info, io.BytesIO(data))
    return gzip.compress(buffer.getvalue(), mtime=0)  # the time of day would change the digest


def snippets() -> list[str]:
    """Enough texts that both splits get some."""
    return [*sentences(), *(f"some say {sentence}" for sentence in sentences())]


def miniature(extra_lines: str = "") -> bytes:
    """The nested layout of the real one; text i has the ratings of `ratings(i)`."""
    texts = snippets()
    truth = "".join(f"{i}\t{sum(ratings(i)) / 4}\t{text}\n" for i, text in enumerate(texts)) + extra_lines
    rated = "".join(f"{i}\t0\t0\t{ratings(i)}\n" for i in range(len(texts)))
    inner = tar({reviews.GROUND_TRUTH: b"\xef\xbb\xbf" + truth.encode(), reviews.RATINGS: rated.encode()})
    return tar({reviews.INNER_ARCHIVE: inner, reviews.LICENCE: b"The licence of the miniature\n"})


def ratings(i: int) -> list[int]:
    return [i % 5 - 2, i % 5 - 2, i % 3 - 1, 1]


def digest(data: bytes) -> str:
    return hashlib.sha256(data).hexdigest()


def no_index(monkeypatch: pytest.MonkeyPatch) -> None:
    """The real pip, which finds nothing anywhere, as on a machine without a network."""
    monkeypatch.setenv("PIP_NO_INDEX", "1")
    monkeypatch.setenv("PIP_CONFIG_FILE", os.devnull)
    monkeypatch.delenv("PIP_FIND_LINKS", raising=False)
