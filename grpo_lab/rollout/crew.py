"""The workers of a pool and their lives: started, watched, lost, restarted, dropped. Knows nothing of weights or completions.

Everything here runs in one asyncio loop.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Awaitable, Callable, Coroutine, Mapping, Sequence
from typing import Any

from grpo_lab.config import RolloutConfig
from grpo_lab.errors import RunError, counted
from grpo_lab.rollout.client import WorkerError
from grpo_lab.rollout.worker import Worker

_BEAT_S = 1.0


class Crew:
    """See the module. `say` takes a line for the user; `catch_up` prepares a new or restarted worker before it is used.

    While `busy` is locked (a push is under way) nobody is examined. Methods raise RunError once no worker is left, with the
    reason of the last one that went.
    """

    def __init__(
        self,
        workers: Sequence[Worker],
        settings: RolloutConfig,
        say: Callable[[str], None],
        catch_up: Callable[[Worker], Awaitable[object]],
    ) -> None:
        self._workers, self._settings, self.say, self._catch_up = list(workers), settings, say, catch_up
        self.busy = asyncio.Lock()
        self._changed = asyncio.Condition()
        self._failure: RunError | None = None
        self._begun = False
        self._background: set[asyncio.Task[None]] = set()

    @property
    def up(self) -> list[Worker]:
        """The workers that take requests now."""
        return [worker for worker in self._workers if worker.up]

    @property
    def has_failed(self) -> bool:
        """Whether no worker is left."""
        return self._failure is not None

    @property
    def restarts(self) -> int:
        return sum(worker.restarts for worker in self._workers)

    async def start(self, longest: int) -> None:
        """Launch or attach every worker. RunError when a worker of ours cannot start or none of the attached can be used."""
        start = time.monotonic()
        own = [worker for worker in self._workers if worker.server]
        if own:
            self.say(f"workers    starting {counted(len(own), 'vLLM server')} (half a minute on a CPU)")
        try:
            async with asyncio.TaskGroup() as group:
                for worker in self._workers:
                    group.create_task(self._first_start(worker, longest, start))
        except ExceptionGroup as errors:
            raise errors.exceptions[0] from None
        if self._failure:
            raise self._failure
        self._begun = True
        for worker in self._workers:
            self._in_background(self._watch(worker))

    async def _first_start(self, worker: Worker, longest: int, start: float) -> None:
        try:
            if worker.server:
                await worker.launch()
            else:
                await worker.attach(longest, self.say)
            await self._catch_up(worker)
        except WorkerError as error:
            if worker.server:
                raise RunError(f"rollout {worker.name} {error}") from None
            return await self._drop(worker, str(error))
        worker.up = True
        count = sum(other.up for other in self._workers)
        where = f"{count} of {len(self._workers)} up after {time.monotonic() - start:.0f} s"
        self.say(f"workers    {where}: {worker.name}")

    async def close(self, ended: Callable[[], Awaitable[None]]) -> None:
        """Stop what was started here, let go of the attached, once what waits for them has `ended`."""
        self._failure = self._failure or RunError("the rollout workers were closed")
        for worker in self._workers:  # nobody is restarted from here on
            worker.gone, worker.up = True, False
            worker.drop_requests()
        for task in list(self._background):
            task.cancel()
        await asyncio.gather(*self._background, return_exceptions=True)
        await self._announce()
        await ended()
        await asyncio.gather(*(worker.let_go() for worker in self._workers))
        servers = [worker.server for worker in self._workers if worker.server]
        await asyncio.gather(*(asyncio.to_thread(server.stop) for server in servers))
        for worker in self._workers:
            if worker.client:
                await worker.client.close()

    def _in_background(self, work: Coroutine[Any, Any, None]) -> None:
        task = asyncio.create_task(work)
        self._background.add(task)
        task.add_done_callback(self._background.discard)

    async def _announce(self) -> None:
        async with self._changed:
            self._changed.notify_all()

    async def least_loaded(self) -> Worker:
        """The worker with the fewest requests, as soon as one is up."""
        async with self._changed:
            await self._changed.wait_for(lambda: self._failure or any(worker.up for worker in self._workers))
        if self._failure:
            raise self._failure
        return min((worker for worker in self._workers if worker.up), key=lambda worker: worker.load)

    async def _watch(self, worker: Worker) -> None:
        """Notice a process that ended at once, an engine that hangs after `worker_timeout_s`."""
        last = time.monotonic()
        while not worker.gone:
            await asyncio.sleep(_BEAT_S)
            ended = worker.server is not None and not worker.server.is_running
            due = time.monotonic() - last > self._settings.worker_timeout_s / 2
            if worker.up and not self.busy.locked() and (ended or due):
                await self.examine(worker)
                last = time.monotonic()

    async def examine(self, worker: Worker) -> None:
        try:
            await worker.check()
        except WorkerError as error:
            await self.lose(worker, str(error))

    async def lose(self, worker: Worker, reason: str) -> None:
        """Take the worker's requests back; restart it if it is ours."""
        await self.lose_all({worker: reason})

    async def lose_all(self, failed: Mapping[Worker, object], what: str = "") -> None:
        """Lose several workers, each with its reason; none of them gets the requests of another."""
        lost = {worker: f"{what}{reason}" for worker, reason in failed.items() if worker.up}
        for worker in lost:
            worker.up = False
            worker.drop_requests()
        for worker, reason in lost.items():
            if worker.server:
                self._in_background(self._restart(worker, reason))
            else:
                await self._drop(worker, reason)

    async def _restart(self, worker: Worker, reason: str) -> None:
        assert worker.server is not None
        while worker.restarts < self._settings.worker_restarts and not worker.gone:
            worker.restarts += 1
            self.say(
                f"warning    rollout {worker.name} {reason}: restarting it; its unfinished completions are asked for again"
            )
            await asyncio.to_thread(worker.server.stop, True)
            try:
                await worker.launch()
                async with self.busy:
                    await self._catch_up(worker)
                    worker.up = True
                self.say(f"workers    {worker.name} is back")
                await self._announce()
                return
            except Exception as error:  # whatever it is, requests must not wait for this worker
                reason = str(error) or type(error).__name__
        await asyncio.to_thread(worker.server.stop, True)
        await self._drop(worker, f"{reason}, after {worker.restarts} restarts")

    async def _drop(self, worker: Worker, reason: str) -> None:
        """Go on without a worker, or fail when it was the last."""
        worker.gone = True
        await worker.let_go()
        left = sum(not other.gone for other in self._workers)
        if left:
            self.say(f"warning    rollout {worker.name} {reason}: dropped, {left} left")
        else:
            log = f"; its output is in {worker.server.log}" if worker.server and "output is in" not in reason else ""
            none = "no rollout worker is left" if self._begun else "no rollout worker can be used"
            self._failure = self._failure or RunError(f"{none}: {worker.name} {reason}{log}")
        await self._announce()
