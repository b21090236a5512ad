"""vLLM servers beside the learner: N started here (`rollout.workers`), or running ones attached (`rollout.urls`), or both.

The engine's methods may be called from several threads; all talk to one pool in one background loop.
"""

from __future__ import annotations

import asyncio
import contextlib
import os
import resource
import shutil
import threading
from collections.abc import Coroutine, Sequence
from importlib import util
from pathlib import Path
from typing import Any, TypeVar

import torch

from grpo_lab.errors import ConfigError
from grpo_lab.rollout.client import WorkerClient
from grpo_lab.rollout.engines import EngineSpec
from grpo_lab.rollout.pool import Pool
from grpo_lab.rollout.server import ServerProcess, machine_shares, server_command, server_environment
from grpo_lab.rollout.vllm_options import command_line, engine_options
from grpo_lab.rollout.worker import Worker
from grpo_lab.storage.scratch import scratch_folder
from grpo_lab.types import Canary, Completion, GenerationRequest, Sampling

T = TypeVar("T")


class EngineImpl:
    """See the Engine protocol. ConfigError when vLLM or GPUs are missing, RunError when a worker cannot start."""

    concurrent = True

    def __init__(self, spec: EngineSpec) -> None:
        _raise_file_limit()
        self.logs = scratch_folder("workers")
        self._loop = asyncio.new_event_loop()
        self._thread = threading.Thread(target=self._loop.run_forever, name="rollout workers", daemon=True)
        self._thread.start()
        self._pool: Pool | None = None
        try:
            workers = _workers(spec, self.logs)
            self._pool = Pool(workers, spec.rollout, spec.say)
            self._wait_for(self._pool.start(spec.max_model_len))
        except BaseException as error:
            self.close(keep_logs=isinstance(error, Exception))
            raise

    def generate(self, requests: Sequence[GenerationRequest], sampling: Sampling) -> list[Completion]:
        """One completion a request, in order."""
        return self._wait_for(self._running.generate(requests, sampling))

    def load_weights(self, folder: Path, version: int) -> None:
        """Every worker reloads from `folder`, which must be a path all of them can read."""
        self._wait_for(self._running.push(folder, version, (folder / "adapter_config.json").is_file()))

    def verify(self, canary: Canary) -> dict[str, float]:
        """Prove the push by the canary's log-probs on every worker; see Pool.verify."""
        return self._wait_for(self._running.verify(canary))

    def checksums(self) -> dict[str, dict[str, str]]:
        """sha256 of every parameter by worker; see WorkerClient.checksums."""
        return self._wait_for(self._running.checksums())

    def close(self, keep_logs: bool = False) -> None:
        """Stop the servers that were started here; returns when they are gone."""
        pool, self._pool = self._pool, None
        if pool:
            keep_logs = keep_logs or pool.has_failed
            self._wait_for(pool.close())
        if self._thread.is_alive():
            self._wait_for(_cancel_the_rest())
            self._loop.call_soon_threadsafe(self._loop.stop)
            self._thread.join()
            self._loop.close()
        if not keep_logs or not any(self.logs.iterdir()):
            shutil.rmtree(self.logs, ignore_errors=True)

    @property
    def _running(self) -> Pool:
        assert self._pool is not None, "the engine has not been closed"
        return self._pool

    def _wait_for(self, work: Coroutine[Any, Any, T]) -> T:
        future = asyncio.run_coroutine_threadsafe(work, self._loop)
        try:
            return future.result()
        except BaseException:
            with contextlib.suppress(Exception):
                future.cancel()
            raise


async def _cancel_the_rest() -> None:
    """End every task of the loop but this one, so that nobody waits for an answer that will not come."""
    rest = asyncio.all_tasks() - {asyncio.current_task()}
    for task in rest:
        task.cancel()
    await asyncio.gather(*rest, return_exceptions=True)


def require_vllm(wanted_by: str) -> None:
    """ConfigError when vLLM is not installed here."""
    if util.find_spec("vllm") is None:
        raise ConfigError(
            f"{wanted_by}: vLLM is not installed here; install it with `make setup` (CPU) or `make setup CUDA=1`, or attach "
            "workers of another machine with rollout.urls"
        )


def server_options(spec: EngineSpec, on_gpu: bool) -> dict[str, Any]:
    """vLLM's engine arguments of a worker."""
    options = engine_options(spec, on_gpu) | {"scheduling_policy": "priority"}  # the proof of a push goes first
    if on_gpu:
        options |= {
            "gpu_memory_utilization": spec.rollout.worker_gpu_memory,
            "tensor_parallel_size": spec.rollout.worker_gpus,
        }
    return options


def _workers(spec: EngineSpec, logs: Path) -> list[Worker]:
    settings = spec.rollout
    count = settings.started_workers
    if count:
        require_vllm(f"rollout.workers={count}")
    learners = int(os.environ.get("LOCAL_WORLD_SIZE", "1"))
    shares = machine_shares(count, settings.worker_gpus, learners) if count else []
    options = command_line(server_options(spec, torch.cuda.is_available()))
    lora = spec.model.lora_rank > 0

    def own(index: int, share: dict[str, str]) -> Worker:
        command = lambda socket: server_command(options, ["--uds", socket])  # noqa: E731
        server = ServerProcess(command, logs / f"worker-{index}.log", server_environment(lora, share))
        return Worker(f"worker {index}", settings.worker_timeout_s, server=server)

    started = [own(index, share) for index, share in enumerate(shares)]
    return started + [Worker(f"worker {url}", settings.worker_timeout_s, WorkerClient(url)) for url in settings.urls]


def _raise_file_limit() -> None:
    """Let this process hold as many connections as the system allows it: a batch may be thousands of requests."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    if soft != hard:
        with contextlib.suppress(ValueError, OSError):
            resource.setrlimit(resource.RLIMIT_NOFILE, (hard, hard))
