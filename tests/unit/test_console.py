"""What a run shows: the panel's drawing at every width, the clock, the views' lines, libraries' logs, last words."""

import io
import json
import math
import os
import signal
import subprocess
import sys
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import pytest
from rich.console import Console as RichConsole

from grpo_lab.terminal.clock import Clock, Left, duration
from grpo_lab.terminal.glyphs import ASCII, UNICODE, Glyphs, gauge, shares, sparkline, speaks_unicode
from grpo_lab.terminal.json_lines import JsonView
from grpo_lab.terminal.panel import Evaluated, Picture, draw
from grpo_lab.terminal.plain import PlainView, QuietView, step_line

METRICS = {
    "step": 4, "rollouts/total": 512, "reward/mean": 0.471, "policy/kl_ref": 1.585, "policy/free_energy": -0.393,
    "gate/open_fraction": 0.998, "policy/grad_norm": 1.234, "rollout/mismatch_mean": 1.2e-5, "perf/tokens_per_second": 1234.5,
    "completion/length_mean": 17.3, "time/generate": 21.3, "time/annotate": 5.0, "time/update": 14.1, "time/sync": 0.2,
    "rollout/staleness_max": 0, "perf/overlap": 0.0,
}  # fmt: skip
PICTURE = Picture(
    title="grpo_lab · dapo, free_energy, beta 0.05 · SmolLM2-135M-Instruct",
    place="runs/dapo-beta0.05-20261202-101112",
    step=4,
    steps=6,
    rollouts=512,
    total_rollouts=768,
    elapsed=372,
    left=Left(185, 48),
    phase="update",
    phase_s=12.3,
    metrics=METRICS,
    curves={"reward": (0.1, 0.2, 0.3, 0.5), "KL": (0.0, 0.7, 1.2, 1.6), "F batch": (-0.1, -0.2), "tokens": (5, 9)},
    evaluated=Evaluated(512, -0.393, 0.050, -0.108, -0.892, -0.602),
)


def drawn(picture: Picture, width: int, glyphs: Glyphs, height: int = 24) -> list[str]:
    console = RichConsole(width=width, file=io.StringIO(), force_terminal=False)
    console.print(draw(picture, width, height, glyphs))
    assert isinstance(console.file, io.StringIO)
    return console.file.getvalue().rstrip("\n").split("\n")


# -- the panel -------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("width", [45, 60, 72, 76, 80, 100, 120, 200])
@pytest.mark.parametrize("glyphs", [UNICODE, ASCII])
def test_the_panel_fits_and_shows_everything(width: int, glyphs: Glyphs) -> None:
    warned = replace(
        PICTURE, warning="more than 90 % of the completions meet the length limit", notice="SIGINT: saving"
    )
    lines = drawn(warned, width, glyphs)
    assert {len(line) for line in lines} == {width} and len(lines) <= 24
    text = " ".join(" ".join(line[1:-1] for line in lines).split())
    for shown in (
        "step 4/6", "512 of 768 rollouts", "elapsed 6:12", "left 3:05", "0.471", "1.585", "0.998", "1.23", "1.2e-05", "1,234",
        "17.3", "0.050", "floor", "21.3", "14.1", "step 5: updating", "0:12", "length limit", "SIGINT: saving",
    ):  # fmt: skip
        assert shown in text, shown
    if glyphs is ASCII:
        assert "".join(lines).replace("·", "").isascii()
    else:
        assert "−0.393" in text and "● " not in text


def test_a_panel_before_the_first_numbers() -> None:
    assert len(drawn(Picture(), 80, UNICODE)) == 1
    early = replace(PICTURE, step=0, rollouts=0, metrics={}, curves={}, evaluated=None, left=None, phase="reference")
    lines = drawn(early, 80, UNICODE)
    assert "step 0/6" in lines[1] and "sampling the reference" in lines[-2] and "left" not in lines[2]


def test_a_low_terminal_has_the_panel_without_empty_lines() -> None:
    assert len(drawn(PICTURE, 80, UNICODE, 17)) == len(drawn(PICTURE, 80, UNICODE)) - 3 == 13


def test_no_colour_leaves_parts_of_the_bar_apart() -> None:
    bar = next(line for line in drawn(PICTURE, 80, UNICODE) if "last step" in line)
    counts = {mark: bar.count(mark) for mark in "█▓▒░"}
    assert counts["█"] > counts["▒"] > counts["▓"] > 0 and sum(counts.values()) == 54


def test_sparkline_and_shares() -> None:
    assert sparkline([0, 1, 2, 7], 3, UNICODE) == "▁▂█" and sparkline([3, 3], 9, UNICODE) == "▁▁"
    assert sparkline([1, 2], 0, UNICODE) == "" and sparkline([0, 1], 5, ASCII) == "_#"
    assert shares([1, 1, 2], 8) == [2, 2, 4] and shares([1, 1, 1], 4) in ([2, 1, 1], [1, 2, 1], [1, 1, 2])
    assert shares([0, 0], 5) == [0, 0]


@pytest.mark.parametrize(
    ("here", "expected"),
    [(-0.5, "+----O---##"), (0.0, "O--------##"), (-1.0, "+--------#O"), (1.0, "O----+---##"), (-0.95, "+--------#O")],
)
def test_gauge_places_f_between_reference_and_floor(here: float, expected: str) -> None:
    line = gauge(0.0, here, -1.0, -0.9 if here < 1 else -0.8, 11, ASCII)
    assert line == expected


@pytest.mark.parametrize(
    ("encoding", "environment", "speaks"),
    [
        ("utf-8", {}, True),
        ("utf-8", {"LANG": "de_DE.UTF-8"}, True),
        ("utf-8", {"LANG": "C.UTF-8"}, True),
        ("utf-8", {"LANG": "C", "LC_CTYPE": "C.UTF-8"}, False),
        ("utf-8", {"LC_ALL": "POSIX"}, False),
        ("ascii", {}, False),
        ("latin-1", {"LANG": "de_DE"}, False),
    ],
)
def test_ascii_where_it_was_asked_for(encoding: str, environment: dict[str, str], speaks: bool) -> None:
    assert speaks_unicode(encoding, environment) is speaks


# -- the clock -------------------------------------------------------------------------------------------------------


def test_the_clock_counts_steps_evaluations_and_saves() -> None:
    clock = Clock(0.0)
    clock.enter("reference", 100.0)
    clock.enter("evaluate", 130.0)
    clock.finish_evaluation(140.0)  # 30 + 10: the reference's samples stand for those of later evaluations
    assert clock.left(3, 1) is None
    for start in (140.0, 150.0):
        clock.enter("sampling", start)
        clock.enter("update", start + 6)
        clock.finish_step(start + 10)
    clock.enter("save", 160.0)
    clock.finish_save(165.0)
    assert clock.left(3, 2) == Left(3 * 10 + 2 * 40 + 2 * 5, 80)
    assert [duration(seconds) for seconds in (7.9, 754, 18367)] == ["0:07", "12:34", "5:06:07"]


# -- lines -----------------------------------------------------------------------------------------------------------


def test_a_step_is_the_line_it_always_was() -> None:
    assert step_line(METRICS, 6) == (
        "step    4/6  rollouts     512  reward 0.471  KL   1.585  F -0.393  gate open 0.998  grad 1.23  mismatch 1.2e-05  "
        "1234 tok/s"
    )


def test_quiet_tells_warnings_only() -> None:
    said: list[str] = []
    for view in (QuietView(said.append), PlainView(said.append)):
        view.line("loading")
        view.phase("sampling", "step 1: sampling")
        view.warning("odd")
    assert said == ["warning    odd", "loading", "step 1: sampling", "warning    odd"]


def test_json_has_no_nan() -> None:
    said: list[str] = []
    JsonView(said.append).step({"a": math.nan, "b": 0.1})
    assert json.loads(said[0], parse_constant=pytest.fail) == {"event": "step", "a": None, "b": 0.1}


# -- what else is printed --------------------------------------------------------------------------------------------

NOISE = """
import ctypes, logging, os, sys, warnings
from pathlib import Path
from grpo_lab.library_logs import LibraryLogs, tell
with LibraryLogs() as logs:
    print("by print")
    logging.getLogger("library").warning("by logging")
    warnings.warn("by warnings")
    os.write(2, b"by the descriptor\\n")
    ctypes.CDLL(None).puts(b"by C"); ctypes.CDLL(None).fflush(None)
    logs.move_to(Path(sys.argv[1]))
    os.system("echo by a child")
    print("ours", file=logs.terminal)
    tell("to errors\\n")
    END
print("afterwards")
"""


@pytest.fixture
def noisy(tmp_path: Path) -> Callable[[str], tuple[subprocess.CompletedProcess[str], Path]]:
    def run(end: str) -> tuple[subprocess.CompletedProcess[str], Path]:
        log = tmp_path / "run/logs/libraries.log"
        command = [sys.executable, "-c", NOISE.replace("END", end), str(log)]
        temporary = {**os.environ, "TMPDIR": str(tmp_path)}
        return subprocess.run(command, capture_output=True, text=True, env=temporary), log

    return run


def test_what_libraries_print_is_in_the_log(
    noisy: Callable[[str], tuple[subprocess.CompletedProcess[str], Path]], tmp_path: Path
) -> None:
    done, log = noisy("pass")
    assert (done.stdout, done.stderr) == ("ours\nafterwards\n", "to errors\n")
    for way in ("print", "logging", "warnings", "the descriptor", "C", "a child"):
        assert f"by {way}" in log.read_text(), way
    assert sorted(path.name for path in tmp_path.iterdir()) == ["run"], "the temporary log is gone"


def test_a_crash_is_told_on_the_standard_error(
    noisy: Callable[[str], tuple[subprocess.CompletedProcess[str], Path]],
) -> None:
    raised, _ = noisy("raise ValueError('a bug')")
    assert raised.returncode == 1 and raised.stderr.endswith("ValueError: a bug\n") and "Traceback" in raised.stderr
    fatal, _ = noisy("os.kill(os.getpid(), 11)")
    assert fatal.returncode == -signal.SIGSEGV and "Segmentation fault" in fatal.stderr


def test_an_empty_log_goes(tmp_path: Path) -> None:
    code = "import sys; from pathlib import Path; from grpo_lab.library_logs import LibraryLogs\n"
    code += "with LibraryLogs() as logs: logs.move_to(Path(sys.argv[1]))"
    subprocess.run([sys.executable, "-c", code, str(tmp_path / "run/logs/libraries.log")], check=True)
    assert list(tmp_path.rglob("*")) == [tmp_path / "run"]


@pytest.mark.parametrize(
    ("end", "told"),
    [
        ("os.kill(os.getpid(), 9)", "ESC[?25h\nended in run 2\n"),
        ("os._exit(1)", "ESC[?25h\nended in run 2\n"),
        ("words.cancel()", ""),
    ],
)
def test_last_words(end: str, told: str) -> None:
    code = "import os; from grpo_lab.terminal.last_words import LastWords; words = LastWords(2, True)\n"
    code += f"words.will_be('ended in run 1'); words.will_be('ended in\\nrun 2'); {end}"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=20)
    assert done.stderr == told.replace("ESC", "\033")
