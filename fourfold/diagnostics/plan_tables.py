"""What `fourfold plan` shows in a terminal: does it fit, where the bytes are, what levers do, what a step costs."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence

from rich.box import ASCII, SIMPLE_HEAD
from rich.console import Console, RenderableType
from rich.table import Table
from rich.text import Text

from fourfold.diagnostics.plan_bars import Marks, lever_shown, memory_bars, waterfall
from fourfold.planner.bill import HOLDERS, KINDS, PHASES, Item, Moment
from fourfold.planner.plan import Plan
from fourfold.planner.remedies import Remedy, shortage
from fourfold.planner.units import quantity, seconds, size
from fourfold.planner.work import Costs

WIDEST = 110
FLOWS_SHOWN = 8


def show_plan(
    console: Console, plans: Sequence[Plan], notes: Sequence[str] = (), helps: Sequence[Remedy] = (), model: str = ""
) -> None:
    """The best plan in full, the others in a line each, or what is missing and what would help."""
    plan = plans[0]
    marks = Marks(min(console.width, WIDEST), ascii_only=console.options.ascii_only)
    console.print(_verdict(plan, model))
    _lines(console, notes, "bright_black")
    _titled(console, "Memory of the device by moment", *memory_bars(plan, marks))
    unit, one = ("GiB", 2**30) if plan.peak[1] >= 2**30 else ("MiB", 2**20)
    _titled(console, f"By phase, each in its fullest moment, in {unit}", _by_phase(plan, marks, one))
    _titled(console, f"By holder, at the peak in {plan.peak[0]}, in {unit}", _by_holder(plan, marks, one))
    _titled(console, "Levers in the order in which they were taken, peak and a step's time", *waterfall(plan, marks))
    _titled(console, _of_a_step(plan.costs), _work(plan, marks))
    if plan.costs.flows:
        _titled(console, "Traffic of one PPO step", _traffic(plan, marks))
    if plan.warnings:
        _titled(console, "Warnings")
        _lines(console, plan.warnings)
    if helps:
        _titled(console, "What would help, each alone")
        _lines(console, map(str, helps))
    if len(plans) > 1:
        _titled(console, "The best plans", _alternatives(plans, marks))


def _verdict(plan: Plan, model: str) -> Text:
    where = f"{plan.scene.cluster.device.name}"
    if plan.scene.layout.devices > 1:
        where = f"{plan.scene.layout.devices} x {where} ({plan.scene.layout})"
    head = Text(f"{model} on {where}: " if model else f"{where}: ", "bold")
    if not plan.fits:
        return head.append(shortage(plan), "bold red")
    moment, held = plan.peak
    head.append(f"fits, {size(held)} of {size(plan.budget)} (in {moment})", "bold green")
    host = plan.footprint.peak(tier="host")[1]
    if host:
        head.append(f", {size(host)} of host memory")
    return head.append(f"; {seconds(plan.costs.step_seconds)} a PPO step")


def _lines(console: Console, lines: Iterable[str], style: str = "") -> None:
    """Texts, each below a dash; what is wrapped stands below their beginning."""
    for line in lines:
        text = Table.grid(padding=(0, 1))
        text.add_column()
        text.add_column(overflow="fold")
        text.add_row("  -", Text(line, style))
        console.print(text)


def _titled(console: Console, title: str, *content: RenderableType) -> None:
    console.print()
    console.print(Text(title, "bold"))
    for each in content:
        console.print(each)


def _table(marks: Marks) -> Table:
    return Table(box=ASCII if marks.ascii_only else SIMPLE_HEAD, pad_edge=False, padding=(0, 1, 0, 0))


def _grid(table: Table, columns: Sequence[str], cells: Callable[[str, str], float], rows: Sequence[str]) -> Table:
    """Rows that have anything, and a last one with the sums."""
    table.add_column("", no_wrap=True)
    for column in columns:
        table.add_column(column, justify="right", no_wrap=True)
    for row in rows:
        values = [cells(row, column) for column in columns]
        if any(round(value, 2) for value in values):
            table.add_row(row, *(f"{value:,.2f}" if round(value, 2) else "-" for value in values))
    sums = (sum(cells(row, column) for row in rows) for column in columns)
    table.add_section()
    table.add_row("together", *(f"{value:,.2f}" for value in sums), style="bold")
    return table


def _by_phase(plan: Plan, marks: Marks, one: int) -> Table:
    """Kinds by phases, each phase in its fullest moment."""
    bill = plan.footprint
    fullest = {phase: bill.peak(phase)[0] for phase in PHASES if any(m.phase == phase for m in bill.moments)}
    columns = {_role_of(moment): bill.by(lambda item: item.kind, moment) for moment in fullest.values()}
    return _grid(_table(marks), list(columns), lambda kind, column: columns[column].get(kind, 0) / one, KINDS)


def _role_of(moment: Moment) -> str:
    return str(moment).replace("/", "\n")


def _by_holder(plan: Plan, marks: Marks, one: int) -> Table:
    """Kinds by holders in the peak moment."""
    bill, moment = plan.footprint, plan.peak[0]

    def key(item: Item) -> str:
        return f"{item.kind}/{item.holder}"

    held = bill.by(key, moment)
    holders = [name for name in HOLDERS if any(each.endswith(f"/{name}") for each in held)]
    return _grid(_table(marks), holders, lambda kind, holder: held.get(f"{kind}/{holder}", 0) / one, KINDS)


def _of_a_step(costs: Costs) -> str:
    spent = ", ".join(f"{phase} {seconds(value)}" for phase, value in costs.seconds.items())
    bubble = f", bubble {seconds(costs.bubble)}" if costs.bubble else ""
    hidden = f", scoring hidden {seconds(costs.hidden)}" if costs.hidden else ""
    return f"One PPO step: {spent}{bubble}{hidden}; MFU {costs.utilisation:.1%}"


def _work(plan: Plan, marks: Marks) -> Table:
    table = _table(marks)
    for name, right in (("work", False), ("passes", True), ("tokens", True), ("FLOP", True), ("read", True)):
        table.add_column(name, justify="right" if right else "left", no_wrap=True)
    table.add_column("time", justify="right", no_wrap=True)
    table.add_column("bound by", no_wrap=True)
    for each in plan.costs.work:
        passes = (
            f"{each.forward_passes:g}+{each.backward_passes:g}" if each.backward_passes else f"{each.forward_passes:g}"
        )
        table.add_row(
            str(each.moment),
            passes,
            f"{each.tokens:,}",
            quantity(each.flops).strip(),
            f"{quantity(each.bytes_read)}B",
            seconds(each.seconds),
            each.bound,
        )
    return table


def _traffic(plan: Plan, marks: Marks) -> Table:
    flows = sorted(plan.costs.flows, key=lambda flow: (-flow.seconds, -flow.bytes))
    table = _table(marks)
    table.add_column("what", overflow="fold", ratio=1)
    table.add_column("over", no_wrap=True)
    for column in ("bytes", "time"):
        table.add_column(column, justify="right", no_wrap=True)
    for flow in flows[:FLOWS_SHOWN]:
        time = "hidden" if flow.hidden else seconds(flow.seconds)
        table.add_row(f"{flow.what} ({flow.phase})", flow.link, f"{quantity(flow.bytes)}B", time)
    if len(flows) > FLOWS_SHOWN:
        rest = flows[FLOWS_SHOWN:]
        total = sum(flow.bytes for flow in rest)
        shown = seconds(sum(flow.seconds for flow in rest if not flow.hidden))
        table.add_row(f"{len(rest)} smaller ones", "", f"{quantity(total)}B", shown)
    return table


def _alternatives(plans: Sequence[Plan], marks: Marks) -> Table:
    table = _table(marks)
    table.add_column("", no_wrap=True)
    table.add_column("levers", overflow="fold", ratio=1)
    for column in ("peak", "a step"):
        table.add_column(column, justify="right", no_wrap=True)
    for number, plan in enumerate(plans, start=1):
        levers = ", ".join(lever_shown(step) for step in plan.steps[1:]) or "none: the settings as given"
        if plan.scene.layout.devices > 1:
            levers = f"{plan.scene.layout}; {levers}"
        table.add_row(str(number), levers, size(plan.peak[1]), seconds(plan.costs.step_seconds))
    return table
