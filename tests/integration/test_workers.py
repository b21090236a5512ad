"""Real vLLM servers as rollout workers: the same training as in process, ahead of the learner, through pushes and kills."""

import contextlib
import json
import os
import signal
import socket
import subprocess
import sys
import threading
import time
import urllib.request
import uuid
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pyarrow.parquet as pq
import pytest
from conftest import write_tiny_config

pytestmark = pytest.mark.vllm
Run = Callable[..., subprocess.CompletedProcess[str]]
REPOSITORY = Path(__file__).parents[2]
LONG = 400  # tokens a worker of these tests takes


class Server:
    """`grpo-lab worker` in a session of its own."""

    def __init__(self, host: str, core: int, config: Path, *sets: str) -> None:
        with socket.socket() as probe:
            probe.bind((host, 0))
            port = probe.getsockname()[1]
        self.url = f"http://{host}:{port}"
        address = ["--host", host, "--port", str(port)]
        command = [sys.executable, "-m", "grpo_lab", "worker", "--config", str(config), *address, *sets]
        environment = {**os.environ, "VLLM_CPU_OMP_THREADS_BIND": str(core)}
        self.process = subprocess.Popen(
            command,
            cwd=REPOSITORY,
            env=environment,
            stdout=subprocess.DEVNULL,
            stderr=subprocess.DEVNULL,
            start_new_session=True,
        )

    def wait(self) -> None:
        deadline = time.monotonic() + 180
        while time.monotonic() < deadline:
            assert self.process.poll() is None, "the worker ended before it was up"
            with contextlib.suppress(OSError), urllib.request.urlopen(f"{self.url}/health", timeout=2):
                return
            time.sleep(0.3)
        raise AssertionError("the worker did not come up")

    def kill(self) -> None:
        with contextlib.suppress(ProcessLookupError):
            os.killpg(self.process.pid, signal.SIGKILL)
        self.process.wait()


@pytest.fixture(scope="module")
def servers(module_path: Path, tiny_model: Path) -> Iterator[list[Server]]:
    config = write_tiny_config(module_path / "worker.yaml", tiny_model, module_path)
    sets = ("--set", "rollout.engine=vllm", "--set", f"rollout.max_new_tokens={LONG}")
    cores = sorted(os.sched_getaffinity(0))
    hosts = {"127.0.0.1": cores[0], "127.0.0.2": cores[-1]}  # as two machines would
    started = [Server(host, core, config, *sets) for host, core in hosts.items()]
    try:
        for server in started:
            server.wait()
        yield started
    finally:
        for server in started:
            server.kill()


def attach(servers: list[Server], *sets: str) -> list[str]:
    urls = ",".join(server.url for server in servers)
    chosen = ("rollout.engine=vllm", f"rollout.urls=[{urls}]", "total_rollouts=32", "evaluation.enabled=false", *sets)
    return [word for text in chosen for word in ("--set", text)]


def rollouts(run: Path) -> list[list[dict[str, Any]]]:
    return [pq.read_table(file).to_pylist() for file in sorted(run.glob("rollouts/step_*.parquet"))]


def metrics(run: Path) -> list[dict[str, float]]:
    return [json.loads(line) for line in (run / "metrics.jsonl").read_text().splitlines()]


def weights(run: Path) -> bytes:
    return (run / "checkpoints/rollouts_00000032/model.safetensors").read_bytes()


def sampled(run: Path) -> list[list[tuple[str, int, list[int]]]]:
    """Problem, sibling and token ids of everything that was trained on, by step."""
    return [[(row["problem"], row["sibling"], row["token_ids"]) for row in step] for step in rollouts(run)]


@pytest.fixture(scope="module")
def in_process(module_path: Path, tiny_model: Path) -> Path:
    """A run of four steps with the engine in the learner's process."""
    config = write_tiny_config(module_path / "tiny.yaml", tiny_model, module_path)
    sets = ("rollout.engine=vllm", "total_rollouts=32", "evaluation.enabled=false")
    command = [sys.executable, "-m", "grpo_lab", "train", "--config", str(config), "--method", "grpo"]
    subprocess.run(
        [*command, *(word for text in sets for word in ("--set", text))], cwd=REPOSITORY, check=True, timeout=300
    )
    return module_path / "run"


def test_two_workers_train_as_one_engine_in_process(
    grpo_lab: Run, servers: list[Server], in_process: Path, tiny_config: Path, tmp_path: Path
) -> None:
    done = grpo_lab("train", "--config", tiny_config, "--method", "grpo", *attach(servers))
    assert done.returncode == 0, done.stderr
    assert sampled(tmp_path / "runs/run") == sampled(in_process)
    assert weights(tmp_path / "runs/run") == weights(in_process)
    for row in metrics(tmp_path / "runs/run"):
        assert row["rollout/workers"] == 2 and row["rollout/canary_max"] < 1e-4 and row["rollout/staleness_max"] == 0


@pytest.mark.parametrize("in_flight", ["wait", "keep", "abort"])
def test_pushes_while_generating(servers: list[Server], tiny_model: Path, tmp_path: Path, in_flight: str) -> None:
    """wait: running completions end with the old weights; keep: they go on with the new ones; abort: they start over."""
    from safetensors.torch import load_file, save_file

    from grpo_lab.config import ModelConfig, RolloutConfig
    from grpo_lab.rollout.engines import EngineSpec, build_engine
    from grpo_lab.types import GenerationRequest, Sampling

    settings = RolloutConfig(
        urls=[server.url for server in servers], in_flight=in_flight, max_new_tokens=LONG, max_prompt_tokens=64
    )
    engine = build_engine(EngineSpec(tiny_model, ModelConfig(name=str(tiny_model), dtype="float32"), settings))
    tensors = load_file(tiny_model / "model.safetensors")
    for version, scale in ((7, 1.0), (8, 1.05)):
        (tmp_path / str(version)).mkdir()
        scaled = {name: tensor * scale for name, tensor in tensors.items()}
        scaled["lm_head.weight"] = scaled["model.embed_tokens.weight"].clone()
        save_file(scaled, tmp_path / str(version) / "model.safetensors")
    try:
        engine.load_weights(tmp_path / "7", 7)
        answers: list[Any] = []
        requests = [GenerationRequest(tuple(range(10, 20)), seed) for seed in range(16)]
        thread = threading.Thread(target=lambda: answers.extend(engine.generate(requests, Sampling(LONG))))
        thread.start()
        time.sleep(0.2)
        engine.generate([GenerationRequest((n,), 1) for n in (5, 6)], Sampling(1))  # asked last: the others run by now
        engine.load_weights(tmp_path / "8", 8)
        thread.join(60)
        whole = [c for c in answers if c.truncated]
        spans = {(completion.weight_version, completion.weight_version_end) for completion in whole}
        met = {"wait": (7, None), "keep": (7, 8), "abort": (8, None)}[in_flight]
        assert met in spans and spans <= {met, (7, None)}  # on a fast machine some have ended before the push
        assert len(answers) == 16 and len(whole) > 8 and all(c.truncated == (len(c.token_ids) == LONG) for c in answers)
    finally:
        engine.close()


def test_sampling_runs_ahead_within_its_bound(
    grpo_lab: Run, servers: list[Server], in_process: Path, tiny_config: Path, tmp_path: Path
) -> None:
    done = grpo_lab("train", "--config", tiny_config, "--method", "sao", *attach(servers, "rollout.max_staleness=2"))
    assert done.returncode == 0, done.stderr
    run = tmp_path / "runs/run"
    for step, (row, completions) in enumerate(zip(metrics(run), rollouts(run), strict=True)):
        ages = [step - completion["weight_version"] for completion in completions]
        assert max(ages) == row["rollout/staleness_max"] == min(step, 2)
    assert [[row[:2] for row in step] for step in sampled(run)] == [
        [row[:2] for row in step] for step in sampled(in_process)
    ]
    assert metrics(run)[-1]["perf/overlap"] > 0


def test_a_killed_worker_costs_no_group(
    servers: list[Server], in_process: Path, tiny_config: Path, tmp_path: Path
) -> None:
    """The last test with these servers. The other worker answers with the same seeds: the same weights come out."""
    command = [
        sys.executable,
        "-m",
        "grpo_lab",
        "train",
        "--config",
        str(tiny_config),
        "--method",
        "grpo",
        *attach(servers),
    ]
    process = subprocess.Popen(command, cwd=REPOSITORY, stdout=subprocess.PIPE, text=True)
    lines = tmp_path / "runs/run/metrics.jsonl"
    while not (lines.exists() and lines.read_text()):
        assert process.poll() is None
        time.sleep(0.02)
    servers[0].kill()
    output, _ = process.communicate(timeout=300)
    assert process.returncode == 0, output
    assert f"{servers[0].url} does not answer" in output and "dropped, 1 left" in output
    assert sampled(tmp_path / "runs/run") == sampled(in_process)
    assert weights(tmp_path / "runs/run") == weights(in_process)


# -- workers the run starts itself -----------------------------------------------------------------------------------


class OwnWorkers:
    """A training that starts two workers; everything it starts carries a mark in its environment."""

    def __init__(self, config: Path, *sets: str) -> None:
        self.mark = f"GRPO_LAB_TEST={uuid.uuid4()}"
        self._log = config.with_suffix(f".{uuid.uuid4().hex[:6]}.log")
        chosen = ("rollout.engine=vllm", "rollout.workers=2", *sets)
        command = [sys.executable, "-m", "grpo_lab", "train", "--config", str(config), "--method", "grpo"]
        name, _, value = self.mark.partition("=")
        with self._log.open("w") as log:
            self.process = subprocess.Popen(
                [*command, *(word for text in chosen for word in ("--set", text))],
                cwd=REPOSITORY,
                env={**os.environ, name: value},
                stdout=log,
                stderr=subprocess.STDOUT,
            )

    @property
    def output(self) -> str:
        return self._log.read_text()

    def end(self, seconds: float = 300) -> str:
        """Wait for its end; all it said."""
        self.process.wait(seconds)
        return self.output

    def alive(self, title: str = "") -> list[int]:
        """The processes of this training, itself aside, whose command line has `title` in it."""
        found = []
        for folder in Path("/proc").iterdir():
            with contextlib.suppress(OSError):
                marked = folder.name.isdigit() and self.mark.encode() in (folder / "environ").read_bytes().split(b"\0")
                if (
                    marked
                    and int(folder.name) != self.process.pid
                    and title.encode() in (folder / "cmdline").read_bytes()
                ):
                    found.append(int(folder.name))
        return found

    def wait_until(self, condition: Callable[[], object], seconds: float = 400) -> None:
        deadline = time.monotonic() + seconds
        while not condition():
            assert self.process.poll() is None and time.monotonic() < deadline, self.output
            time.sleep(0.05)

    def gone_within(self, seconds: float) -> bool:
        deadline = time.monotonic() + seconds
        while self.alive() and time.monotonic() < deadline:
            time.sleep(0.1)
        return not self.alive()


def has_steps(run: Path, count: int) -> bool:
    return (run / "metrics.jsonl").is_file() and len((run / "metrics.jsonl").read_text().splitlines()) >= count


@pytest.mark.slow
@pytest.mark.parametrize("blow", [signal.SIGKILL, signal.SIGSTOP], ids=["killed", "hanging"])
def test_a_lost_worker_is_restarted(in_process: Path, tiny_config: Path, tmp_path: Path, blow: signal.Signals) -> None:
    """Its engine is killed or stopped in the middle of the run; the training ends with the very same weights."""
    sets = ("total_rollouts=80000", "checkpoint_every=32", "evaluation.enabled=false", "rollout.worker_timeout_s=10")
    training = OwnWorkers(tiny_config, *sets)
    run = tmp_path / "runs/run"
    training.wait_until(lambda: has_steps(run, 1))
    os.kill(training.alive("VLLM::Worker")[0], blow)
    training.wait_until(lambda: "is back" in training.output)
    done = len(metrics(run))
    training.wait_until(lambda: has_steps(run, done + 2))
    training.process.send_signal(signal.SIGTERM)
    output = training.end()
    assert training.process.returncode == 0 and "restarting it" in output, output
    assert sampled(run)[:4] == sampled(in_process) and len(sampled(run)) == len(metrics(run))
    for step in rollouts(run):
        assert [row["sibling"] for row in step] == [0, 1, 2, 3] * 2 and len({row["problem"] for row in step}) == 2
    assert weights(run) == weights(in_process)
    assert metrics(run)[-1]["rollout/workers"] == 2 and metrics(run)[-1]["rollout/worker_restarts"] == 1
    assert training.gone_within(20)


@pytest.mark.slow
def test_ctrl_c_at_any_moment_leaves_no_process(tiny_config: Path, tmp_path: Path) -> None:
    """While the workers start, load, sample, train and evaluate; once more in the middle of a graceful stop."""
    run = tmp_path / "runs/run"
    moments: dict[str, Callable[[OwnWorkers], object]] = {
        "starting": lambda training: training.alive("api_server"),
        "loading": lambda training: training.alive("VLLM::Worker"),
        "first sampling": lambda training: (run / "config.yaml").is_file(),
        "training": lambda training: has_steps(run, 2),
        "evaluating": lambda training: list(run.glob("evaluations/rollouts_*.json")),
    }
    for index, (name, reached) in enumerate(moments.items()):
        training = OwnWorkers(tiny_config, "total_rollouts=800", f"run_name=run{index}")
        run = tmp_path / f"runs/run{index}"
        training.wait_until(lambda t=training, r=reached: r(t))  # type: ignore[misc]
        time.sleep(0.2)
        training.process.send_signal(signal.SIGINT)
        output = training.end()
        assert training.process.returncode in (0, 130) and "Traceback" not in output, (name, output)
        assert training.gone_within(20), (name, training.alive())


@pytest.mark.slow
@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGKILL, None], ids=["SIGTERM", "SIGKILL", "twice"])
def test_no_orphans_however_the_run_ends(tiny_config: Path, tmp_path: Path, number: signal.Signals | None) -> None:
    training = OwnWorkers(tiny_config, "total_rollouts=80000", "checkpoint_every=8000")
    training.wait_until(lambda: has_steps(tmp_path / "runs/run", 2))
    assert len(training.alive("VLLM::Worker")) == 2
    for signal_sent in [number] if number else [signal.SIGINT, signal.SIGINT]:
        training.process.send_signal(signal_sent)
        time.sleep(0.05)
    training.end()
    assert training.gone_within(20), training.alive()
    if number == signal.SIGTERM:
        assert not list(Path("/dev/shm").glob(f"grpo_lab-weights-*-{training.process.pid}-*"))


@pytest.mark.slow
def test_adapters_travel_alone(grpo_lab: Run, tiny_config: Path, tmp_path: Path) -> None:
    """LoRA on workers that run ahead: every completion is of one adapter, and the workers agree with the learner."""
    sets = (
        "rollout.engine=vllm",
        "rollout.workers=1",
        "rollout.max_staleness=1",
        "model.lora_rank=8",
        "total_rollouts=64",
    )
    done = grpo_lab("train", "--config", tiny_config, "--method", "sao", *(w for s in sets for w in ("--set", s)))
    assert done.returncode == 0, done.stderr
    rows = metrics(tmp_path / "runs/run")
    assert [row["rollout/staleness_max"] for row in rows] == [0, *[1] * 7]
    assert max(row["rollout/canary_max"] for row in rows) < 1e-4
    assert rows[-1]["rollout/off_policy_mean"] > 1e-6
