"""Tables of the credit report for a terminal."""

from __future__ import annotations

from collections.abc import Iterator

from rich.box import SIMPLE_HEAD
from rich.table import Table
from rich.text import Text

from fourfold.diagnostics.credit import Credit
from fourfold.diagnostics.tables import visible


def credit_tables(credit: Credit) -> Iterator[Table]:
    """How the dimensions relate, the tokens that are trade-offs by vocabulary, and single places in their texts."""
    yield _relations(credit)
    yield _trade_offs(credit)
    yield _places(credit)


def _relations(credit: Credit) -> Table:
    title = "weighted advantages of a token: deviation; correlation / share of tokens with opposite signs"
    table = _table(credit, title, ("dimension", "deviation"))
    for i, name in enumerate(credit.dimensions):
        others = (
            "" if i == j else f"{credit.correlations[i][j]:+.2f} / {credit.opposed_shares[i][j]:.0%}"
            for j in range(len(credit.dimensions))
        )
        table.add_row(name, f"{credit.deviations[i]:.3f}", *others)
    return table


def _trade_offs(credit: Credit) -> Table:
    table = _table(credit, "tokens that helped one dimension and hurt another: mean advantages", ("token", "count"))
    for each in credit.trade_offs:
        table.add_row(visible(repr(each.text)), str(each.count), *map(_signed, each.advantages))
    return table


def _places(credit: Credit) -> Table:
    table = _table(credit, "the largest single trade-offs", ("text", "row"))
    for each in credit.places:
        text = Text.assemble(visible(each.before), (visible(each.text).plain, "bold reverse"), visible(each.after))
        table.add_row(text, str(each.row), *map(_signed, each.advantages))
    return table


def _table(credit: Credit, title: str, columns: tuple[str, str]) -> Table:
    table = Table(title=title, box=SIMPLE_HEAD, title_justify="left")
    table.add_column(columns[0])
    for name in (columns[1], *credit.dimensions):
        table.add_column(name, justify="right", no_wrap=True)
    return table


def _signed(advantage: float) -> Text:
    colour = "green" if advantage > 0 else "red" if advantage < 0 else ""
    return Text(f"{advantage:+.3f}", colour)
