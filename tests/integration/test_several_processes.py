"""`--processes 2` is the same training as one process: metrics, weights, checkpoints; and it stops and refuses as kindly."""

import json
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path

import pytest
from conftest import comparable_metrics, write_tiny_config

Run = Callable[..., subprocess.CompletedProcess[str]]
REPOSITORY = Path(__file__).parents[2]


@pytest.fixture(scope="module")
def alone(module_path: Path, tiny_model: Path) -> Path:
    """Four steps of one process."""
    config = write_tiny_config(module_path / "tiny.yaml", tiny_model, module_path)
    command = [sys.executable, "-m", "grpo_lab", "train", "--config", str(config), "--method", "grpo"]
    subprocess.run([*command, "--set", "total_rollouts=32"], cwd=REPOSITORY, check=True, capture_output=True)
    return module_path / "run"


@pytest.mark.parametrize("shard", ["false", "true"])
def test_two_processes_train_as_one(grpo_lab: Run, tiny_config: Path, tmp_path: Path, alone: Path, shard: str) -> None:
    """Two steps as two processes, and two more resumed as one, against four steps of one process."""
    from safetensors.torch import load_file

    arguments = ("train", "--config", tiny_config, "--method", "grpo", "--set", f"learner.shard={shard}")
    both = grpo_lab(*arguments, "--name", "both", "--processes", "2")
    assert both.returncode == 0, both.stderr
    assert both.stdout.count("step    2/2") == 1, "one process speaks"
    run = tmp_path / "runs/both"
    resumed = grpo_lab("train", "--resume", run, "--set", "total_rollouts=32")
    assert resumed.returncode == 0, resumed.stderr
    for got, expected in zip(comparable_metrics(run), comparable_metrics(alone), strict=True):
        assert got == pytest.approx(expected, rel=1e-4, abs=1e-5)
    name = "checkpoints/rollouts_00000032/model.safetensors"
    expected = load_file(alone / name)
    for key, tensor in load_file(run / name).items():
        gap = (
            tensor - expected[key]
        ).abs()  # Adam divides by the gradient's size: where that is rounding, a step is too
        assert gap.mean() < 1e-7 and gap.max() < 1e-4, key
    evaluations = [json.loads((r / "evaluations/rollouts_00000016.json").read_text()) for r in (run, alone)]
    assert evaluations[0]["kl_rao_blackwell"]["mean"] == pytest.approx(
        evaluations[1]["kl_rao_blackwell"]["mean"], abs=1e-5
    )


def free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("localhost", 0))
        return int(probe.getsockname()[1])


def test_two_launchers_meet_and_train_as_one(tiny_config: Path, tmp_path: Path, alone: Path) -> None:
    """The same command twice, as on two machines."""
    meeting = ["--processes", "1", "--nodes", "2", "--rendezvous", f"localhost:{free_port()}"]
    command = [sys.executable, "-m", "grpo_lab", "train", "--config", str(tiny_config), "--method", "grpo", *meeting]
    both = [subprocess.Popen(command, cwd=REPOSITORY, stdout=subprocess.PIPE, text=True) for _ in range(2)]
    said = [process.communicate(timeout=200)[0] for process in both]
    assert [process.returncode for process in both] == [0, 0]
    assert sorted(text.count("step    2/2") for text in said) == [0, 1], "one process speaks"
    for got, expected in zip(comparable_metrics(tmp_path / "runs/run"), comparable_metrics(alone), strict=False):
        assert got == pytest.approx(expected, rel=1e-4, abs=1e-5)


@pytest.mark.slow
@pytest.mark.parametrize("file", ["ddp", "fsdp2"])
def test_accelerate_launch_trains_as_one(tiny_config: Path, tmp_path: Path, alone: Path, file: str) -> None:
    launch = ["accelerate.commands.launch", "--config_file", f"configs/accelerate/{file}.yaml", "--num_processes", "2"]
    port = ["--main_process_port", str(free_port())]
    train = ["-m", "grpo_lab", "train", "--config", str(tiny_config), "--method", "grpo"]
    done = subprocess.run(
        [sys.executable, "-m", *launch, *port, *train], cwd=REPOSITORY, capture_output=True, text=True
    )
    assert done.returncode == 0, done.stderr[-2000:]
    for got, expected in zip(comparable_metrics(tmp_path / "runs/run"), comparable_metrics(alone), strict=False):
        assert got == pytest.approx(expected, rel=1e-4, abs=1e-5)


@pytest.mark.parametrize("nodes", [("--nodes", "2"), ("--nodes", "2", "--rendezvous", "node1")])
def test_several_nodes_need_a_place_to_meet(grpo_lab: Run, tiny_config: Path, nodes: tuple[str, ...]) -> None:
    refused = grpo_lab("train", "--config", tiny_config, *nodes)
    assert refused.returncode == 2 and "give host:port of one of them" in refused.stderr


@pytest.mark.parametrize("more", [(), ("--dry-run",)])
def test_refused_in_one_line(grpo_lab: Run, tiny_config: Path, tmp_path: Path, more: tuple[str, ...]) -> None:
    refused = grpo_lab("train", "--config", tiny_config, "--set", "rollout.engine=vllm", "--processes", "2", *more)
    assert refused.returncode == 2 and refused.stderr.count("\n") == 1 and "rollout.workers=1" in refused.stderr
    assert not (tmp_path / "runs").exists()


@pytest.mark.slow
@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_a_stop_signal_saves_and_ends_every_process(tiny_config: Path, tmp_path: Path, number: signal.Signals) -> None:
    command = [sys.executable, "-m", "grpo_lab", "train", "--config", str(tiny_config), "--processes", "2"]
    process = subprocess.Popen(
        [*command, "--set", "total_rollouts=80000", "--set", "checkpoint_every=80000"],
        cwd=REPOSITORY,
        stdout=subprocess.PIPE,
        text=True,
        start_new_session=True,
    )
    lines = tmp_path / "runs/run/metrics.jsonl"
    while not (lines.exists() and lines.read_text().count("\n") >= 2):
        assert process.poll() is None
        time.sleep(0.05)
    process.send_signal(number)
    output, _ = process.communicate(timeout=120)
    assert process.returncode == 0 and "--resume" in output
    steps = comparable_metrics(tmp_path / "runs/run")[-1]["rollouts/total"]
    assert (tmp_path / f"runs/run/checkpoints/rollouts_{steps:08d}/manifest.json").is_file()
    assert subprocess.run(["pgrep", "-s", str(process.pid)], capture_output=True).returncode == 1, "none is left"
