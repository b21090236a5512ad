"""A job of two roles from its script to its end: two rollout nodes, one learner of two processes, preempted and not."""

import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path

import pytest
from conftest import REPOSITORY, comparable_metrics

FAKE = REPOSITORY / "tests/fake_slurm.py"
MINUTES = 60.0


@pytest.fixture
def cluster(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A folder to submit from, with Slurm's commands and grpo-lab on the PATH."""
    commands, jobs, home = tmp_path / "bin", tmp_path / "jobs", tmp_path / "home"
    for folder in (commands, jobs, home):
        folder.mkdir()
    for name in ("sbatch", "srun", "scontrol"):
        (commands / name).write_text(f'#!/bin/sh\nexec {sys.executable} {FAKE} {name} "$@"\n')
    (commands / "grpo-lab").write_text(f'#!/bin/sh\nexec {sys.executable} -m grpo_lab "$@"\n')
    for file in commands.iterdir():
        file.chmod(0o755)
    monkeypatch.setenv("PATH", f"{commands}{os.pathsep}{os.environ['PATH']}")
    monkeypatch.setenv("FAKE_SLURM", str(jobs))
    monkeypatch.setenv("PYTHONPATH", f"{REPOSITORY}{os.pathsep}{REPOSITORY / 'tests'}")
    monkeypatch.chdir(home)
    return home


def submit(config: Path, name: str, jobs: Path) -> Path:
    """Write and submit a job as users do; the folder of the job."""
    before = set(jobs.iterdir())
    sets = [w for s in ("rollout.engine=vllm", "total_rollouts=64", "checkpoint_every=32") for w in ("--set", s)]
    layout = ["--nodes", "1+2", "--gpus", "0", "--processes", "2", "--setup", "export OMP_NUM_THREADS=1"]
    command = [sys.executable, "-m", "grpo_lab", "slurm", str(config), "--name", name, *layout, *sets, "--submit"]
    done = subprocess.run(command, capture_output=True, text=True)
    assert "Submitted batch job" in done.stdout, done.stderr
    return (set(jobs.iterdir()) - before).pop()


def wait_for(condition: Callable[[], object], job: Path, home: Path) -> None:
    deadline = time.monotonic() + 8 * MINUTES
    while not condition():
        ended = (job / "state").read_text() in ("FAILED", "COMPLETED")
        if ended or time.monotonic() > deadline:
            logs = [*home.glob("*.log"), *home.parent.glob("runs/slurm/*/*.log")]
            raise AssertionError("\n".join(f"== {log}\n{log.read_text()[-3000:]}" for log in logs))
        time.sleep(0.1)


def state(job: Path) -> str:
    return (job / "state").read_text()


@pytest.mark.slow
def test_a_preempted_job_ends_as_an_undisturbed_one(cluster: Path, tiny_config: Path, tmp_path: Path) -> None:
    runs, jobs = tmp_path / "runs", tmp_path / "jobs"
    calm = submit(tiny_config, "calm", jobs)
    wait_for(lambda: (runs / "calm/evaluations/rollouts_00000064.json").exists(), calm, cluster)
    while state(calm) == "RUNNING":
        time.sleep(0.1)
    job = submit(tiny_config, "preempted", jobs)
    metrics = runs / "preempted/metrics.jsonl"
    wait_for(lambda: metrics.exists() and metrics.read_text().count("\n") >= 2, job, cluster)
    first = int((job / "pid").read_text())
    os.kill(first, signal.SIGUSR1)
    wait_for(lambda: int((job / "pid").read_text()) != first, job, cluster)
    assert metrics.read_text().count("\n") < 8, "it was over before it was preempted"
    wait_for(lambda: (runs / "preempted/evaluations/rollouts_00000064.json").exists(), job, cluster)
    while state(job) == "RUNNING":
        time.sleep(0.1)
    assert state(calm) == state(job) == "COMPLETED"
    assert comparable_metrics(runs / "preempted") == comparable_metrics(runs / "calm")
    assert len(comparable_metrics(runs / "calm")) == 8
    weights = [
        (runs / f"{name}/checkpoints/rollouts_00000064/model.safetensors").read_bytes()
        for name in ("calm", "preempted")
    ]
    assert weights[0] == weights[1]
    assert "back to the queue" in next(cluster.glob("preempted-*.log")).read_text()
    assert not list(runs.glob("slurm/*/meet-*")), "addresses and pushed weights are left behind"
    assert not [p for p in Path("/proc").glob("[0-9]*/environ") if b"FAKE_SLURM=" + str(jobs).encode() in _read(p)]


def _read(path: Path) -> bytes:
    try:
        return path.read_bytes()
    except OSError:
        return b""
