"""One rollout worker: a vLLM server that was started here or attached by its address, and the weights it holds."""

from __future__ import annotations

import asyncio
import contextlib
import time
from collections.abc import Awaitable, Callable, Coroutine, Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, TypeVar

from grpo_lab.rollout.client import ForeignWeightsError, InFlight, WorkerClient, WorkerError
from grpo_lab.rollout.server import ServerProcess
from grpo_lab.rollout.vllm_options import sampling_options
from grpo_lab.types import Canary, Completion, GenerationRequest, Sampling

START_S = 900.0
GOODBYE_S = 3.0
_AGAIN_S = 1.0  # between two looks at a server that is not up yet
_NOT_FOUND = 404
_CANARY_SEED, _CANARY_TOKENS = 0, 16
RELOAD_S = 900.0  # of a large model from a shared file system
T = TypeVar("T")


class WorkerLost(Exception):
    """The worker was given up while it worked on a request."""


@dataclass(frozen=True)
class Push:
    """Weights in a folder of safetensors; `label` is what the server calls them, unlike any other run's."""

    folder: Path
    version: int
    label: str
    is_adapter: bool = False


class Worker:
    """What the pool knows of one server: whether it takes requests (`up`), is given up (`gone`), and its requests (`load`).

    `timeout` seconds without an answer of its engine count as hanging.
    """

    def __init__(
        self, name: str, timeout: float, client: WorkerClient | None = None, server: ServerProcess | None = None
    ) -> None:
        self.name, self.client, self.server, self._timeout = name, client, server, timeout
        self.up = False
        self.gone = False
        self.load = 0
        self.restarts = 0
        self._adapter: str | None = None  # what new requests use, and its version
        self._adapter_version = 0
        self._adapter_lost = False
        self._adapters: dict[str, int] = {}  # loaded ones and their running requests
        self._loads = 0
        self._proof: tuple[tuple[float, ...], list[float]] | None = None  # the last canary: the learner's, its own
        self._tasks: set[asyncio.Task[Any]] = set()

    @property
    def api(self) -> WorkerClient:
        assert self.client is not None, "the worker has been launched or attached"
        return self.client

    # -- life --------------------------------------------------------------------------------------------------------

    async def launch(self) -> None:
        """Start the server and wait until it is healthy. WorkerError with its own words when it ends."""
        assert self.server is not None
        if self.client:
            await self.client.close()
        self._adapter, self._adapters, self._proof = None, {}, None
        self.server.start()
        self.client = WorkerClient("http://worker", self.server.socket)
        deadline = time.monotonic() + START_S
        while self.server.is_running and time.monotonic() < deadline:
            if await self.api.is_healthy():
                return
            await asyncio.sleep(0.25)
        reason = self.server.last_error() or ("no answer" if self.server.is_running else "it ended")
        await asyncio.to_thread(self.server.stop, True)
        raise WorkerError(f"could not start: {reason}; its output is in {self.server.log}")

    async def attach(self, longest: int, say: Callable[[str], None]) -> None:
        """Wait until a server that was started elsewhere answers, for the timeout at most.

        WorkerError when it does not, is no server for rollouts, or takes sequences shorter than `longest` tokens.
        """
        start, told = time.monotonic(), False
        while True:
            try:
                await self.check()
                break
            except WorkerError as error:
                if error.status or time.monotonic() - start + _AGAIN_S > self._timeout:
                    raise
                if not told:
                    say(f"workers    {self.name} {error}; waiting for it, {self._timeout:g} s at most")
                told = True
            await asyncio.sleep(_AGAIN_S)
        held = await self.api.max_model_len()
        if held < longest:
            raise WorkerError(f"takes sequences of {held} tokens, this run needs {longest}")

    async def check(self) -> None:
        """Raise WorkerError unless the engine itself answers in time."""
        if self.server is not None and not self.server.is_running:
            raise WorkerError("its process ended")
        try:
            await self.api.version(self._timeout)
        except WorkerError as error:
            if error.refused:
                reason = f"is no server for rollouts ({error}): start it with `grpo-lab worker`"
                raise WorkerError(reason, error.status) from None
            raise WorkerError(f"does not answer ({error})", error.status) from None

    async def let_go(self) -> None:
        """Leave an attached server as others can use it: running, without this run's idle adapters."""
        if self.client and not self.server:
            with contextlib.suppress(WorkerError, TimeoutError):
                async with asyncio.timeout(min(self._timeout, GOODBYE_S)):
                    await self.client.resume()
                    await self._unload_idle(but=None)

    async def holds(self, label: str) -> bool:
        """Whether the server says that it has the weights of this label, or has not forgotten the adapter in use."""
        if self._adapter is not None:
            return not self._adapter_lost
        return await self.api.version(self._timeout) == label

    def drop_requests(self) -> None:
        """Let every request that runs here end with WorkerLost."""
        for task in self._tasks:
            task.cancel()

    async def complete(
        self, token_ids: tuple[int, ...], sampling: Mapping[str, Any], versions: Mapping[str, int]
    ) -> Completion | None:
        """A completion under the newest weights this worker has been given; see WorkerClient.generate and WorkerLost."""
        adapter, version = self._adapter, self._adapter_version
        if adapter is None:
            return await self._run(self.api.generate(token_ids, sampling, None, versions))
        self._adapters[adapter] += 1
        try:
            completion = await self._run(self.api.generate(token_ids, sampling, adapter))
            return completion and replace(completion, weight_version=version)
        except WorkerError as error:
            if error.status != _NOT_FOUND:
                raise
            if self._adapter == adapter:
                self._adapter_lost = True
            raise ForeignWeightsError(f"has forgotten the adapter {adapter!r}") from None
        finally:
            if adapter in self._adapters:  # a restarted worker has forgotten it
                self._adapters[adapter] -= 1

    async def _run(self, call: Coroutine[Any, Any, T]) -> T:
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

    async def load_weights(self, push: Push, in_flight: InFlight) -> None:
        """Take the weights of a push. WorkerError when any part of it fails, or the label read back is another.

        A whole model is loaded while generation pauses; while it waits for running requests the engine must go on answering. An
        adapter comes beside those that running requests still use, under a name of its own each time.
        """
        if push.is_adapter:
            await asyncio.wait_for(self._load_adapter(push), RELOAD_S)
            return
        await self.alive_during(self.api.pause(in_flight))
        await asyncio.wait_for(self._reload(push, in_flight), RELOAD_S)
        held = await self.api.version(self._timeout)
        if held != push.label:
            raise WorkerError(f"holds weights {held!r} after {push.label!r} was pushed")

    async def _reload(self, push: Push, in_flight: InFlight) -> None:
        try:
            await self.api.reload(push.folder)
        except WorkerError as error:
            hint = (
                ""
                if self.server
                else "; can it read that folder? rollout.weights_dir must be one that all machines see"
            )
            raise WorkerError(f"cannot load {push.folder}: {error}{hint}") from None
        await self.api.set_version(push.label)
        await self.api.reset_prefix_cache(recompute_running=in_flight == "keep")
        await self.api.resume()

    async def _load_adapter(self, push: Push) -> None:
        self._loads += 1
        name = f"{push.label}-{self._loads}"
        await self.api.load_adapter(name, push.folder)
        self._adapters[name] = 0
        self._adapter, self._adapter_version, self._adapter_lost = name, push.version, False
        await self._unload_idle(but=name)

    async def _unload_idle(self, but: str | None) -> None:
        for name, running in list(self._adapters.items()):
            if name != but and running == 0:
                del self._adapters[name]
                try:
                    await self.api.unload_adapter(name)
                except WorkerError as error:
                    if not error.refused:  # refused: it has forgotten the adapter itself
                        raise

    async def alive_during(self, call: Coroutine[Any, Any, T]) -> T:
        """The result of a call that may take long, as long as the engine answers now and then; else WorkerError."""
        task = asyncio.create_task(call)
        try:
            while not task.done():
                await asyncio.wait({task}, timeout=self._timeout)
                if not task.done():
                    await self.check()
            return await task
        finally:
            task.cancel()

    async def prove(self, canary: Canary) -> tuple[float, float]:
        """Mean and largest |log-prob here - the learner's| over the canary's tokens, nats.

        WorkerError when the mean is over the limit (NaN is), or when nothing moved here since the last canary although the
        learner did: a push that was lost changes log-probs by less than rounding when steps are small.
        """
        own, expected = await (
            self._canary_of_prompt(canary) if self._adapter is None else self._canary_of_sample(canary)
        )
        gaps = [abs(a - b) if a == a else float("inf") for a, b in zip(own, expected, strict=True)]
        mean = sum(gaps) / len(gaps)
        if not mean <= canary.limit:
            raise WorkerError(f"differs from the learner by {mean:.3g} nats per token (limit {canary.limit:g})")
        if self._proof and self._proof[1] == own and self._proof[0] != expected:
            raise WorkerError("gives the very log-probs it gave before the push, though the learner's changed")
        self._proof = (expected, own)
        return mean, max(gaps)

    async def _canary_of_prompt(self, canary: Canary) -> tuple[list[float], tuple[float, ...]]:
        return await self.alive_during(self.api.prompt_logprobs(canary.token_ids)), canary.logprobs

    async def _canary_of_sample(self, canary: Canary) -> tuple[list[float], tuple[float, ...]]:
        """The same from a sampled continuation: vLLM fails on an adapter's prompt log-probs while other requests run."""
        request = GenerationRequest(canary.token_ids, _CANARY_SEED)
        options = sampling_options(request, Sampling(_CANARY_TOKENS))
        completion = await self.alive_during(self.api.generate(canary.token_ids, options, self._adapter, priority=-1))
        if completion is None:
            raise WorkerError("did not finish the canary")
        expected = await asyncio.to_thread(canary.score, canary.token_ids, completion.token_ids)
        return list(completion.logprobs), expected


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
