"""Four steps straight equal two steps, kill -9, resume, two steps: metrics and parameters, with vLLM in process."""

import hashlib
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path

import pytest
from conftest import comparable_metrics

Run = Callable[..., subprocess.CompletedProcess[str]]
REPOSITORY = Path(__file__).parents[2]


def hashes(checkpoint: Path) -> dict[str, str]:
    names = ("model.safetensors", "training/state.safetensors", "training/state.json")
    return {name: hashlib.sha256((checkpoint / name).read_bytes()).hexdigest() for name in names}


def train_arguments(config: Path, name: str, engine: str) -> list[str]:
    sets = [f"rollout.engine={engine}", "total_rollouts=32", "learner.schedule=linear", "learner.warmup_updates=2"]
    return [
        "train",
        "--config",
        str(config),
        "--method",
        "grpo",
        "--name",
        name,
        *(x for s in sets for x in ("--set", s)),
    ]


def kill_after_checkpoint(arguments: list[str], checkpoint: Path) -> None:
    """Start a run and kill -9 it as soon as `checkpoint` is complete: it is inside the next step then."""
    process = subprocess.Popen(
        [sys.executable, "-m", "grpo_lab", *arguments], cwd=REPOSITORY, stdout=subprocess.DEVNULL
    )
    deadline = time.monotonic() + 300
    while not (checkpoint / "manifest.json").exists():
        assert process.poll() is None and time.monotonic() < deadline, "the run ended before its checkpoint"
        time.sleep(0.02)
    os.kill(process.pid, signal.SIGKILL)
    process.wait()


@pytest.mark.parametrize("engine", [
    pytest.param("hf", marks=pytest.mark.slow), pytest.param("vllm", marks=pytest.mark.vllm)
])  # fmt: skip
def test_killed_and_resumed_equals_straight(grpo_lab: Run, tiny_config: Path, tmp_path: Path, engine: str) -> None:
    runs = tmp_path / "runs"
    straight = grpo_lab(*train_arguments(tiny_config, "straight", engine))
    assert straight.returncode == 0, straight.stderr
    kill_after_checkpoint(train_arguments(tiny_config, "killed", engine), runs / "killed/checkpoints/rollouts_00000016")
    assert not (runs / "killed/checkpoints/rollouts_00000032").exists()
    resumed = grpo_lab("train", "--resume", str(runs / "killed"))
    assert resumed.returncode == 0, resumed.stderr
    assert comparable_metrics(runs / "killed") == comparable_metrics(runs / "straight")
    assert [row["policy/grad_norm"] > 0 for row in comparable_metrics(runs / "straight")] == [True] * 4
    for rollouts in (24, 32):
        name = f"checkpoints/rollouts_{rollouts:08d}"
        assert hashes(runs / "killed" / name) == hashes(runs / "straight" / name)


def test_resume_refuses_another_trajectory(grpo_lab: Run, tiny_config: Path, tmp_path: Path) -> None:
    run = tmp_path / "runs/run"
    assert grpo_lab("train", "--config", tiny_config).returncode == 0
    before = (run / "metrics.jsonl").read_text()
    refused = grpo_lab("train", "--resume", run, "--beta", "0.5", "--set", "learner.learning_rate=1")
    assert refused.returncode == 2
    assert "beta: 0.05 -> 0.5" in refused.stderr and "learner.learning_rate: 0.001 -> 1" in refused.stderr
    assert (run / "metrics.jsonl").read_text() == before
    longer = grpo_lab("train", "--resume", run, "--set", "total_rollouts=24")
    assert longer.returncode == 0, longer.stderr
    assert (run / "checkpoints/rollouts_00000024/manifest.json").is_file()


def test_damaged_newest_checkpoint_is_passed_over(grpo_lab: Run, tiny_config: Path, tmp_path: Path) -> None:
    run = tmp_path / "runs/run"
    assert grpo_lab("train", "--config", tiny_config).returncode == 0
    wanted = hashes(run / "checkpoints/rollouts_00000016")
    model = run / "checkpoints/rollouts_00000016/model.safetensors"
    data = bytearray(model.read_bytes())
    data[-100] ^= 1
    model.write_bytes(bytes(data))
    evaluated = grpo_lab("eval", "checkpoint", model.parent)
    assert evaluated.returncode == 1 and "model.safetensors is damaged" in evaluated.stderr
    assert grpo_lab("train", "--resume", run).returncode == 0
    assert hashes(run / "checkpoints/rollouts_00000016") == wanted


def test_sigterm_finishes_the_step_and_saves(grpo_lab: Run, tiny_config: Path, tmp_path: Path) -> None:
    arguments = [
        "train",
        "--config",
        str(tiny_config),
        "--set",
        "total_rollouts=8000",
        "--set",
        "checkpoint_every=8000",
    ]
    process = subprocess.Popen(
        [sys.executable, "-m", "grpo_lab", *arguments],
        cwd=REPOSITORY,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    )
    metrics = tmp_path / "runs/run/metrics.jsonl"
    while not (metrics.exists() and metrics.read_text().count("\n") >= 2):
        assert process.poll() is None
        time.sleep(0.05)
    process.send_signal(signal.SIGTERM)
    out, err = process.communicate(timeout=120)
    assert process.returncode == 0 and "SIGTERM" in err and "--resume" in out
    rows = comparable_metrics(tmp_path / "runs/run")
    assert (tmp_path / f"runs/run/checkpoints/rollouts_{rows[-1]['rollouts/total']:08d}/manifest.json").is_file()
