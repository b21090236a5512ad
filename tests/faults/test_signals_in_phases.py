"""A stop signal in every phase of a run: the step is finished or given up, saved, exit 0, and nothing is left behind.

Run as a program this file is a nursery: it imports grpo_lab once, then forks a run for every case it reads. In each a profiler
sends the signal at the n-th call of a function, so a phase is hit exactly, and the code under test is the unchanged one.
"""

import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from types import FrameType
from typing import Any

import psutil
import pytest
from conftest import comparable_metrics, write_tiny_config

from grpo_lab.rollout.server import ServerProcess

REPOSITORY = Path(__file__).parents[2]
TERM, INT, USR1 = signal.SIGTERM, signal.SIGINT, signal.SIGUSR1
STEPS = 4


@dataclass(frozen=True)
class Phase:
    """The n-th call of a function of a file, and how many steps are saved when the signal comes there."""

    file: str
    function: str
    call: int
    steps: int


PHASES = {
    "bank": Phase("evaluation/bank.py", "reference_bank", 1, 0),
    "sampling": Phase("grpo_lab/batch.py", "collect_step", 2, 1),
    "log-probs": Phase("learner/learner.py", "prepare", 2, 2),
    "update": Phase("learner/learner.py", "update", 3, 3),
    "push": Phase("grpo_lab/assemble.py", "push_weights", 2, 1),
    "record": Phase("grpo_lab/run_dir.py", "append_metrics", 1, 1),
    "checkpoint": Phase("learner/checkpoint.py", "save_checkpoint", 1, 2),
    "sampling for an evaluation": Phase("evaluation/report.py", "sample", 1, 2),
    "evaluation": Phase("evaluation/evaluate.py", "measure", 2, 2),
    "closing": Phase("engines/hf.py", "close", 1, STEPS),
    "figures": Phase("evaluation/report.py", "draw_run", 1, STEPS),
}
LOADING = Phase("learner/model.py", "_load", 1, 0)
CHOSEN = dict(zip(PHASES, [TERM, INT, USR1] * 4, strict=False))  # without the slow ones: each phase once


@dataclass
class Ended:
    """A run that was forked: its process, exit code and words, what it left in its temporary directory."""

    pid: int
    code: int
    said: str
    run: Path
    left: list[str] = field(default_factory=list)

    @property
    def steps(self) -> list[dict[str, Any]]:
        return comparable_metrics(self.run)

    @property
    def newest(self) -> str:
        return max((folder.name for folder in self.run.glob("checkpoints/rollouts_*")), default="")


class Nursery:
    """Starts runs below `folder`."""

    def __init__(self, folder: Path, model: Path) -> None:
        self.folder, self._count = folder, 0
        self.config = write_tiny_config(folder / "tiny.yaml", model, folder)
        self._process = subprocess.Popen(
            [sys.executable, __file__],
            cwd=REPOSITORY,
            env={**os.environ, "OMP_NUM_THREADS": "1"},
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
        )

    def go(self, *kills: tuple[Phase, signal.Signals], resume: Path | None = None, **environment: str) -> Ended:
        """A run in which each signal comes at its phase."""
        self._count += 1
        temporary = self.folder / f"tmp{self._count}"
        temporary.mkdir()
        sets = (f"total_rollouts={8 * STEPS}", "checkpoint_every=16", f"run_name=run{self._count}")
        words = [word for text in sets for word in ("--set", text)]
        words = ["--resume", str(resume)] if resume else ["--config", str(self.config), *words]
        case = {
            "words": ["train", *words, *json.loads(environment.pop("more", "[]"))],
            "log": str(temporary.with_suffix(".log")),
            "environment": {"TMPDIR": str(temporary), **environment},
            "kills": [[phase.file, phase.function, phase.call, int(number)] for phase, number in kills],
        }
        assert self._process.stdin and self._process.stdout
        self._process.stdin.write(json.dumps(case) + "\n")
        self._process.stdin.flush()
        pid, code = map(int, self._process.stdout.readline().split())
        shared = [str(path) for path in Path("/dev/shm").glob(f"grpo_lab-*-{pid}-*")]
        left = shared + [path.name for path in temporary.iterdir()]
        said = temporary.with_suffix(".log").read_text()
        return Ended(pid, code, said, resume or self.folder / f"run{self._count}", left)

    def close(self) -> None:
        self._process.communicate("")
        self._process.wait()


@pytest.fixture(scope="module")
def nursery(module_path: Path, tiny_model: Path) -> Iterator[Nursery]:
    started = Nursery(module_path, tiny_model)
    yield started
    started.close()


@pytest.fixture(scope="module")
def undisturbed(nursery: Nursery) -> Ended:
    ended = nursery.go()
    assert ended.code == 0 and len(ended.steps) == STEPS and ended.left == [], ended
    return ended


def stopped(nursery: Nursery, undisturbed: Ended, phase: Phase, number: signal.Signals) -> Ended:
    """A run that `number` met in `phase`, and was saved as it should."""
    ended = nursery.go((phase, number))
    assert ended.code == 0 and "Traceback" not in ended.said and number.name in ended.said, ended.said
    assert ended.steps == undisturbed.steps[: phase.steps]
    assert ended.newest == (f"rollouts_{8 * phase.steps:08d}" if phase.steps else "")
    assert ended.left == [] and list(ended.run.rglob("*.partial*")) == []
    return ended


@pytest.mark.parametrize("name", CHOSEN)
def test_a_signal_saves_what_is_done(nursery: Nursery, undisturbed: Ended, name: str) -> None:
    ended = stopped(nursery, undisturbed, PHASES[name], CHOSEN[name])
    assert (ended.run / "figures").exists() == (name not in ("bank",))
    given_up = "the evaluation at 16 rollouts was given up; the resumed run makes it"
    assert (given_up in ended.said) == (PHASES[name].steps == 2 and name != "evaluation")


@pytest.mark.slow
@pytest.mark.parametrize("number", [TERM, INT, USR1], ids=lambda number: number.name)
@pytest.mark.parametrize("name", PHASES)
def test_every_signal_in_every_phase_is_resumed_exactly(
    nursery: Nursery, undisturbed: Ended, name: str, number: signal.Signals
) -> None:
    ended = stopped(nursery, undisturbed, PHASES[name], number)
    resumed = nursery.go(resume=ended.run)
    assert resumed.code == 0 and resumed.steps == undisturbed.steps and resumed.left == []


@pytest.mark.parametrize("number", [TERM, INT, USR1], ids=lambda number: number.name)
def test_before_the_first_step_one_line_says_so(nursery: Nursery, number: signal.Signals) -> None:
    ended = nursery.go((LOADING, number))
    assert ended.code == 128 + number and not ended.run.exists() and ended.left == []
    said = ended.said.splitlines()
    assert said[-1] == f"grpo-lab: stopped by {number.name} before the first step; nothing to save", ended.said


def test_a_second_signal_ends_the_run_at_once(nursery: Nursery, undisturbed: Ended) -> None:
    ended = nursery.go((PHASES["update"], INT), (Phase("learner/optimizer.py", "step", 1, 0), INT))
    assert ended.code == 130 and "stopped at once" in ended.said and ended.left == [], ended
    assert ended.steps == undisturbed.steps[:2] and ended.newest == "rollouts_00000016"
    resumed = nursery.go(resume=ended.run)
    assert resumed.code == 0 and resumed.steps == undisturbed.steps


SERVER = """
import os, pathlib, time
pathlib.Path(os.environ["STARTED"], str(os.getpid())).touch()
if len(os.listdir(os.environ["STARTED"])) == 2:
    os.kill(int(os.environ["OWNER"]), int(os.environ["NUMBER"]))
time.sleep(600)
"""


@pytest.mark.parametrize("number", [TERM, INT, USR1], ids=lambda number: number.name)
def test_workers_that_are_being_started_end_with_the_run(
    nursery: Nursery, tmp_path: Path, number: signal.Signals
) -> None:
    """Two servers in the place of vLLM's that never come up; the second to start sends the signal."""
    module = tmp_path / "vllm/entrypoints/openai/api_server.py"
    module.parent.mkdir(parents=True)
    for folder in (tmp_path / "vllm", tmp_path / "vllm/entrypoints", module.parent):
        (folder / "__init__.py").touch()
    module.write_text(SERVER)
    (tmp_path / "started").mkdir()
    ended = nursery.go(
        more=json.dumps(["--set", "rollout.engine=vllm", "--set", "rollout.workers=2"]),
        STARTED=str(tmp_path / "started"),
        NUMBER=str(int(number)),
        PYTHONPATH=f"{tmp_path}:{os.environ['PYTHONPATH']}",
    )
    started = [int(path.name) for path in (tmp_path / "started").iterdir()]
    assert len(started) == 2 and not any(Path(f"/proc/{pid}").exists() for pid in started)
    assert ended.code == 128 + number and "nothing to save" in ended.said.splitlines()[-1] and ended.left == [], ended


def test_servers_leave_sigusr1_to_the_run_that_needs_them(tmp_path: Path) -> None:
    """Slurm may send it to every process of a job step; while the run saves, its servers still sample."""
    program = "import sys, time; print('on', flush=True); time.sleep(1); print('still', flush=True); time.sleep(600)"
    server = ServerProcess(lambda socket: [sys.executable, "-c", program], tmp_path / "log", os.environ)
    server.start()
    try:
        while not server.log.read_text():
            time.sleep(0.02)
        assert server._process
        guard = psutil.Process(server._process.pid)
        for process in (guard, *guard.children()):
            process.send_signal(USR1)
        while "still" not in server.log.read_text():
            assert server.is_running
            time.sleep(0.02)
    finally:
        server.stop(at_once=True)


@pytest.mark.parametrize("number", [TERM, INT, USR1], ids=lambda number: number.name)
def test_a_signal_during_the_imports_is_one_line(number: signal.Signals) -> None:
    """From the moment in which grpo_lab runs at all: here while typer, the first library, is imported."""
    program = (
        "import os, runpy, sys; sys.argv = ['grpo-lab', 'train']\n"
        f"hook = lambda event, given: os.kill(os.getpid(), {int(number)}) if (event, given[0]) == ('import', 'typer') else 0\n"
        "sys.addaudithook(hook); runpy.run_module('grpo_lab', run_name='__main__')"
    )
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, cwd=REPOSITORY)
    assert done.returncode == 128 + number and done.stdout == ""
    assert done.stderr == f"grpo-lab: stopped by {number.name} before the first step; nothing to save\n"


# -- the nursery -----------------------------------------------------------------------------------------------------


def profiler(kills: list[list[Any]]) -> Callable[[FrameType, str, object], None]:
    """Sends each signal at its call, in their order."""
    waiting = list(kills)

    def profile(frame: FrameType, event: str, argument: object) -> None:
        if event != "call" or frame.f_code.co_name != waiting[0][1]:
            return
        if not frame.f_code.co_filename.endswith(waiting[0][0]):
            return
        waiting[0][2] -= 1
        if waiting[0][2] == 0:
            number = waiting.pop(0)[3]
            if not waiting:
                sys.setprofile(None)
            os.kill(os.getpid(), number)

    return profile


def born(case: dict[str, Any]) -> None:
    """The forked child: becomes the run."""
    with open(case["log"], "wb") as log:
        for number in (1, 2):
            os.dup2(log.fileno(), number)
    os.environ.update(case["environment"], OWNER=str(os.getpid()))
    sys.argv = ["grpo-lab", *case["words"]]
    from grpo_lab.__main__ import main

    if case["kills"]:
        sys.setprofile(profiler(case["kills"]))
    try:
        main()
    except SystemExit as ended:
        sys.stdout.flush()
        sys.stderr.flush()
        os._exit(int(ended.code or 0))
    except BaseException:
        sys.excepthook(*sys.exc_info())
        os._exit(1)


def keep_nursery() -> None:
    """Reads a case a line, answers `pid exit-status` a line."""
    import grpo_lab.cli
    import grpo_lab.console
    import grpo_lab.rollout.engines.hf
    import grpo_lab.train  # noqa: F401

    sys.path[:0] = [str(REPOSITORY / "tests")]
    for line in sys.stdin:
        pid = os.fork()
        if pid == 0:
            born(json.loads(line))
        print(pid, os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]), flush=True)


if __name__ == "__main__":
    keep_nursery()
