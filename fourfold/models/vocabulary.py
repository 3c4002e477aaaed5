"""Whether two tokenizers have the same tokens, and under which ids."""

from __future__ import annotations

from typing import Any, NamedTuple

# Those whose place in a text means something; padding is masked, so its token may be any.
SPECIAL = ("bos_token", "eos_token", "unk_token", "sep_token", "cls_token", "mask_token")


class Difference(NamedTuple):
    """A token that both know otherwise, or that one does not know, and the sizes of both vocabularies."""

    token: str
    mine: int | None
    theirs: int | None
    sizes: tuple[int, int]

    def __str__(self) -> str:
        mine, theirs = ("none" if found is None else str(found) for found in (self.mine, self.theirs))
        return f"{self.sizes[1]:,} and {self.sizes[0]:,} tokens; {self.token!r} is {theirs} and {mine}"


def vocabulary_difference(mine: Any, theirs: Any) -> Difference | None:
    """The first token, by its text, that the two tokenizers do not have in common; None where there is none."""
    ours, others = mine.get_vocab(), theirs.get_vocab()
    if ours == others:
        return None
    token = min(token for token in ours.keys() | others.keys() if ours.get(token) != others.get(token))
    return Difference(token, ours.get(token), others.get(token), (len(ours), len(others)))


def ids_of_the_same_tokens(mine: Any, theirs: Any, count: int) -> list[int] | None:
    """For each id below `count` the id of the same text in `theirs`; None where a token of `mine` is not there.

    Ids that no token has stand for nothing and are mapped to 0.
    """
    ours, others = mine.get_vocab(), theirs.get_vocab()
    if not ours.keys() <= others.keys():
        return None
    found = [0] * count
    for token, mine_id in ours.items():
        if mine_id < count:
            found[mine_id] = others[token]
    return found


def special_difference(mine: Any, theirs: Any) -> str:
    """The first special token that is another one; empty where all are the same."""
    for name in SPECIAL:
        ours, others = getattr(mine, name, None), getattr(theirs, name, None)
        if ours != others:
            return f"its {name} is {others!r}, the run's {ours!r}"
    return ""
