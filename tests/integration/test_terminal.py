"""A run on a terminal, in a pipe, quietly and for programs; what libraries print; and how it ends when it does not end well."""

import fcntl
import json
import os
import pty
import re
import select
import signal
import struct
import subprocess
import sys
import termios
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

REPOSITORY = Path(__file__).parents[2]
NOISY_TASK = """
import ctypes, logging, os, warnings
from pathlib import Path
import parity_task

class Task(parity_task.Task):
    def grade(self, problem, text, truncated):
        print("noise by print")
        logging.getLogger("library").error("noise by logging")
        warnings.warn("noise by warnings")
        os.write(2, b"noise by the descriptor\\n")
        return super().grade(problem, text, truncated)

    @property
    def largest_reward(self):
        if os.environ.get("IS_BROKEN"):
            raise ArithmeticError("a bug in the task")
        return 1.0
"""

Noisy = Callable[..., subprocess.CompletedProcess[str]]


@pytest.fixture
def noisy(tiny_config: Path, tmp_path: Path) -> Noisy:
    """`grpo-lab train` on a task that prints in every way there is."""
    (tmp_path / "noisy.py").write_text(NOISY_TASK)

    def run(*arguments: str, **variables: str) -> subprocess.CompletedProcess[str]:
        path = f"{tmp_path}:{os.environ['PYTHONPATH']}"
        command = [sys.executable, "-m", "grpo_lab", "train", *arguments]
        return subprocess.run(
            command, cwd=REPOSITORY, capture_output=True, text=True, env={**os.environ, "PYTHONPATH": path, **variables}
        )

    return run


def test_json_is_all_there_is_and_noise_is_in_the_log(noisy: Noisy, tiny_config: Path, tmp_path: Path) -> None:
    done = noisy("--config", str(tiny_config), "--set", "data.task=noisy:Task", "--json")
    assert (done.returncode, done.stderr) == (0, "")
    events = [json.loads(line) for line in done.stdout.splitlines()]
    names = [event["event"] for event in events if event["event"] != "warning"]
    milestone = ["step", "checkpoint", "evaluation"]
    assert names == ["started", "evaluation", *milestone, *milestone, "finished"]
    run = tmp_path / "runs/run"
    rows = [json.loads(line) for line in (run / "metrics.jsonl").read_text().splitlines()]
    assert [{"event": "step", **row} for row in rows] == [event for event in events if event["event"] == "step"]
    kept = [json.loads(path.read_text()) for path in sorted((run / "evaluations").glob("rollouts_*.json"))]
    assert [{"event": "evaluation", **row} for row in kept] == [e for e in events if e["event"] == "evaluation"]
    started, finished = events[names.index("started")], events[-1]
    assert started["steps"] == 2 and started["config"]["data"]["task"] == "noisy:Task" and started["run"] == str(run)
    assert finished["stopped"] == "" and Path(finished["checkpoint"]).name == "rollouts_00000016"
    log = (run / "logs/libraries.log").read_text()
    assert finished["log"] == str(run / "logs/libraries.log")
    for way in ("print", "logging", "warnings", "the descriptor"):
        assert f"noise by {way}" in log, way


def test_quiet_then_resumed_then_failed(noisy: Noisy, tiny_config: Path, tmp_path: Path) -> None:
    run = tmp_path / "runs/run"
    quiet = noisy("--config", str(tiny_config), "--set", "data.task=noisy:Task", "--quiet")
    assert (quiet.returncode, quiet.stderr) == (0, "")
    heads = [line.split()[0] for line in quiet.stdout.splitlines() if not line.startswith("warning")]
    figures = ["figure"] * heads.count("figure")
    assert heads == ["rollouts", "0", "8", "16", "run", "metrics", "checkpoint", *figures, "logs", "next"]

    resumed = noisy("--resume", str(run), "--set", "total_rollouts=24")
    assert (resumed.returncode, resumed.stderr) == (0, "")
    assert "reference  bank of 4 held-out problems x 4 samples found" in resumed.stdout
    assert re.search(r"^step    3/3  rollouts      24  reward 0\.\d{3}  KL ", resumed.stdout, re.MULTILINE)
    assert resumed.stdout.splitlines()[-1].startswith(f"next         grpo-lab eval checkpoint {run}/checkpoints/")

    failed = noisy("--resume", str(run), "--set", "total_rollouts=32", IS_BROKEN="yes")
    assert failed.returncode == 1
    *_, error, last = failed.stderr.splitlines()
    assert "Traceback" in failed.stderr and error == "ArithmeticError: a bug in the task"
    assert last == (
        f"grpo-lab: failed; what libraries printed is in {run}/logs/libraries.log; continue with: grpo-lab train --resume {run}"
    )


@pytest.mark.parametrize(
    ("flags", "told"),
    [(("--json", "--quiet"), "leave out --quiet"), (("--json", "--dry-run"), "leave out --dry-run"),
     (("--quiet", "--dry-run"), "leave out one of them")],
)  # fmt: skip
def test_flags_that_mean_nothing_together(noisy: Noisy, flags: tuple[str, ...], told: str) -> None:
    refused = noisy(*flags)
    assert refused.returncode == 2 and told in refused.stderr and refused.stderr.count("\n") == 1


# -- a real terminal -------------------------------------------------------------------------------------------------


class Terminal:
    """`grpo-lab train` in a pseudo terminal, which is also what its Ctrl-C comes from."""

    def __init__(self, arguments: list[str], columns: int, **variables: str) -> None:
        self.ours, theirs = pty.openpty()
        self.resize(columns)
        self.attributes = termios.tcgetattr(theirs)
        self.process = subprocess.Popen(
            [sys.executable, "-m", "grpo_lab", "train", *arguments],
            cwd=REPOSITORY,
            stdin=theirs,
            stdout=theirs,
            stderr=theirs,
            env={**os.environ, "TERM": "xterm-256color", "LANG": "en_US.UTF-8", "LC_ALL": "", **variables},
            start_new_session=True,
            preexec_fn=lambda: fcntl.ioctl(0, termios.TIOCSCTTY, 0),
        )
        self.theirs, self.shown = theirs, ""

    def resize(self, columns: int) -> None:
        fcntl.ioctl(self.ours, termios.TIOCSWINSZ, struct.pack("HHHH", 40, columns, 0, 0))

    def read_until(self, is_enough: Callable[[str], bool], seconds: float = 100) -> str:
        """Everything shown so far, once `is_enough` says so or the process has ended."""
        deadline = time.monotonic() + seconds
        while not is_enough(self.shown):
            ready, _, _ = select.select([self.ours], [], [], 0.2)
            if ready:
                self.shown += os.read(self.ours, 65536).decode(errors="replace")
            elif self.process.poll() is not None:
                break
            assert time.monotonic() < deadline, self.shown[-3000:]
        return self.shown

    def read_to_the_end(self) -> str:
        self.read_until(lambda shown: False)
        time.sleep(0.3)  # for last words
        return self.read_until(lambda shown: False)

    @property
    def is_sane(self) -> bool:
        """Whether the cursor is visible and the line discipline as it was."""
        is_visible = self.shown.rfind("\033[?25h") > self.shown.rfind("\033[?25l") > -1
        return is_visible and termios.tcgetattr(self.theirs) == self.attributes

    def close(self) -> None:
        if self.process.poll() is None:
            self.process.kill()
            self.process.wait()
        os.close(self.ours)
        os.close(self.theirs)


def plain(text: str) -> str:
    """Without what moves the cursor and colours."""
    return re.sub(r"\033\[[0-9;?]*[A-Za-z]", "", text).replace("\r", "")


def bottoms(text: str) -> list[str]:
    """The last lines of the panels that were drawn."""
    return re.findall("╰[^╯\n]*╯", plain(text))


@pytest.fixture
def terminal(tiny_config: Path) -> Iterator[Callable[..., Terminal]]:
    opened: list[Terminal] = []

    def open_terminal(*arguments: str, columns: int = 80, **variables: str) -> Terminal:
        opened.append(Terminal(["--config", str(tiny_config), *arguments], columns, **variables))
        return opened[-1]

    yield open_terminal
    for one in opened:
        one.close()


LONG = ("--set", "total_rollouts=80000", "--set", "checkpoint_every=80000")


def test_a_panel_is_drawn_resized_and_interrupted(terminal: Callable[..., Terminal], tmp_path: Path) -> None:
    """Ctrl-C of the terminal: the run saves, the panel stays as it was, the cursor comes back."""
    opened = terminal(*LONG)
    opened.read_until(lambda shown: re.search(r"step +[3-9]/10000", shown) is not None)
    frame = plain(opened.shown)
    for text in (
        "╭─ grpo_lab · grpo, free_energy",
        "grad norm",
        "F held out",
        "reference −",
        "last step",
        "█ sampling",
        "left ",
    ):
        assert text in frame, text
    assert "eval at         0 rollouts" in frame and "step    1/10000" not in frame, (
        "lines of steps are the panel's now"
    )
    before = len(opened.shown)
    opened.resize(60)
    opened.read_until(lambda shown: len(bottoms(shown[before:])) > 3)
    assert len(bottoms(opened.shown)[-1]) == 60 and len(bottoms(frame)[-1]) == 80
    os.write(opened.ours, b"\x03")
    ended = plain(opened.read_to_the_end())
    assert opened.process.returncode == 0 and opened.is_sane, ended[-2000:]
    assert f"Continue with: grpo-lab train --resume {tmp_path}/runs/run" in ended.rstrip().split("\n")[-1]


def test_a_killed_run_gives_the_cursor_back(terminal: Callable[..., Terminal], tmp_path: Path) -> None:
    opened = terminal(*LONG, LC_ALL="C", NO_COLOR="1")
    opened.read_until(lambda shown: re.search(r"step +[1-9]\d*/10000", shown) is not None)
    assert "+- grpo_lab" in plain(opened.shown) and opened.shown.isascii()
    assert not re.search(r"\033\[[0-9;]*[34][0-7][;m]", opened.shown), "no colours"
    opened.process.send_signal(signal.SIGKILL)
    ended = opened.read_to_the_end()
    assert opened.is_sane and f"continue with: grpo-lab train --resume {tmp_path}/runs/run" in ended.split("\n")[-2]


def test_a_terminal_that_cannot_draw_gets_lines(terminal: Callable[..., Terminal]) -> None:
    opened = terminal("--set", "evaluation.enabled=false", TERM="dumb")
    ended = opened.read_to_the_end()
    assert opened.process.returncode == 0 and "\033" not in ended and "step    2/2  rollouts      16" in ended
