"""One rollout worker: a vLLM server that was started here or attached by its address, and the weights it holds."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Awaitable, Callable, Coroutine
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TypeVar

from grpo_lab.rollout.client import InFlight, WorkerClient, WorkerError
from grpo_lab.rollout.server import ServerProcess, free_port
from grpo_lab.types import Canary

START_S = 900.0
RELOAD_S = 900.0  # of a large model from a shared file system
_PORT_TRIES = 3
T = TypeVar("T")


class WorkerLost(Exception):
    """The worker was given up while it worked on a request."""


@dataclass(frozen=True)
class Push:
    """Weights in a folder of safetensors under their version; `adapter` names them where they are a LoRA adapter."""

    folder: Path
    version: int
    adapter: str | None = None


class Worker:
    """What the pool knows of one server: whether it takes requests (`up`), is given up (`gone`), and its requests (`load`)."""

    def __init__(self, name: str, client: WorkerClient | None = None, server: ServerProcess | None = None) -> None:
        self.name, self.client, self.server = name, client, server
        self.up = False
        self.gone = False
        self.load = 0
        self.restarts = 0
        self.adapters: dict[str, int] = {}  # loaded adapters and their running requests
        self._tasks: set[asyncio.Task[Any]] = set()

    @property
    def api(self) -> WorkerClient:
        assert self.client is not None, "the worker has been launched or attached"
        return self.client

    # -- life --------------------------------------------------------------------------------------------------------

    async def launch(self) -> None:
        """Start the server on a free port and wait until it is healthy. WorkerError with its own words when it ends."""
        assert self.server is not None
        for attempt in range(1, _PORT_TRIES + 1):
            port = free_port()
            self.client = WorkerClient(f"http://127.0.0.1:{port}")
            self.adapters.clear()
            self.server.start(port)
            deadline = time.monotonic() + START_S
            while self.server.is_running and time.monotonic() < deadline:
                if await self.api.is_healthy():
                    return
                await asyncio.sleep(0.25)
            reason = self.server.last_error() or ("it ended" if not self.server.is_running else "no answer")
            await asyncio.to_thread(self.server.stop, True)
            if "ddress already in use" not in reason or attempt == _PORT_TRIES:
                raise WorkerError(f"could not start: {reason}; its output is in {self.server.log}")

    async def check(self, timeout: float) -> None:
        """Raise WorkerError unless the engine itself answers within `timeout` seconds."""
        if self.server is not None and not self.server.is_running:
            raise WorkerError("its process ended")
        try:
            await self.api.version(timeout)
        except WorkerError as error:
            raise WorkerError(f"does not answer ({error})") from None

    def drop_requests(self) -> None:
        """Let every request that runs here end with WorkerLost."""
        for task in self._tasks:
            task.cancel()

    async def run(self, call: Coroutine[Any, Any, T]) -> T:
        """The result of a request to this worker; WorkerLost when the worker is given up meanwhile."""
        task = asyncio.create_task(call)
        self._tasks.add(task)
        try:
            return await task
        except asyncio.CancelledError:
            own = asyncio.current_task()
            if own is not None and own.cancelling():
                task.cancel()
                raise
            raise WorkerLost from None
        finally:
            self._tasks.discard(task)

    # -- weights -----------------------------------------------------------------------------------------------------

    async def load_weights(self, push: Push, in_flight: InFlight, timeout: float) -> None:
        """Take the weights of a push and prove the version by reading it back. WorkerError when any part of it fails.

        A whole model is loaded while generation pauses. An adapter comes beside those that running requests still use. While
        the engine waits for running requests it must answer within `timeout` seconds.
        """
        if push.adapter is None:
            await self.alive_during(self.api.pause(in_flight), timeout)
        await asyncio.wait_for(self._load(push, in_flight), RELOAD_S)
        held = await self.api.version(timeout)
        if held != push.version:
            raise WorkerError(f"holds weight version {held} after version {push.version} was pushed")

    async def _load(self, push: Push, in_flight: InFlight) -> None:
        if push.adapter is None:
            await self.api.reload(push.folder)
            await self.api.set_version(push.version)
            await self.api.reset_prefix_cache(recompute_running=in_flight == "keep")
            await self.api.resume()
            return
        if push.adapter in self.adapters:  # pushed again: it was not what it should be
            await self.api.unload_adapter(push.adapter)
        await self.api.load_adapter(push.adapter, push.folder)
        self.adapters[push.adapter] = 0
        await self.api.set_version(push.version)

    async def forget_adapters(self, but: str | None) -> None:
        """Unload the adapters no running request uses, except one."""
        for name, running in list(self.adapters.items()):
            if name != but and running == 0:
                del self.adapters[name]
                await self.api.unload_adapter(name)

    async def alive_during(self, call: Coroutine[Any, Any, T], timeout: float) -> T:
        """The result of a call that may take long, as long as the engine answers every `timeout` seconds; else WorkerError."""
        task = asyncio.create_task(call)
        try:
            while not task.done():
                await asyncio.wait({task}, timeout=timeout)
                if not task.done():
                    await self.check(timeout)
            return await task
        finally:
            task.cancel()

    async def differences(self, canary: Canary, adapter: str | None, timeout: float) -> tuple[float, float]:
        """Mean and largest |log-prob of this worker - the learner's| over the canary's tokens, nats; NaN counts as infinite."""
        own = await self.alive_during(self.api.prompt_logprobs(canary.token_ids, adapter), timeout)
        gaps = [abs(a - b) if a == a else float("inf") for a, b in zip(own, canary.logprobs, strict=True)]
        return sum(gaps) / len(gaps), max(gaps)


async def all_of(workers: list[Worker], what: Callable[[Worker], Awaitable[None]]) -> dict[Worker, WorkerError]:
    """`what` for every worker at once; the errors of those that failed."""
    results = await asyncio.gather(*(what(worker) for worker in workers), return_exceptions=True)
    failed = {}
    for worker, result in zip(workers, results, strict=True):
        if isinstance(result, WorkerError | TimeoutError):
            failed[worker] = result if isinstance(result, WorkerError) else WorkerError("no answer in time")
        elif isinstance(result, BaseException):
            raise result
    return failed
