"""The token x-ray as a drawing of text: tokens coloured by a number that the reader chooses, with all numbers below.

Colours come from custom properties, one a measure, each from -1 to 1; the style picks the one whose button is pressed.
So the page needs no script to switch, and a token costs a few dozen bytes.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from statistics import median, quantiles
from xml.etree.ElementTree import Element

from fourfold.diagnostics.numbers import short
from fourfold.diagnostics.pages.document import switch
from fourfold.diagnostics.pages.elements import Child, h
from fourfold.diagnostics.pages.svg import polyline, strip
from fourfold.diagnostics.pages.tables import Row, table
from fourfold.diagnostics.token_texts import TokenText
from fourfold.diagnostics.xray import Measure, Sample, Xray, XrayStep

# The colour is full at this share of all numbers: a few that are far off would leave the others pale.
FULL_AT = 0.98
# Of a prompt before its response: a long one is there to be unfolded.
PROMPT_CHARACTERS = 240
ACTOR, REFERENCE = "log_probs", "ref_log_probs"
COLOURED = {
    "signed": "in proportion to the square root of its size",
    "spread": "from the middle of all",
    "surprise": "the less probable, the stronger",
}


@dataclass(frozen=True)
class Scale:
    """From a measure's numbers to colours; `index` is its property in the style."""

    measure: Measure
    index: int
    middle: float
    full: float  # distance from the middle at which the colour is full

    def share(self, value: float) -> float:
        """From -1 to 1."""
        share = max(-1.0, min(1.0, (value - self.middle) / self.full))
        if self.measure.scale == "surprise":
            return -share
        return math.copysign(math.sqrt(abs(share)), share) if self.measure.scale == "signed" else share


def scales_of(xray: Xray) -> list[Scale]:
    """One for each measure that has a colour, over all that is shown, so that samples and steps can be compared."""
    found = []
    for measure in xray.measures:
        if measure.scale is None:
            continue
        keys = (ACTOR, REFERENCE) if measure.key == ACTOR else (measure.key,)
        values = [v for step in xray.steps for each in step.samples for key in keys for v in each.numbers[key]]
        middle = median(values) if measure.scale == "spread" else 0.0
        sizes = [abs(value - middle) for value in values]
        full = quantiles(sizes, n=100, method="inclusive")[round(FULL_AT * 100) - 1] if len(sizes) > 1 else sizes[0]
        found.append(Scale(measure, len(found), middle, full or max(sizes) or 1.0))
    return found


def xray_section(xray: Xray) -> Iterator[Child]:
    """Buttons, the meaning of colours, and the samples."""
    scales = scales_of(xray)
    where = "Responses to held-out prompts" if xray.source == "held out" else "Responses of a training rollout"
    yield h("p", f"{where}, chosen for what is extreme in them. Point at a token, or go to it by the arrow keys, to "
            "see all its numbers.", class_="muted")  # fmt: skip
    yield h(
        "div",
        switch("by", "What tokens are coloured by", {f"by-{each.index}": each.measure.name for each in scales}),
        _steps_switch(xray.steps),
        class_="controls",
    )
    for scale in scales:
        yield _legend(scale)
    for n, step in enumerate(xray.steps):
        samples = [_sample(each, xray.measures, scales, f"{n}-{at}") for at, each in enumerate(step.samples)]
        yield h("ol", samples, class_=f"xray at-{n}")
    yield h("div", class_="probe", aria_live="polite", hidden="")  # the script fills it


def _steps_switch(steps: Sequence[XrayStep]) -> Element | None:
    if len(steps) < 2:
        return h("p", f"step {steps[0].step:,}", class_="muted")
    # The last one is pressed to begin with.
    order = {f"at-step-{n}": f"step {step.step:,}" for n, step in reversed(list(enumerate(steps)))}
    return switch("at", "The step of training", order)


def _legend(scale: Scale) -> Element:
    """A strip of colours with the numbers at its ends."""
    measure = scale.measure
    unit = f" {measure.unit}" if measure.unit else ""
    low, high = scale.middle - scale.full, scale.middle + scale.full
    if measure.scale == "surprise":
        ends: list[Child] = [h("span", f"0{unit}"), h("i", class_="ramp surprise"), h("span", f"{short(low)}{unit}")]
    else:
        ends = [h("span", short(low)), h("i", class_="ramp"), h("span", f"{short(high)}{unit}"),
                h("span", f"(middle {short(scale.middle)})") if scale.middle else None]  # fmt: skip
    assert measure.scale is not None
    return h("p", h("b", measure.name), ends, h("span", COLOURED[measure.scale]), class_=f"scale by-{scale.index}")


def _sample(sample: Sample, measures: Sequence[Measure], scales: Sequence[Scale], key: str) -> Element:
    cut = len(sample.prompt) > PROMPT_CHARACTERS
    actor = h("div", h("h4", "actor"), _tokens(sample, scales, ACTOR, key), class_="pane")
    reference = h("div", h("h4", "reference"), _tokens(sample, scales, REFERENCE, ""), class_="pane reference")
    return h(
        "li",
        h("div", h("h3", sample.why), h("p", _about(sample), class_="muted"), class_="sample-head"),
        h("details", h("summary", "The whole prompt"), h("p", sample.prompt, class_="ask")) if cut else None,
        h("div", actor, reference, class_="panes"),
        _way(sample, key) if len(sample.tokens) > 1 else None,
        h("p", f"{sample.left_out:,} more tokens are not shown.", class_="muted") if sample.left_out else None,
        h("details", h("summary", "All numbers"), _table(sample, measures, key)),
        data_row=sample.row, data_numbers=f"numbers-{key}",
    )  # fmt: skip


def _way(sample: Sample, key: str) -> Element:
    """Value and return along the response, under its tokens: shown with the colours of values."""
    both = {"value": sample.numbers["values"], "return": sample.numbers["returns"]}
    low, high = (pick(v for values in both.values() for v in values) for pick in (min, max))
    paths = []
    for n, values in enumerate(both.values()):
        places = [
            (1000 * t / (len(values) - 1), 56 - 52 * (v - low) / ((high - low) or 1)) for t, v in enumerate(values)
        ]
        paths.append(polyline(places, f"line line-{n}"))
    title = f"Value and return from the first token to the last, {short(low)} to {short(high)}"
    entries = [h("li", h("i", class_=f"key line-{n}"), name) for n, name in enumerate(both)]
    range_ = h("li", f"{short(low)} to {short(high)}, first token to last")
    return h(
        "div", strip(f"way-{key}", title, *paths, height=60), h("ul", entries, range_, class_="legend"), class_="way"
    )


def _about(sample: Sample) -> str:
    parts = "".join(f", {name} {short(value)}" for name, value in sample.parts.items())
    end = "cut by the length limit" if sample.truncated else "came to its end"
    kl = sum(sample.numbers["kl"])
    tokens = f"{sample.length:,} token" + ("s" if sample.length != 1 else "")
    return f"score {short(sample.score)}{parts}; {tokens}, KL {short(kl)} nats, {end}"


def _tokens(sample: Sample, scales: Sequence[Scale], log_probs: str, key: str) -> Element:
    """The response; with a `key`, tokens can be pointed at, and only the first one is in the order of the tab key."""
    asked = sample.prompt
    if len(asked) > PROMPT_CHARACTERS:
        asked = "\N{HORIZONTAL ELLIPSIS}" + asked[-PROMPT_CHARACTERS:]
    made = [h("span", asked, class_="ask")]
    for at, token in enumerate(sample.tokens):
        keys = [log_probs if each.measure.key == ACTOR else each.measure.key for each in scales]
        shown = [(each.index, each.share(sample.numbers[name][at])) for each, name in zip(scales, keys, strict=True)]
        if log_probs == REFERENCE:
            shown = [each for each, scale in zip(shown, scales, strict=True) if scale.measure.key == ACTOR]
        style = ";".join(f"--m{index}:{share:.2f}" for index, share in shown if abs(share) >= 0.005)
        focus = {"tabindex": -1 if at else 0, "data_at": at} if key else {}
        made.append(h("span", _shown(token), class_=_class_of(token), style=style or None, **focus))
    return h("p", made, class_="tokens", role="group", aria_label="tokens of the response" if key else None)


def _class_of(token: TokenText) -> str:
    return "tok special" if token.special else "tok bytes" if token.bytes and not token.text else "tok"


def _shown(token: TokenText) -> list[Child]:
    """Line ends are marked, and bytes of a character that ends in a later token stand for themselves."""
    said: list[Child] = [token.text.replace("\n", "\N{DOWNWARDS ARROW WITH CORNER LEFTWARDS}\n")]
    if token.bytes:
        said.append(h("small", token.bytes))
    return said


def _table(sample: Sample, measures: Sequence[Measure], key: str) -> Element:
    rows = []
    for at, token in enumerate(sample.tokens):
        figures = [h("td", short(sample.numbers[each.key][at])) for each in measures]
        rows.append(Row(str(at + 1), [h("td", _shown(token), class_="why token-name"), *figures]))
    heads = ("#", "token", *(f"{each.name}, {each.unit}" if each.unit else each.name for each in measures))
    made = table(f"Tokens of the response to {sample.prompt[-40:]!r}", heads, rows, "token-table")
    made.set("id", f"numbers-{key}")
    return made
