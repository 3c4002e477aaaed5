"""How long a browser needs for the page of a long run: what docs/report.md says of it.

    PYTHONPATH=.:tests python -m diagnostics.page_load [PAGE.html]

Without a page: a tiny run's rows are repeated to 400 steps with an evaluation every 10. Printed are the medians of five
loads, each in a new browser: of the time from the start of the navigation to the end of the load event, and of the
seconds that the page's thread has computed by then, which other work on the machine does not lengthen.
"""

from __future__ import annotations

import contextlib
import json
import os
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

from diagnostics.browser import CHROMIUM, OPTIONS
from diagnostics.shown_run import make_run
from fourfold.diagnostics.doctor_says import examination_of
from fourfold.diagnostics.predicted import memory_of, time_of
from fourfold.diagnostics.report_page import Contents, report_page
from fourfold.diagnostics.run_record import read_run
from fourfold.diagnostics.token_texts import tokenizer_of
from fourfold.diagnostics.xray import make_xray

LONG, EVERY, LOADS, SAMPLES = 400, 10, 5, 6
TIMING = "JSON.stringify(performance.getEntriesByType('navigation')[0])"


def long_page(folder: Path) -> str:
    """The page of a run of 400 steps, with an x-ray of six samples."""
    root = make_run(folder)
    record = read_run(root)
    steps = [{**record.steps[n % len(record.steps)], "step": n + 1} for n in range(LONG)]
    rows = record.evaluations
    evaluations = [{**rows[n % len(rows)], "step": EVERY * (n + 1)} for n in range(LONG // EVERY)]
    long = replace(record, steps=steps, evaluations=evaluations)
    xray = make_xray(root, record.config, tokenizer_of(record.config), SAMPLES, training=False)
    return report_page(Contents(long, examination_of(root), xray, memory_of(record), time_of(record)))


@contextlib.contextmanager
def browser(folder: Path) -> Iterator[Any]:
    """Asks a browser through its debugging pipe: JSON that ends with a zero byte, in on 3 and out on 4."""
    assert CHROMIUM is not None
    (ours_in, theirs_out), (theirs_in, ours_out) = os.pipe(), os.pipe()
    shell = f'exec "$@" 3<&{theirs_in} 4>&{theirs_out}'
    command = ["sh", "-c", shell, "sh", CHROMIUM, *OPTIONS, f"--user-data-dir={folder}", "--remote-debugging-pipe"]
    with subprocess.Popen(command, pass_fds=(theirs_in, theirs_out), stderr=subprocess.DEVNULL) as process:
        os.close(theirs_in)
        os.close(theirs_out)
        with open(ours_in, "rb") as heard, open(ours_out, "wb") as told:
            number = 0

            def ask(method: str, session: str = "", **given: Any) -> Any:
                nonlocal number
                number += 1
                message = {"id": number, "method": method, "params": given} | (
                    {"sessionId": session} if session else {}
                )
                told.write(json.dumps(message).encode() + b"\0")
                told.flush()
                while True:
                    answer = json.loads(b"".join(iter(lambda: heard.read(1), b"\0")))
                    if answer.get("id") == number:
                        assert "result" in answer, answer
                        return answer["result"]

            yield ask
            ask("Browser.close")
        process.wait(60)


def load_of(page: Path) -> dict[str, float]:
    """Navigation timing of a page in a new browser, in milliseconds from the start."""
    with tempfile.TemporaryDirectory() as folder, browser(Path(folder)) as ask:
        target = ask("Target.createTarget", url="about:blank")["targetId"]
        session = ask("Target.attachToTarget", targetId=target, flatten=True)["sessionId"]
        ask("Performance.enable", session, timeDomain="threadTicks")
        ask("Page.navigate", session, url=page.as_uri())
        while True:
            said = ask("Runtime.evaluate", session, expression=f"location.href == 'about:blank' ? '{{}}' : {TIMING}")
            timing = json.loads(said["result"].get("value", "{}"))
            if timing.get("loadEventEnd"):
                metrics = ask("Performance.getMetrics", session)["metrics"]
                return timing | {each["name"]: 1000 * each["value"] for each in metrics}
            time.sleep(0.05)


def main() -> None:
    """Load a page, and print what came of it."""
    with tempfile.TemporaryDirectory() as folder:
        page = Path(sys.argv[1]).resolve() if len(sys.argv) > 1 else Path(folder) / "report.html"
        if len(sys.argv) == 1:
            page.write_text(long_page(Path(folder)), encoding="utf-8")
        loads = [load_of(page) for _ in range(LOADS)]
        print(f"{page.stat().st_size / 1e6:.2f} MB; load average {os.getloadavg()[0]:.1f} on {os.cpu_count()} CPUs")
        for name in ("domInteractive", "loadEventEnd", "TaskDuration", "LayoutDuration", "ScriptDuration"):
            times = [each[name] for each in loads]
            print(f"{name}: median {statistics.median(times):.0f} ms, {min(times):.0f} to {max(times):.0f}")


if __name__ == "__main__":
    main()
