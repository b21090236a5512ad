"""A long run holds no more at its end than at its beginning: memory, open files, threads, /dev/shm, temporary files.

Run as a program this file is a training that measures itself after every step and prints what it found as JSON.
"""

import ctypes
import gc
import json
import os
import signal
import statistics
import subprocess
import sys
import tempfile
from collections.abc import Mapping
from dataclasses import asdict, dataclass
from pathlib import Path

import psutil
import pytest
from conftest import write_tiny_config

from grpo_lab.config.file import load_config
from grpo_lab.console import Console
from grpo_lab.storage.scratch import scratch_folder
from grpo_lab.train import train

REPOSITORY = Path(__file__).parents[2]
WARM = 20  # steps until caches and thread pools are there
MEMORY_PER_STEP = 40_000  # bytes; allocators keep back up to 25,000 with vLLM, less than 5,000 without


@dataclass(frozen=True)
class Held:
    """What a process holds after a step: resident bytes, open files, threads, files of pushes, temporary files."""

    memory: int
    files: int
    threads: int
    pushes: int
    temporary: int


def held() -> Held:
    """Of this process, garbage aside."""
    gc.collect()
    ctypes.CDLL(None).malloc_trim(0)
    process = psutil.Process()
    pushes = [
        path for parent in {Path("/dev/shm"), Path(tempfile.gettempdir())} for path in own_weights(parent, os.getpid())
    ]
    return Held(
        memory=process.memory_info().rss,
        files=process.num_fds(),
        threads=process.num_threads(),
        pushes=sum(len(list(path.rglob("*"))) for path in pushes),
        temporary=len(list(Path(tempfile.gettempdir()).iterdir())),
    )


def own_weights(parent: Path, pid: int) -> list[Path]:
    return list(parent.glob(f"grpo_lab-weights-*-{pid}-*"))


def growth(measured: list[Held]) -> list[str]:
    """What grew after the first `WARM` steps, in words."""
    late = measured[WARM:]
    steps = range(len(late))
    slope = statistics.linear_regression(steps, [one.memory for one in late]).slope
    found = [f"memory grows by {slope:,.0f} bytes a step"] if slope > MEMORY_PER_STEP else []
    third = len(late) // 3
    for name in ("files", "threads", "pushes", "temporary"):
        early, last = (max(getattr(one, name) for one in part) for part in (late[:third], late[-third:]))
        found += [f"{name}: {early}, later {last}"] if last > early else []
    return found


def measured_run(tmp_path: Path, model: Path, engine: str, steps: int, leak: str = "") -> list[Held]:
    """A training of `steps` steps with four checkpoints and evaluations, in a process with a temporary directory of its own."""
    config = write_tiny_config(tmp_path / "tiny.yaml", model, tmp_path / "runs")
    (tmp_path / "tmp").mkdir()
    sets = {
        "rollout.engine": engine,
        "total_rollouts": 8 * steps,
        "checkpoint_every": 2 * steps,
        "keep_last": 1,
        "learner.learning_rate": 1e-9,  # canned completions are no sample of the policy: it must stay the reference
        "rollout.mismatch_limit": 1e9,
    }
    words = [str(config), leak, *(f"{key}={value}" for key, value in sets.items())]
    process = subprocess.Popen(
        [sys.executable, __file__, *words],
        cwd=REPOSITORY,
        env={**os.environ, "TMPDIR": str(tmp_path / "tmp"), "OMP_NUM_THREADS": "1"},
        stdout=subprocess.PIPE,
        text=True,
    )
    out, _ = process.communicate()
    assert process.returncode == 0 and own_weights(Path("/dev/shm"), process.pid) == []
    left = [path.name for path in (tmp_path / "tmp").iterdir()]
    assert [
        name for name in left if not name.startswith("torchinductor_")
    ] == []  # torch's cache of compiled code stays
    measured = [Held(**one) for one in json.loads(out.splitlines()[-1])]
    assert len(measured) == steps
    return measured


@pytest.mark.slow
def test_sixty_steps_hold_no_more_than_twenty(tmp_path: Path, tiny_model: Path) -> None:
    assert growth(measured_run(tmp_path, tiny_model, "scripted", 60)) == []


@pytest.mark.slow
def test_three_hundred_steps_hold_no_more_than_twenty(tmp_path: Path, tiny_model: Path) -> None:
    assert growth(measured_run(tmp_path, tiny_model, "scripted", 300)) == []


@pytest.mark.slow
@pytest.mark.vllm
def test_a_hundred_steps_with_vllm_hold_no_more_than_twenty(tmp_path: Path, tiny_model: Path) -> None:
    assert growth(measured_run(tmp_path, tiny_model, "vllm", 100)) == []


@pytest.mark.slow
@pytest.mark.parametrize("leak", ["memory", "files", "threads", "temporary"])
def test_a_leak_is_found(tmp_path: Path, tiny_model: Path, leak: str) -> None:
    """200 kB a step; of the others one every tenth step."""
    (found,) = growth(measured_run(tmp_path, tiny_model, "scripted", 60, leak))
    assert found.startswith(leak)


def test_a_run_that_fails_leaves_no_weights(tmp_path: Path, tiny_config: Path) -> None:
    class Failing(Console):
        def step(self, metrics: Mapping[str, float]) -> None:
            assert (
                len(own_weights(Path("/dev/shm"), os.getpid()) + own_weights(Path(tempfile.gettempdir()), os.getpid()))
                == 1
            )
            raise ZeroDivisionError

    with pytest.raises(ZeroDivisionError):
        train(load_config(tiny_config, ["evaluation.enabled=false"]), Failing())
    assert own_weights(Path("/dev/shm"), os.getpid()) + own_weights(Path(tempfile.gettempdir()), os.getpid()) == []


def test_what_a_killed_process_left_goes_with_the_next(tmp_path: Path) -> None:
    pid = os.fork()
    if pid == 0:
        (scratch_folder("weights", tmp_path) / "model.safetensors").touch()
        os.kill(os.getpid(), signal.SIGKILL)
    os.waitpid(pid, 0)
    assert len(own_weights(tmp_path, pid)) == 1
    folder = scratch_folder("weights", tmp_path)
    assert list(tmp_path.iterdir()) == [folder]


# -- the training that measures itself -------------------------------------------------------------------------------


class Measuring(Console):
    """A console that measures after every step, and holds on to something where it is told to `leak`."""

    def __init__(self, leak: str) -> None:
        super().__init__("quiet")
        self._leak, self._kept, self.measured = leak, list[object](), list[Held]()

    def step(self, metrics: Mapping[str, float]) -> None:
        super().step(metrics)
        if not self.measured:
            gc.freeze()  # what was loaded stays; looking through it each time would take most of the test
        if self._leak == "memory":
            self._kept.append(bytearray(os.urandom(200_000)))
        elif self._leak and len(self.measured) % 10 == 0:
            self._kept.append(self._one())
        self.measured.append(held())

    def _one(self) -> object:
        if self._leak == "threads":
            import threading

            threading.Thread(target=threading.Event().wait, daemon=True).start()
            return None
        if self._leak == "temporary":
            os.close(tempfile.mkstemp()[0])
            return None
        return open(os.devnull)


def main(config: str, leak: str, *sets: str) -> None:
    console = Measuring(leak)
    train(load_config(Path(config), sets), console)
    for file in Path(tempfile.gettempdir()).iterdir() if leak == "temporary" else ():
        file.unlink()
    print(json.dumps([asdict(one) for one in console.measured]))


if __name__ == "__main__":
    main(*sys.argv[1:])
