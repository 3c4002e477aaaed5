"""Movie-review snippets with human ratings, as texts, prompts and preference pairs.

The ratings were collected by C.J. Hutto and E. Gilbert (VADER, ICWSM 2014) and lie in the source distribution of
`vaderSentiment` (MIT). Every snippet is in one split only, chosen by a hash of its text, and so is every opening: those
that snippets of both splits share are held out.
"""

from __future__ import annotations

import ast
import hashlib
import io
import json
import random
import subprocess
import sys
import tarfile
import tempfile
from collections import Counter, defaultdict
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from fourfold.errors import RunFailed
from fourfold.files import write_atomically

REQUIREMENT = "vaderSentiment==3.3.2"
SDIST_SHA256 = "5d7c06e027fc8b99238edb0d53d970cf97066ef97654009890b83703849632f9"
SDIST_FOLDER = "vaderSentiment-3.3.2"
INNER_ARCHIVE = f"{SDIST_FOLDER}/additional_resources/hutto_ICWSM_2014.tar.gz"
LICENCE = f"{SDIST_FOLDER}/LICENSE.txt"
GROUND_TRUTH = "hutto_ICWSM_2014/movieReviewSnippets_GroundTruth.txt"
RATINGS = "hutto_ICWSM_2014/movieReviewSnippets_anonDataRatings.txt"

FEWEST_WORDS, MOST_WORDS = 3, 40
TEST_SHARE = 0.1
OPENING_WORDS = (3, 2, 1)  # the longest shared opening first
WORDS_AFTER_OPENING = 3
LEAST_MARGIN = 1.0
PAIRS_A_TEXT = 4
PARTNERS = 12
SEED = 0

MANIFEST = "manifest.json"
NOTICE = "NOTICE"
# Raised whenever other rows are made from the same source, so that files of an older recipe are made again.
RECIPE = 2

Say = Callable[[str], None]
Json = dict[str, Any]
Groups = Mapping[tuple[int, str], Sequence["Snippet"]]


@dataclass(frozen=True, slots=True)
class Snippet:
    """A text with the mean of its human ratings, from -4 to 4, and the ratings themselves."""

    identifier: str
    text: str
    rating: float
    ratings: tuple[int, ...]

    @property
    def ratings_deviation(self) -> float | None:
        """Standard deviation (population) of the ratings."""
        count = len(self.ratings)
        if count == 0:
            return None
        mean = sum(self.ratings) / count
        return round((sum((rating - mean) ** 2 for rating in self.ratings) / count) ** 0.5, 4)


def prepare_reviews(out: Path, *, sdist: Path | None = None, force: bool = False, say: Say = print) -> None:
    """Make the six files in `out` unless they are there, unchanged; `sdist` stands for the download."""
    if out.exists() and not out.is_dir():
        raise ValueError(f"{out} is not a folder; give --out another name")
    wrong = _wrong_files(out)
    if not wrong and not force:
        say(f"{out}: complete already, nothing to do (--force makes the files again)")
        return
    if (out / MANIFEST).exists():
        for reason in wrong:
            say(f"{out}: {reason}, so all files are made again")
    if sdist is not None:
        if not sdist.is_file():
            raise ValueError(f"--sdist: there is no file {sdist}")
        archive = sdist.read_bytes()
    else:
        say(f"downloading {REQUIREMENT} with pip")
        archive = download(say)
    files = build_files(archive, sdist_sha256=SDIST_SHA256)
    out.mkdir(parents=True, exist_ok=True)
    for name, data in files.items():  # the manifest comes last: without it nothing counts as complete
        write_atomically(out / name, data)
        say(f"{out / name}: {data.count(chr(10).encode()):,} lines")


def download(say: Say = print) -> bytes:
    """The source distribution, through pip; RunFailed says what was tried and how to do without."""
    with tempfile.TemporaryDirectory() as folder:
        options = ["--quiet", "--disable-pip-version-check", "--no-deps", "--no-binary", "vaderSentiment"]
        command = [sys.executable, "-m", "pip", "download", *options, "--dest", folder, REQUIREMENT]
        done = subprocess.run(command, capture_output=True, text=True, check=False)
        found = list(Path(folder).glob("*.tar.gz"))
        if done.returncode == 0 and found:
            return found[0].read_bytes()
    last_lines = "\n".join(f"  {line}" for line in done.stderr.strip().splitlines()[-4:])
    raise RunFailed(
        f"the reviews could not be downloaded. Tried:\n  {' '.join(command)}\n"
        f"which said (exit code {done.returncode}):\n"
        f"{last_lines}\nIs there a network, and pip in this Python? Without them, download the source distribution "
        f"{SDIST_FOLDER}.tar.gz elsewhere and pass it: fourfold data reviews --sdist {SDIST_FOLDER}.tar.gz"
    )


def build_files(archive: bytes, *, sdist_sha256: str) -> dict[str, bytes]:
    """Contents of every file by name, the manifest last; a pure function of the source distribution."""
    digest = _sha256(archive)
    if digest != sdist_sha256:
        raise ValueError(
            f"the source distribution has sha256 {digest}; allowed is that of {REQUIREMENT}, {sdist_sha256}; "
            f"try to download it again: pip download --no-deps --no-binary vaderSentiment {REQUIREMENT}"
        )
    snippets, licence = read_sdist(archive)
    parts = {split: [each for each in snippets if split_of(each.text) == split] for split in ("train", "test")}
    groups = {split: group_by_opening(part) for split, part in parts.items()}
    held_out = {opening.lower() for _, opening in groups["test"]}
    files: dict[str, bytes] = {}
    for split, part in parts.items():
        taken = held_out if split == "train" else set[str]()
        files[f"texts.{split}.jsonl"] = _jsonl(text_rows(part))
        files[f"prompts.{split}.jsonl"] = _jsonl(
            row for row in prompt_rows(groups[split]) if row["prompt"].lower() not in taken
        )
        files[f"pairs.{split}.jsonl"] = _jsonl(pair_rows(groups[split], random.Random(SEED)))
    files[NOTICE] = _notice(licence).encode()
    files[MANIFEST] = _manifest(files, digest).encode()
    return files


def read_sdist(archive: bytes) -> tuple[list[Snippet], str]:
    """The distinct snippets of 3 to 40 words in the order of the source, and its licence."""
    with tarfile.open(fileobj=io.BytesIO(archive)) as outer:
        licence = _member(outer, LICENCE).decode("utf-8")
        with tarfile.open(fileobj=io.BytesIO(_member(outer, INNER_ARCHIVE))) as inner:
            truth, ratings = (_member(inner, name).decode("utf-8-sig") for name in (GROUND_TRUTH, RATINGS))
    return list(_snippets(truth, _ratings(ratings))), licence


def _member(archive: tarfile.TarFile, name: str) -> bytes:
    file = archive.extractfile(name)
    assert file is not None, f"{name} is a file in the archive whose sha256 was checked"
    return file.read()


def _ratings(text: str) -> dict[str, tuple[int, ...]]:
    fields = (line.split("\t") for line in text.splitlines() if line.strip())
    return {identifier: tuple(ast.literal_eval(ratings)) for identifier, _, _, ratings in fields}


def _snippets(text: str, ratings: Mapping[str, tuple[int, ...]]) -> Iterator[Snippet]:
    seen: set[str] = set()
    for line in text.splitlines():
        if not line.strip():
            continue
        identifier, mean, words = line.split("\t")
        snippet = " ".join(words.split())
        if snippet.lower() in seen or not FEWEST_WORDS <= len(snippet.split()) <= MOST_WORDS:
            continue
        seen.add(snippet.lower())
        yield Snippet(identifier, snippet, round(float(mean), 4), ratings.get(identifier, ()))


def split_of(text: str) -> str:
    """'test' for a tenth of all texts, chosen by a hash of the text, else 'train'."""
    share = int(hashlib.sha256(text.lower().encode()).hexdigest()[:8], 16) / 2**32
    return "test" if share < TEST_SHARE else "train"


def group_by_opening(snippets: Iterable[Snippet]) -> Groups:
    """Snippets by (words, opening) that at least two of them share, each with three words or more after it."""
    groups: defaultdict[tuple[int, str], list[Snippet]] = defaultdict(list)
    for snippet in snippets:
        words = snippet.text.split()
        for count in OPENING_WORDS:
            if len(words) >= count + WORDS_AFTER_OPENING:
                groups[count, " ".join(words[:count])].append(snippet)
    return {key: group for key, group in groups.items() if len(group) >= 2}


def text_rows(snippets: Iterable[Snippet]) -> Iterator[Json]:
    """Rows for supervised fine-tuning."""
    for snippet in snippets:
        yield {
            "source": "movie",
            "id": snippet.identifier,
            "text": snippet.text,
            "rating": snippet.rating,
            "rating_sd": snippet.ratings_deviation,
            "n_raters": len(snippet.ratings),
        }


def prompt_rows(groups: Groups) -> Iterator[Json]:
    """Openings of two or three words, the most common first."""
    for (count, opening), group in sorted(groups.items(), key=lambda item: (-len(item[1]), item[0])):
        if count >= 2:
            mean = round(sum(snippet.rating for snippet in group) / len(group), 3)
            yield {"prompt": opening, "n_texts": len(group), "mean_rating": mean}


def pair_rows(groups: Groups, generator: random.Random) -> list[Json]:
    """Pairs of whole snippets with one opening whose ratings lie at least 1 apart, a text in at most four of them."""
    used: Counter[str] = Counter()
    done: set[tuple[str, str]] = set()
    rows: list[Json] = []
    for better, worse, opening in _candidates(groups, generator):
        key = better.identifier, worse.identifier
        if better.rating - worse.rating < LEAST_MARGIN or key in done:
            continue
        if max(used[better.identifier], used[worse.identifier]) >= PAIRS_A_TEXT:
            continue
        done.add(key)
        used.update(key)
        rows.append(_pair_row(better, worse, opening))
    generator.shuffle(rows)
    return rows


def _candidates(groups: Groups, generator: random.Random) -> Iterator[tuple[Snippet, Snippet, str]]:
    """(higher rated, lower rated, opening): each snippet with up to twelve of its group, in an order of chance."""
    for count in OPENING_WORDS:
        for (words, opening), group in groups.items():
            if words != count:
                continue
            shuffled = sorted(group, key=lambda snippet: snippet.identifier)
            generator.shuffle(shuffled)
            for snippet in shuffled:
                for other in generator.sample(shuffled, min(len(shuffled), PARTNERS)):
                    better, worse = (snippet, other) if snippet.rating > other.rating else (other, snippet)
                    yield better, worse, opening


def _pair_row(better: Snippet, worse: Snippet, opening: str) -> Json:
    return {
        "prompt": opening,
        "chosen": better.text[len(opening) :],
        "rejected": worse.text[len(opening) :],
        "rating_chosen": better.rating,
        "rating_rejected": worse.rating,
        "rating": round(better.rating - worse.rating, 4),
        "agreement": agreement(better.ratings, worse.ratings),
        "source": "movie",
        "chosen_id": better.identifier,
        "rejected_id": worse.identifier,
    }


def agreement(better: Sequence[int], worse: Sequence[int]) -> float:
    """Share of pairs of raters, one of each text, in which the first rates higher; ties count half."""
    wins = sum((a > b) + 0.5 * (a == b) for a in better for b in worse)
    return round(wins / (len(better) * len(worse)), 4)


def _jsonl(rows: Iterable[Json]) -> bytes:
    return "".join(json.dumps(row, ensure_ascii=False) + "\n" for row in rows).encode("utf-8")


def _notice(licence: str) -> str:
    return (
        f"The texts and ratings in this folder were made from {REQUIREMENT} by `fourfold data reviews`.\n"
        "Please cite: C.J. Hutto and E. Gilbert. VADER: A Parsimonious Rule-based Model for Sentiment Analysis of\n"
        "Social Media Text. Eighth International Conference on Weblogs and Social Media (ICWSM-14), June 2014.\n"
        f"Their licence:\n\n{licence.strip()}\n"
    )


def _manifest(files: Mapping[str, bytes], sdist_sha256: str) -> str:
    listed = {name: {"sha256": _sha256(data), "lines": data.count(b"\n")} for name, data in files.items()}
    content = {"recipe": RECIPE, "source": REQUIREMENT, "source_sha256": sdist_sha256, "files": listed}
    return json.dumps(content, indent=2) + "\n"


def _wrong_files(out: Path) -> list[str]:
    """What keeps the folder from being complete; empty when every file is as the manifest says."""
    try:
        manifest = json.loads((out / MANIFEST).read_bytes())
        listed = {name: entry["sha256"] for name, entry in manifest["files"].items()}
        recipe = manifest["recipe"]
    except (FileNotFoundError, ValueError, KeyError, TypeError, AttributeError):
        return [f"{MANIFEST} is missing or damaged"]
    if recipe != RECIPE:
        return [f"made by recipe {recipe} of another version of this program"]
    expected = {f"{kind}.{split}.jsonl" for kind in ("texts", "prompts", "pairs") for split in ("train", "test")}
    missing = sorted((expected | {NOTICE} | listed.keys()) - {path.name for path in out.iterdir()})
    damaged = [name for name in listed if name not in missing and _sha256((out / name).read_bytes()) != listed[name]]
    return [f"{name} is missing" for name in missing] + [f"{name} was changed or damaged" for name in damaged]


def _sha256(data: bytes) -> str:
    return hashlib.sha256(data).hexdigest()
