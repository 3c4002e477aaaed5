"""A page in a real browser without a window: what a script in it finds out comes back as JSON."""

from __future__ import annotations

import html
import json
import re
import shutil
import subprocess
from pathlib import Path
from typing import Any

CHROMIUM = shutil.which("chromium") or shutil.which("chromium-browser") or shutil.which("google-chrome")
# It has no network: every name stays unknown.
OPTIONS = ("--headless=new", "--no-sandbox", "--disable-gpu", "--host-resolver-rules=MAP * ~NOTFOUND", "--no-first-run")
SCHEMES = {"dark": 0, "light": 1}  # blink's numbers


def asked(page: Path, script: str, folder: Path, *, width: int = 1280, scheme: str = "light") -> Any:
    """What `script` returns in the page, which is as wide as that; errors of scripts come with it as "errors".

    The page stands in a frame, because a window cannot be as narrow as a phone. Its policy, which would not let a
    second script run, is taken out of the copy that is looked at.
    """
    assert CHROMIUM is not None
    text = re.sub(r'<meta http-equiv="Content-Security-Policy"[^>]*>', "", page.read_text(encoding="utf-8"))
    before = "<script>window.errors = []; onerror = (said) => { errors.push(String(said)); };</script>"
    after = (
        "<script>addEventListener('load', () => { let found; try { found = (() => {"
        + script
        + "})(); } catch (error) { errors.push(String(error)); }"
        " parent.postMessage(JSON.stringify({found, errors}), '*'); });</script>"
    )
    copy, frame = folder / "copy.html", folder / "frame.html"
    copy.write_text(text.replace("<head>", f"<head>{before}") + after, encoding="utf-8")
    frame.write_text(
        "<!DOCTYPE html><body style='margin:0'><pre id='answer'></pre><script>addEventListener('message', (event) => "
        "{ document.getElementById('answer').textContent = event.data; });</script>"
        f"<iframe src='copy.html' width='{width}' height='900' style='border:0'></iframe>",
        encoding="utf-8",
    )
    command = [
        CHROMIUM, *OPTIONS, f"--user-data-dir={folder / 'profile'}", f"--window-size={width},900",
        f"--blink-settings=preferredColorScheme={SCHEMES[scheme]}", "--virtual-time-budget=20000", "--dump-dom",
        frame.as_uri(),
    ]  # fmt: skip
    done = subprocess.run(command, capture_output=True, text=True, encoding="utf-8", timeout=240)
    answer = re.search(r'<pre id="answer">(.*?)</pre>', done.stdout, re.S)
    assert answer and answer[1], done.stderr[-2000:]
    return json.loads(html.unescape(answer[1]))


def screenshot(page: Path, file: Path, folder: Path, *, width: int, scheme: str) -> None:
    """A picture of the top of a page."""
    assert CHROMIUM is not None
    command = [
        CHROMIUM, *OPTIONS, f"--user-data-dir={folder / 'profile'}", f"--window-size={width},1000",
        f"--blink-settings=preferredColorScheme={SCHEMES[scheme]}", f"--screenshot={file}", page.as_uri(),
    ]  # fmt: skip
    subprocess.run(command, capture_output=True, check=True, timeout=240)
