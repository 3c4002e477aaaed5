"""The four models in the three phases of a PPO step: what each does, which tensors pass, where bytes lie.

Rows are models, columns phases; between score and learn stands what is estimated without a model. Shared layers lie
below, under all phases.
"""

from __future__ import annotations

from collections.abc import Iterator
from xml.etree.ElementTree import Element

from fourfold.diagnostics.pages.elements import h
from fourfold.diagnostics.pages.svg import arrow, drawing, line, rect, text
from fourfold.diagnostics.plan_page.cells import Cell, Model, four_models, passes, shared_layers, where
from fourfold.diagnostics.plan_page.tensors import PROMPTS, Tensor, named, small, trunk_cache
from fourfold.planner.bill import Phase
from fourfold.planner.costs import WORKING
from fourfold.planner.passes import Cut
from fourfold.planner.plan import Plan
from fourfold.planner.units import quantity, seconds, size

WIDTH, CARD, CELL = 1180.0, 146.0, 164.0
COLUMNS: dict[Phase, float] = {"generate": 160.0, "score": 500.0, "learn": 1016.0}
ESTIMATE, ESTIMATE_WIDTH = 796.0, 94.0
TOP, ROW, GAP, BAND = 116.0, 112.0, 14.0, 78.0
LOOP, PASSED = 66.0, 94.0  # heights of the lines above the models: new weights, and log_probs
# What is worked out from the tensors, in the row whose tensor it needs or whose learning needs it.
ESTIMATED = (
    ("advantages", "GAE of rewards"),
    ("returns", "+ values"),
    ("kl", "estimator"),
    ("rewards", "scores and KL"),
)


def flow_drawing(plan: Plan) -> Element:
    """The drawing, for wide screens and paper."""
    models, shared = four_models(plan), shared_layers(plan)
    bottom = _row(len(models)) + len(shared) * (BAND + GAP)
    inside: list[Element] = [_frozen_pattern(), *_headers(plan), *_above(plan), *_between(plan, models)]
    for index, model in enumerate(models):
        inside += _model(plan, model, _row(index))
    inside += _estimates(plan, len(models))
    for index, model in enumerate(shared):
        inside += _band(plan, model, _row(len(models)) + index * (BAND + GAP))
    about = " ".join(f"{phase}: {_told(models, index)}." for index, phase in enumerate(WORKING))
    return drawing("flow", WIDTH + 2, bottom - GAP + 2, "Four models in three phases", about, inside, class_="flow")


def _told(models: list[Model], index: int) -> str:
    """A phase in a sentence, for those who cannot see the drawing."""
    return "; ".join(f"{model.who} {model.cells[index].does or 'is idle'}" for model in models)


def _row(index: int) -> float:
    return TOP + index * (ROW + GAP)


def _middle(index: int) -> float:
    return _row(index) + ROW / 2


def _frozen_pattern() -> Element:
    stripe = line(0, 0, 0, 7, "stripe")
    pattern = h("pattern", stripe, id="frozen", width=7, height=7, patternUnits="userSpaceOnUse")
    pattern.set("patternTransform", "rotate(45)")
    return h("defs", pattern)


def _headers(plan: Plan) -> Iterator[Element]:
    """Names of the phases, with their share of the step."""
    step = plan.costs.step_seconds
    for phase, x in COLUMNS.items():
        spent = plan.costs.seconds.get(phase, 0.0)
        yield text(x, 18, phase, "phase")
        yield text(x, 35, f"{seconds(spent)}, {spent / step:.0%} of a step", "small")
        yield rect(x, 43, CELL, 3, "track")
        yield rect(x, 43, CELL * spent / step, 3, "accent")


def _above(plan: Plan) -> Iterator[Element]:
    """What passes over the models: prompts in, log-probs to the estimates, new weights back to sampling."""
    start, learn = COLUMNS["generate"], COLUMNS["learn"]
    yield text(0, PASSED - 21, "prompts", "name")
    yield text(0, PASSED - 7, f"{PROMPTS.shape} {PROMPTS.dtype}", "shape")
    yield from arrow([(0, PASSED), (start + 22, PASSED), (start + 22, TOP)])
    yield text(start + CELL + 8, LOOP - 7, "new weights: the next rollout is sampled with them", "shape")
    yield from arrow([(learn + 40, TOP), (learn + 40, LOOP), (start + 70, LOOP), (start + 70, TOP)], "arrow strong")
    kept = named("log_probs")
    x = start + CELL + 8
    yield text(x, PASSED - 7, kept.name, "name")
    yield text(x + 70, PASSED - 7, f"{kept.shape} {_weight(plan, kept)}", "shape")
    middle = ESTIMATE + ESTIMATE_WIDTH / 2
    yield from arrow([(start + 118, TOP), (start + 118, PASSED), (middle, PASSED), (middle, TOP)])


def _weight(plan: Plan, *tensors: Tensor) -> str:
    return f"{tensors[0].dtype}, {small(sum(tensor.bytes(plan.scene) for tensor in tensors))}"


def _between(plan: Plan, models: list[Model]) -> Iterator[Element]:
    """Arrows of tensors between the cells."""
    left, bus, score = COLUMNS["generate"] + CELL, COLUMNS["score"] - 18, COLUMNS["score"]
    reads = [index for index, model in enumerate(models) if not model.cells[1].idle]
    y = _middle(0)
    for index in reads:
        to = _middle(index)
        yield from arrow([(left, y), (bus, y), (bus, to), (score, to)] if index else [(left, y), (score, y)])
    ids = named("sequences")
    yield from _label(plan, left + 8, y, [ids])
    for index, name in ((1, "values"), (2, "ref_log_probs"), (3, "scores")):
        yield from arrow([(score + CELL, _middle(index)), (ESTIMATE, _middle(index))])
        yield from _label(plan, score + CELL + 8, _middle(index), [named(name)])
    right = ESTIMATE + ESTIMATE_WIDTH
    for index, names in ((0, ("advantages", "log_probs")), (1, ("returns", "values"))):
        yield from arrow([(right, _middle(index)), (COLUMNS["learn"], _middle(index))], "arrow strong")
        yield from _label(plan, right + 8, _middle(index), [named(name) for name in names])


def _label(plan: Plan, x: float, y: float, tensors: list[Tensor]) -> Iterator[Element]:
    """Names above a line, shape and bytes below it."""
    for index, tensor in enumerate(reversed(tensors)):
        yield text(x, y - 7 - 14 * index, tensor.name, "name")
    yield text(x, y + 16, tensors[0].shape, "shape")
    yield text(x, y + 30, _weight(plan, *tensors), "shape")


def _model(plan: Plan, model: Model, y: float) -> Iterator[Element]:
    yield from _card(plan, model, y, ROW)
    for cell in model.cells:
        yield _cell(plan, model, cell, COLUMNS[cell.phase], y)


def _card(plan: Plan, model: Model, y: float, height: float) -> Iterator[Element]:
    """Who it is, whether it is trained, how large it is and where it lies."""
    yield rect(0, y, 3, height, "accent" if model.trained else "track")
    yield text(12, y + 16, model.who, "who")
    yield text(12, y + 33, "trained" if model.trained else "frozen", "tag trained" if model.trained else "tag")
    yield text(12, y + 51, model.about, "small")
    yield text(12, y + 67, model.place, "small")
    for index, (tier, count) in enumerate(model.held.items() if height >= ROW else ()):
        yield text(12, y + 88 + 16 * index, f"≤ {size(count)} {where(plan.scene, tier)}", "small figure")


def style_of(model: Model, cell: Cell) -> str:
    """How a cell is drawn: learning, working without gradients, frozen, or idle."""
    if cell.idle:
        return "idle"
    if not model.trained:
        return "frozen"
    return "learns" if cell.work is not None and cell.work.backward_passes else "works"


def _cell(plan: Plan, model: Model, cell: Cell, x: float, y: float) -> Element:
    style = style_of(model, cell)
    inside = [
        h("title", _tooltip(plan, cell)),
        rect(x, y, CELL, ROW, f"cell {style}", rx=10),
        text(x + 12, y + 24, cell.does or "idle", "does"),
    ]
    for index, said in enumerate(cell_lines(plan, cell)):
        inside.append(text(x + 12, y + 46 + 18 * index, said, "small figure"))
    return h("g", inside, class_=f"at {style}", data_role=cell.who, data_phase=cell.phase)


def cell_lines(plan: Plan, cell: Cell) -> list[str]:
    """Passes, FLOP and seconds, and the bytes that it holds meanwhile."""
    lines = []
    if cell.work is not None:
        lines += [passes(cell.work), f"{quantity(cell.work.flops)}FLOP, {seconds(cell.work.seconds)}"]
    elif cell.who == "reward" and not cell.idle:
        lines.append("not counted by the planner")
    return lines + [f"{size(count)} {where(plan.scene, tier)}" for tier, count in list(cell.held.items())[:2]]


def _tooltip(plan: Plan, cell: Cell) -> str:
    held = ", ".join(f"{size(count)} {where(plan.scene, tier)}" for tier, count in cell.held.items()) or "nothing"
    told = f"{cell.who} in {cell.phase}: {cell.does or 'idle'}; holds {held}"
    if cell.work is None:
        return told
    work = cell.work
    return (
        f"{told}; {work.tokens:,} tokens through its layers, {quantity(work.bytes_read)}B read from memory, "
        f"waits for {work.bound}"
    )


def _estimates(plan: Plan, rows: int) -> Iterator[Element]:
    """Between score and learn: what is worked out without a model."""
    yield rect(ESTIMATE, TOP, ESTIMATE_WIDTH, rows * (ROW + GAP) - GAP, "estimate", rx=10)
    middle = ESTIMATE + ESTIMATE_WIDTH / 2
    for index, (name, how) in enumerate(ESTIMATED):
        said = f"{how} {plan.scene.config.ppo.kl_estimator}" if name == "kl" else how
        yield text(middle, _middle(index) - 4, name, "name", "middle")
        yield text(middle, _middle(index) + 11, said, "tiny", "middle")


def _band(plan: Plan, model: Model, y: float) -> Iterator[Element]:
    """Layers that lie under several models, through all phases."""
    style = "works" if model.trained else "frozen"
    left = COLUMNS["generate"]
    yield from _card(plan, model, y, BAND)
    yield rect(left, y, WIDTH - left, BAND, f"cell {style}", rx=10)
    if model.trained:
        yield rect(COLUMNS["learn"], y, CELL, BAND, "cell learns", rx=10)
    for cell in model.cells:
        x = COLUMNS[cell.phase] + 12
        inside = [h("title", _tooltip(plan, cell)), text(x, y + 24, cell.does, "does")]
        for index, said in enumerate(cell_lines(plan, cell)[-2:]):
            inside.append(text(x, y + 46 + 18 * index, said, "small figure"))
        yield h("g", inside, class_=f"at {style}", data_role=cell.who, data_phase=cell.phase)
    if model.who == "trunk" and not Cut.of(plan.scene).trunk_trained:
        kept = trunk_cache(plan.scene)
        start, score = COLUMNS["generate"] + CELL, COLUMNS["score"]
        yield from arrow([(start - 14, y + 20), (score + 4, y + 20)])
        yield from arrow([(score + CELL - 8, y + 20), (COLUMNS["learn"] + 4, y + 20)])
        yield text(start + 8, y + 37, kept.name, "name")
        yield text(start + 8, y + 52, "[rollout, prompt+response,", "shape")
        yield text(start + 8, y + 66, f"hidden] {_weight(plan, kept)}", "shape")
