"""The page of a run in a real browser: on a phone and a desk, light and dark, by keyboard, without a network."""

from __future__ import annotations

from pathlib import Path

import pytest

from diagnostics.browser import CHROMIUM, asked, screenshot
from diagnostics.shown_run import HOSTILE, change_json, copy_of, make_run
from fourfold.diagnostics.report import Asked, write_report

pytestmark = pytest.mark.skipif(CHROMIUM is None, reason="there is no chromium")

PHONE, DESK = 390, 1280
FITS = """
  const wide = [...document.querySelectorAll("body *")].filter((e) =>
    e.getBoundingClientRect().right > innerWidth + 1 && !e.closest(".scroll, nav, pre"));
  return {page: document.documentElement.scrollWidth, window: innerWidth,
          wide: wide.map((e) => e.outerHTML.slice(0, 90)),
          paper: getComputedStyle(document.body).backgroundColor, ink: getComputedStyle(document.body).color,
          curves: document.querySelectorAll("svg.curve").length};
"""
COLOURS = """
  const tokens = [...document.querySelectorAll(".at-1 .pane:not(.reference) .tok")];
  const colours = () => tokens.map((token) => getComputedStyle(token).backgroundColor).join();
  const shown = (name) => getComputedStyle(document.querySelector(name)).display !== "none";
  const found = {tokens: tokens.length, ways: [], first: shown(".at-0"), last: shown(".at-1"), beside: []};
  for (const button of document.querySelectorAll("input[name=by]")) {
    button.click();
    found.ways.push(colours());
    found.beside.push(shown(".at-1 .pane.reference"));
  }
  document.querySelector("#at-step-0").click();
  return {...found, firstThen: shown(".at-0"), lastThen: shown(".at-1")};
"""
KEYS = """
  const press = (target, key) =>
    target.dispatchEvent(new KeyboardEvent("keydown", {key, bubbles: true, cancelable: true}));
  const sample = [...document.querySelectorAll(".at-1 > li")].find(
    (each) => each.querySelectorAll(".tok[data-at]").length > 2);
  const tokens = [...sample.querySelectorAll(".tok[data-at]")];
  const reachable = tokens.filter((token) => token.tabIndex === 0).length;
  tokens[0].focus();
  press(tokens[0], "ArrowRight");
  const second = document.activeElement === tokens[1];
  tokens[1].dispatchEvent(new Event("focus"));
  const probe = document.querySelector(".probe");
  const rows = document.getElementById(sample.dataset.numbers).querySelectorAll("tbody tr");
  const cells = [...rows[1].children].slice(2).map((cell) => cell.textContent);
  const figures = [...probe.querySelectorAll(".value-of")].map((each) => each.textContent);
  const who = probe.querySelector(".who").textContent;
  press(tokens[1], "End");
  const curve = document.querySelector("svg.curve");
  press(curve, "End");
  const readout = curve.parentElement.querySelector(".readout");
  const end = readout.textContent;
  press(curve, "Home");
  return {reachable, second, hidden: probe.hidden, cells, figures, who, end, home: readout.textContent,
          odds: [...probe.querySelectorAll(".odds span")].map((each) => each.textContent).filter(Boolean),
          last: document.activeElement === tokens.at(-1)};
"""


@pytest.fixture(scope="module")
def page(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("browsed")
    write_report(make_run(folder), folder / "report.html", Asked(samples=4))
    return folder / "report.html"


@pytest.mark.parametrize("scheme", ["light", "dark"])
@pytest.mark.parametrize("width", [PHONE, DESK])
def test_it_fits_the_window_in_the_readers_scheme(page: Path, tmp_path: Path, width: int, scheme: str) -> None:
    answer = asked(page, FITS, tmp_path, width=width, scheme=scheme)
    assert answer["errors"] == []
    found = answer["found"]
    assert found["page"] <= found["window"] == width and found["wide"] == []
    assert found["curves"] > 15
    paper, ink = ([int(n) for n in found[name][4:-1].split(",")] for name in ("paper", "ink"))
    assert (sum(paper) > sum(ink)) == (scheme == "light")


def test_buttons_change_what_tokens_are_coloured_by(page: Path, tmp_path: Path) -> None:
    answer = asked(page, COLOURS, tmp_path)
    assert answer["errors"] == []
    found = answer["found"]
    assert found["tokens"] >= 4 and len(found["ways"]) == 5
    assert len(set(found["ways"])) >= 4, (
        "every measure has colours of its own (at the last step KL can be as small as log-probs' error)"
    )
    assert found["beside"] == [False, True, False, False, False], "actor beside reference, for log-probs"
    assert (found["first"], found["last"]) == (False, True) and (found["firstThen"], found["lastThen"]) == (True, False)


def test_keys_move_over_tokens_and_curves(page: Path, tmp_path: Path) -> None:
    answer = asked(page, KEYS, tmp_path)
    assert answer["errors"] == []
    found = answer["found"]
    assert found["reachable"] == 1, "the tab key goes from sample to sample, arrows from token to token"
    assert found["second"] and found["last"] and not found["hidden"]
    assert found["figures"] == found["cells"] and "token 2 of" in found["who"]
    assert found["odds"][0].startswith("actor ") and found["odds"][1].startswith("reference ")
    assert found["end"].startswith("step 4: training ") and found["home"].startswith("step 0: held out ")


def test_texts_of_models_run_nothing(page: Path, tmp_path: Path) -> None:
    def harm(folder: Path) -> None:
        for name in ("before.json", "after.json"):
            texts = {"prompts": [HOSTILE], "responses": [f"{HOSTILE} {name}"]}
            change_json(folder / "ppo" / name, lambda value, texts=texts: value.update(texts))

    folder = copy_of(page.parent / "run", tmp_path / "run", harm)
    write_report(folder, tmp_path / "page.html", Asked())
    script = """
      return {images: document.images.length, scripts: document.scripts.length,
              said: document.querySelector(".samples .prompt").textContent};
    """
    answer = asked(tmp_path / "page.html", f"window.alert = () => errors.push('ran'); {script}", tmp_path)
    assert answer["errors"] == []
    assert answer["found"]["images"] == 0 and answer["found"]["scripts"] == 3, "its own, and the two of this test"
    said = answer["found"]["said"]
    assert said.startswith(HOSTILE.split("\u202e")[0]) and "\\u202eevil\\u200f \\x00" in said


@pytest.mark.parametrize("scheme", ["light", "dark"])
def test_a_picture_of_it_can_be_taken(page: Path, tmp_path: Path, scheme: str) -> None:
    """With its policy in force."""
    screenshot(page, tmp_path / "shot.png", tmp_path, width=DESK, scheme=scheme)
    assert (tmp_path / "shot.png").read_bytes()[:4] == b"\x89PNG" and (tmp_path / "shot.png").stat().st_size > 20_000
