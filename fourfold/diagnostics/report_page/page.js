// What the page can do beyond being read: values of curves at a step, and all numbers of a token.
"use strict";
const SVG = "http://www.w3.org/2000/svg";

for (const curve of document.querySelectorAll("svg.curve")) {
  const lines = JSON.parse(curve.dataset.lines);
  const readout = curve.parentElement.querySelector(".readout");
  const steps = [...new Map(lines.flatMap((line) => line.points.map((p) => [p[0], p[1]]))).entries()].sort((a, b) => a[0] - b[0]);
  const cursor = document.createElementNS(SVG, "line");
  let at = -1;
  const show = (index) => {
    at = Math.max(0, Math.min(steps.length - 1, index));
    const [step, x] = steps[at];
    for (const [name, value] of [["x1", x], ["x2", x], ["y1", 12], ["y2", curve.viewBox.baseVal.height - 26], ["class", "cursor"]])
      cursor.setAttribute(name, value);
    curve.append(cursor);
    const said = lines.flatMap((line) => line.points.filter((p) => p[0] === step).map((p) => `${line.name} ${p[2]}`));
    readout.textContent = `step ${step.toLocaleString("en")}: ${said.join(", ")}`;
    curve.parentElement.classList.add("reading");
  };
  const hide = () => {
    cursor.remove();
    readout.textContent = "";
    curve.parentElement.classList.remove("reading");
  };
  curve.addEventListener("pointermove", (event) => {
    const box = curve.getBoundingClientRect();
    const x = ((event.clientX - box.left) / box.width) * curve.viewBox.baseVal.width;
    show(steps.reduce((best, step, index) => (Math.abs(step[1] - x) < Math.abs(steps[best][1] - x) ? index : best), 0));
  });
  curve.addEventListener("pointerleave", hide);
  curve.addEventListener("blur", hide);
  curve.addEventListener("focus", () => curve.matches(":focus-visible") && show(at < 0 ? steps.length - 1 : at));
  curve.addEventListener("keydown", (event) => {
    const to = { ArrowRight: at + 1, ArrowLeft: at - 1, Home: 0, End: steps.length - 1 }[event.key];
    if (to === undefined) return;
    event.preventDefault();
    show(to);
  });
}

const made = (tag, name, text) => {
  const element = document.createElement(tag);
  element.className = name;
  element.textContent = text;
  return element;
};

const probe = document.querySelector(".probe");
for (const sample of document.querySelectorAll(".xray > li")) {
  const tokens = [...sample.querySelectorAll(".tok[data-at]")];
  const table = document.getElementById(sample.dataset.numbers);
  const heads = [...table.querySelectorAll("thead th")].map((head) => head.textContent);
  const rows = [...table.querySelectorAll("tbody tr")];
  const show = (index) => {
    const cells = [...rows[index].children].map((cell) => cell.textContent);
    for (const token of document.querySelectorAll(".tok.on")) token.classList.remove("on");
    tokens[index].classList.add("on");
    const odds = made("div", "odds", "");
    for (const [who, head] of [["actor", "log-prob, nats"], ["reference", "log-prob of reference, nats"]]) {
      const p = Math.exp(Number(cells[heads.indexOf(head)].replaceAll(",", "").replace("\u2212", "-")));
      odds.append(made("span", "", `${who} ${(100 * p).toPrecision(3)} %`));
      const bar = made("span", `bar-of of-${who}`, "");
      bar.style.setProperty("--p", p);
      odds.append(bar);
    }
    const figures = heads.slice(2).map((head, n) => {
      const box = made("div", "", "");
      box.append(made("span", "", head), made("span", "value-of", cells[n + 2]));
      return box;
    });
    const who = made("div", "who", "");
    who.append(made("b", "", cells[1].trim() ? cells[1] : "\u2423"), made("span", "", `token ${index + 1} of ${rows.length}`));
    const numbers = made("div", "numbers-of", "");
    numbers.append(...figures);
    probe.replaceChildren(who, odds, numbers);
    probe.hidden = false;
  };
  tokens.forEach((token, index) => {
    token.addEventListener("pointerenter", () => show(index));
    token.addEventListener("focus", () => show(index));
    token.addEventListener("keydown", (event) => {
      const to = { ArrowRight: index + 1, ArrowLeft: index - 1, Home: 0, End: tokens.length - 1 }[event.key];
      if (to === undefined || !tokens[to]) return;
      event.preventDefault();
      token.tabIndex = -1;
      tokens[to].tabIndex = 0;
      tokens[to].focus();
    });
  });
}
