"""vLLM's own OpenAI-compatible server as a child process: its command line, its share of the machine, its end."""

from __future__ import annotations

import contextlib
import os
import re
import shutil
import subprocess
import sys
import tempfile
import threading
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path

from grpo_lab.errors import ConfigError
from grpo_lab.rollout import guard

STOP_S = guard.GRACE_S + 5
_FAILURES = re.compile(r"(?:[A-Za-z]*(?:Error|Exception|Exit)\b: .+|error: .+|Value error, [^.\[]+|out of memory.+)")
_LONGEST_SOCKET = 100  # bytes of a Unix socket's path that every system takes
_NOT_THE_CAUSE = "See root cause above"


class ServerProcess:
    """One server at the Unix socket `socket`, which only this user can reach; it never outlives this process.

    `command` gives its command line for the socket's path. Its output goes to `log`.
    """

    def __init__(self, command: Callable[[str], Sequence[str]], log: Path, environment: Mapping[str, str]) -> None:
        self.log, self.socket = log, log.with_suffix(".sock")
        if len(str(self.socket)) > _LONGEST_SOCKET:
            self.socket = Path(tempfile.mkdtemp(prefix="grpo-", dir="/tmp")) / "sock"
        self._stopping = threading.Lock()
        self._command = command
        self._environment = dict(environment)
        self._log_start = 0
        self._process: subprocess.Popen[bytes] | None = None

    def start(self) -> None:
        """Start under guard.py in a session of its own, so that Ctrl-C in a terminal reaches the owner alone."""
        self.socket.unlink(missing_ok=True)
        if len(str(self.socket)) > _LONGEST_SOCKET:  # a new folder each time: nobody else can have made it before
            self.socket = Path(tempfile.mkdtemp(prefix="grpo-", dir="/tmp")) / "sock"
        self._log_start = self.log.stat().st_size if self.log.is_file() else 0
        with self.log.open("ab") as output:
            self._process = subprocess.Popen(
                [sys.executable, "-P", guard.__file__, *self._command(str(self.socket))],
                stdin=subprocess.PIPE,
                stdout=output,
                stderr=subprocess.STDOUT,
                env=self._environment,
                start_new_session=True,
            )

    @property
    def is_running(self) -> bool:
        return self._process is not None and self._process.poll() is None

    def stop(self, at_once: bool = False) -> None:
        """End the server and its children, `at_once` without a chance to tidy up; returns when they are gone."""
        with self._stopping:
            process = self._process
            if process is not None and process.stdin is not None:
                with contextlib.suppress(OSError):
                    if at_once:
                        process.stdin.write(b"k")
                    process.stdin.close()
                try:
                    process.wait(STOP_S)
                except subprocess.TimeoutExpired:
                    process.kill()
                    process.wait()
            self._process = None
        if self.socket.parent != self.log.parent:
            shutil.rmtree(self.socket.parent, ignore_errors=True)
            self.socket = self.log.with_suffix(".sock")

    def last_error(self) -> str:
        """The last line of the log since the newest start that says what went wrong, "" when none does."""
        text = self.log.read_bytes()[self._log_start :].decode(errors="replace") if self.log.is_file() else ""
        found = [line for line in _FAILURES.findall(text[-200_000:]) if _NOT_THE_CAUSE not in line]
        return " ".join(str(found[-1]).split())[:300] if found else ""


def server_command(options: Sequence[str], address: Sequence[str]) -> list[str]:
    """vLLM's server with the endpoints this trainer needs: token ids in and out, pause, reload, versions.

    `address` is where it listens: --uds PATH, or --host and --port. Started as a module: the `vllm` script of some CPU builds
    cannot find its own metadata.
    """
    module = [sys.executable, "-m", "vllm.entrypoints.openai.api_server"]
    return [*module, *address, "--enable-scale-out", "--disable-uvicorn-access-log", *options]


def server_environment(lora: bool, share: Mapping[str, str]) -> dict[str, str]:
    """This process's environment with what the server needs; `share` is its part of the machine."""
    environment = {**os.environ, "VLLM_SERVER_DEV_MODE": "1", "VLLM_NO_USAGE_STATS": "1", **share}
    environment.pop("VLLM_ENABLE_V1_MULTIPROCESSING", None)  # what an engine in process needs, a server does not
    environment["VLLM_LOGGING_LEVEL"] = "INFO"
    if lora:
        environment["VLLM_ALLOW_RUNTIME_LORA_UPDATING"] = "1"
    return environment


def gpu_shares(visible: Sequence[str], learners: int, workers: int, gpus_each: int) -> list[dict[str, str]]:
    """CUDA_VISIBLE_DEVICES of each worker: the first visible GPUs are the learner's processes', the others dealt in order.

    Raises ConfigError when there are too few.
    """
    needed = learners + workers * gpus_each
    if len(visible) < needed and not learners:
        raise ConfigError(
            f"--count {workers} workers of rollout.worker_gpus={gpus_each} need {needed} GPUs, {len(visible)} are visible: "
            "lower --count"
        )
    if len(visible) < needed:
        raise ConfigError(
            f"rollout.workers={workers} of rollout.worker_gpus={gpus_each} and {learners} learner process(es) need {needed} "
            f"GPUs, {len(visible)} are visible: lower rollout.workers, attach workers of other machines with rollout.urls, or "
            "set rollout.workers=0 (engine and learner share one GPU)"
        )
    starts = range(learners, needed, gpus_each)
    return [{"CUDA_VISIBLE_DEVICES": ",".join(visible[start : start + gpus_each])} for start in starts]


def cpu_shares(cores: Sequence[int], workers: int) -> list[dict[str, str]]:
    """The cores of each worker, so that workers do not wait for each other's threads; unbound where there are too few."""
    if workers == 1:
        return [{}]
    each = len(cores) // workers
    if each == 0:
        return [{"VLLM_CPU_OMP_THREADS_BIND": "nobind", "OMP_NUM_THREADS": "1"}] * workers
    parts = [cores[index * each : (index + 1) * each] for index in range(workers)]
    return [{"VLLM_CPU_OMP_THREADS_BIND": ",".join(map(str, part))} for part in parts]


def machine_shares(workers: int, gpus_each: int, learners: int) -> list[dict[str, str]]:
    """The environment that gives each of `workers` its part of this machine's GPUs beside the learners', or of its cores."""
    import torch

    if not torch.cuda.is_available():
        return cpu_shares(sorted(os.sched_getaffinity(0)), workers)
    listed = os.environ.get("CUDA_VISIBLE_DEVICES")
    visible = listed.split(",") if listed else [str(index) for index in range(torch.cuda.device_count())]
    return gpu_shares(visible, learners, workers, gpus_each)
