"""The report in a real browser: no error, no request, nothing wider than the window, light and dark, and on paper."""

import re
import shutil
import subprocess
import sys
from dataclasses import replace
from html import escape
from itertools import pairwise
from pathlib import Path

import numpy as np
import pytest
from conftest import write_tiny_config, write_tiny_model
from matplotlib.image import imread

from grpo_lab.cli import main
from grpo_lab.config.file import load_config
from grpo_lab.console import Console
from grpo_lab.run_dir import RunDir
from grpo_lab.storage.records import read_groups, write_groups
from grpo_lab.train import train
from grpo_lab.types import Grade

BROWSER = next(filter(None, map(shutil.which, ("chromium", "chromium-browser", "google-chrome"))), None)
pytestmark = pytest.mark.skipif(BROWSER is None, reason="no chromium, chromium-browser or google-chrome on the PATH")
HOSTILE = "</pre><script>document.title = 'taken'</script><img src=x onerror=\"document.title = 'taken'\">"
POLICY = "default-src 'none';"  # so that what asks for the network, or is a script, is an error
PROBE = """<script>addEventListener("load", () => parent.postMessage([
  document.title, document.documentElement.scrollWidth, window.innerWidth,
  [...document.images].every(image => image.naturalWidth), getComputedStyle(document.body).backgroundColor
].join("|"), "*"));</script>"""
FRAME = """<!doctype html><meta name="color-scheme" content="light dark">
<script>onmessage = event => document.documentElement.setAttribute("data-seen", event.data)</script>
<iframe width="{width}" height="900" style="border: 0" srcdoc="{page}"></iframe>"""


@pytest.fixture(scope="module")
def runs(module_path: Path, demo_model: Path) -> list[RunDir]:
    """Two runs of other temperatures, one with completions that are hostile, unparsable and empty."""
    config = write_tiny_config(
        module_path / "tiny.yaml", write_tiny_model(module_path / "model", demo_model), module_path / "runs"
    )
    made = []
    for beta in (0.05, 0.5):
        sets = [f"run_name=beta{beta}", "total_rollouts=8"]
        run = train(load_config(config, sets, {"beta": beta, "method": "dapo", "recipe": "paper"}), Console())
        assert run is not None
        made.append(run)
    file = made[0].rollout_files()[1]
    groups, metadata = read_groups(file)
    first = groups[0]
    completions = tuple(
        replace(completion, text=text)
        for completion, text in zip(first.completions, (HOSTILE, "", "x", "y"), strict=True)
    )
    grades = (Grade(0.0, "unparsable"), Grade(0.0, "truncated"), *first.grades[2:])
    write_groups(file, [replace(first, completions=completions, grades=grades), *groups[1:]], metadata)
    return made


@pytest.fixture(scope="module")
def page(runs: list[RunDir]) -> Path:
    """The page of both, where `report` writes it by itself."""
    report(runs[0].path.parent)
    return runs[0].path.parent / "report.html"


def report(*arguments: Path) -> None:
    with pytest.MonkeyPatch.context() as patch, pytest.raises(SystemExit) as stopped:
        patch.setattr(sys, "argv", ["grpo-lab", "report", *map(str, arguments)])
        main()
    assert stopped.value.code == 0


def browse(page: Path, folder: Path, *options: str, dark: bool = False, width: int = 1280) -> str:
    """What the browser writes to its standard output; an error or warning of the page fails the test."""
    command = [str(BROWSER), "--headless=new", "--no-sandbox", "--disable-gpu", f"--user-data-dir={folder / 'profile'}"]
    command += [f"--blink-settings=preferredColorScheme={0 if dark else 1}", f"--window-size={width},900"]
    command += ["--hide-scrollbars", "--enable-logging=stderr", "--v=0", *options, page.as_uri()]
    done = subprocess.run(command, capture_output=True, text=True, timeout=90)
    assert done.returncode == 0 and "CONSOLE" not in done.stderr, done.stderr
    return done.stdout


def seen(page: Path, folder: Path, dark: bool = False, width: int = 1280) -> list[str]:
    """Title, width of page and window, whether every image loaded, background: by a probe put into a copy.

    The copy is in a frame of that width, since windows cannot be as narrow as a telephone.
    """
    text = page.read_text(encoding="utf-8").replace(POLICY, f"{POLICY} script-src 'unsafe-inline';")
    frame = folder / "framed.html"
    probed = escape(text.replace("</body>", PROBE + "</body>"))
    frame.write_text(FRAME.format(width=width, page=probed), encoding="utf-8")
    found = re.search(r'data-seen="([^"]*)"', browse(frame, folder, "--dump-dom", dark=dark, width=width + 100))
    assert found
    return found[1].split("|")


def test_opens_without_errors_in_light_and_dark_at_any_width(page: Path, tmp_path: Path) -> None:
    for dark, background in ((False, "rgb(255, 255, 255)"), (True, "rgb(21, 24, 27)")):
        for width in (1280, 400):
            title, needed, window, images, color = seen(page, tmp_path, dark=dark, width=width)
            assert title == "grpo_lab report: 2 runs", "a completion's script ran"
            assert int(needed) <= int(window) == width and images == "true" and color == background


def test_an_error_would_be_seen(page: Path, tmp_path: Path) -> None:
    broken = tmp_path / "broken.html"
    for script in ("missing()", "console.warn('x')", "new Image().src = 'https://example.invalid/x.png'"):
        broken.write_text(page.read_text(encoding="utf-8").replace("</body>", f"<script>{script}</script></body>"))
        with pytest.raises(AssertionError, match="CONSOLE"):
            seen(broken, tmp_path)
    with pytest.raises(AssertionError, match="Content Security Policy"):
        browse(broken, tmp_path, "--dump-dom")


def test_figures_are_dark_on_a_dark_page(page: Path, tmp_path: Path) -> None:
    shares = []
    for dark in (False, True):
        browse(page, tmp_path, f"--screenshot={tmp_path / 'shot.png'}", dark=dark)
        pixels = imread(tmp_path / "shot.png")[..., :3].mean(axis=2)
        shares.append(float(np.mean(pixels > 0.8)))
    assert shares[0] > 0.8 and shares[1] < 0.1


def test_prints_with_what_is_folded_away(page: Path, tmp_path: Path) -> None:
    browse(page, tmp_path, "--no-pdf-header-footer", f"--print-to-pdf={tmp_path / 'page.pdf'}")
    folded = tmp_path / "folded.html"
    hidden = "details::details-content { content-visibility: visible; block-size: auto; }"
    assert hidden in page.read_text(encoding="utf-8")
    folded.write_text(page.read_text(encoding="utf-8").replace(hidden, ""), encoding="utf-8")
    browse(folded, tmp_path, "--no-pdf-header-footer", f"--print-to-pdf={tmp_path / 'folded.pdf'}")
    pages, fewer = (
        len(re.findall(rb"/Type /Page\b", (tmp_path / f"{n}.pdf").read_bytes())) for n in ("page", "folded")
    )
    assert pages > fewer >= 2


def test_is_accessible_and_shows_differences_and_every_outcome(page: Path) -> None:
    text = page.read_text(encoding="utf-8")
    levels = [int(level) for level in re.findall(r"<h([1-6])", text)]
    assert levels[0] == 1 and levels.count(1) == 1 and all(b - a <= 1 for a, b in pairwise(levels))
    assert text.count("<table") == text.count("<caption") == text.count("<thead") and 'alt=""' not in text
    assert (
        all(re.search(rf"<mark>beta: {beta}</mark>", text) for beta in ("0.05", "0.5")) and "<mark>run_name" not in text
    )
    for outcome in ("unparsable", "truncated"):
        assert f'<span class="outcome {outcome}">' in text
    assert "<script" not in text and "&lt;script&gt;" in text and "(empty)" in text and "Warning: " in text


def test_report_is_written_into_the_run_or_here(
    runs: list[RunDir], tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    report(runs[0].path)
    assert (runs[0].path / "report.html").is_file() and str(runs[0].path / "report.html") in capfd.readouterr().out
    report(runs[0].path, runs[1].path)
    assert (tmp_path / "report.html").is_file() and "report     report.html" in capfd.readouterr().out
