"""Rollout workers: requests spread by load, weights pushed and proven, the dead and the hung replaced, nothing lost.

Everything here runs in one asyncio loop. A request belongs to the caller until it is answered: a worker that dies only
changes who answers it.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable, Coroutine, Sequence
from dataclasses import replace
from itertools import groupby
from pathlib import Path
from typing import Any

from grpo_lab.config import RolloutConfig
from grpo_lab.errors import RunError
from grpo_lab.rollout.client import WorkerError
from grpo_lab.rollout.engines._vllm_options import sampling_options
from grpo_lab.rollout.worker import Push, Worker, WorkerLost, all_of
from grpo_lab.types import Canary, Completion, GenerationRequest, Sampling

_ERRORS_ALLOWED = 3  # of one request, from workers that go on living
_BEAT_S = 1.0


class Pool:
    """See the module. `say` takes a line for the user.

    Every method raises RunError once no worker is left, with the reason of the last one that went.
    """

    def __init__(self, workers: Sequence[Worker], settings: RolloutConfig, say: Callable[[str], None]) -> None:
        self._workers, self._settings, self._say = list(workers), settings, say
        self._changed = asyncio.Condition()
        self._pushing = asyncio.Lock()
        self._push: Push | None = None
        self._canary: Canary | None = None
        self._failure: RunError | None = None
        self._background: set[asyncio.Task[None]] = set()
        self._summed = False
        self.resent = 0  # requests that a lost worker or an error gave back

    # -- life --------------------------------------------------------------------------------------------------------

    async def start(self, longest: int) -> None:
        """Launch or attach every worker. RunError when a worker of ours cannot start or none of the attached can be used."""
        start = time.monotonic()
        own = [worker for worker in self._workers if worker.server]
        if own:
            self._say(
                f"workers    starting {len(own)} vLLM server{'s' if len(own) > 1 else ''} (half a minute on a CPU)"
            )
        failed = await all_of(self._workers, lambda worker: self._first_start(worker, longest, start))
        for worker, error in failed.items():
            if worker.server:
                raise RunError(f"rollout {worker.name} {error}")
            await self._drop(worker, str(error))
        if self._failure:
            raise self._failure
        for worker in self._workers:
            self._in_background(self._watch(worker))

    async def _first_start(self, worker: Worker, longest: int, start: float) -> None:
        if worker.server:
            await worker.launch()
        else:
            await worker.check(self._settings.worker_timeout_s)
            held = await worker.api.max_model_len()
            if held < longest:
                raise WorkerError(f"takes sequences of {held} tokens, this run needs {longest}")
        worker.up = True
        count = sum(other.up for other in self._workers)
        where = f"{count} of {len(self._workers)} up after {time.monotonic() - start:.0f} s"
        self._say(f"workers    {where}: {worker.name}" + (f" at {worker.api.url}" if worker.server else ""))

    async def close(self) -> None:
        """Stop what was started here, let go of the attached."""
        self._failure = self._failure or RunError("the rollout workers were closed")
        for task in list(self._background):
            task.cancel()
        await asyncio.gather(*self._background, return_exceptions=True)
        await self._announce()
        for worker in self._workers:
            worker.gone, worker.up = True, False
            worker.drop_requests()
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

    # -- sampling ----------------------------------------------------------------------------------------------------

    async def generate(self, requests: Sequence[GenerationRequest], sampling: Sampling) -> list[Completion]:
        """One completion a request, in order. Siblings of a prompt go to one worker, whose prefix cache then has it."""
        tasks = []
        for chunk in self._chunks(requests):
            worker = await self._least_loaded()
            worker.load += len(chunk)
            tasks += [asyncio.create_task(self._complete(request, sampling, worker)) for request in chunk]
        try:
            return list(await asyncio.gather(*tasks))
        finally:
            for task in tasks:
                task.cancel()

    def _chunks(self, requests: Sequence[GenerationRequest]) -> list[list[GenerationRequest]]:
        """Runs of one prompt, cut where they are more than a worker's fair share."""
        share = -(-len(requests) // max(1, sum(worker.up for worker in self._workers)))
        runs = [list(run) for _, run in groupby(requests, key=lambda request: request.prompt_ids)]
        return [run[start : start + share] for run in runs for start in range(0, len(run), share)]

    async def _least_loaded(self) -> Worker:
        """The worker with the fewest requests, as soon as one is up."""
        async with self._changed:
            await self._changed.wait_for(lambda: self._failure or any(worker.up for worker in self._workers))
        if self._failure:
            raise self._failure
        return min((worker for worker in self._workers if worker.up), key=lambda worker: worker.load)

    async def _complete(self, request: GenerationRequest, sampling: Sampling, worker: Worker) -> Completion:
        """Ask until there is an answer; `worker` has been charged with the request already."""
        errors = 0
        while True:
            try:
                completion = await self._ask(request, sampling, worker)
                if completion is not None:
                    return completion
            except WorkerLost:
                self.resent += 1
            except WorkerError as error:
                errors += 1
                if error.refused or errors == _ERRORS_ALLOWED:
                    raise RunError(f"rollout {worker.name} cannot answer: {error}") from None
                self.resent += 1
                await self._examine(worker)
            finally:
                worker.load -= 1
            worker = await self._least_loaded()
            worker.load += 1

    async def _ask(self, request: GenerationRequest, sampling: Sampling, worker: Worker) -> Completion | None:
        push, options = self._push, sampling_options(request, sampling)
        adapter = push.adapter if push else None
        call = worker.api.generate(request.prompt_ids, options, adapter)
        if push is None or adapter is None:
            return await worker.run(call)
        worker.adapters[adapter] += 1
        try:
            completion = await worker.run(call)
            return completion and replace(completion, weight_version=push.version, weight_version_end=None)
        finally:
            if adapter in worker.adapters:  # a restarted worker has forgotten it
                worker.adapters[adapter] -= 1

    # -- weights -----------------------------------------------------------------------------------------------------

    async def push(self, folder: Path, version: int, is_adapter: bool) -> None:
        """Give every worker new weights; one that fails gets them again, then a restart. Returns when one holds them."""
        push = Push(folder, version, f"policy-{version}" if is_adapter else None)
        async with self._pushing:
            failed = await all_of([w for w in self._workers if w.up], lambda worker: self._load(worker, push))
            failed = await all_of(list(failed), lambda worker: self._load(worker, push))
            self._push, self._canary = push, None
        for worker, error in failed.items():
            await self._lose(worker, f"did not take weight version {version} twice ({error})")
        await self._least_loaded()

    async def _load(self, worker: Worker, push: Push) -> None:
        await worker.load_weights(push, self._settings.in_flight, self._settings.worker_timeout_s)

    async def verify(self, canary: Canary) -> dict[str, float]:
        """Compare every worker's log-probs with the learner's; one that disagrees is pushed again, then restarted.

        Returns the largest differences of the workers that are up, in nats, and the pool's counters.
        """
        self._canary = canary
        push = self._push
        assert push is not None and push.version == canary.version, "a canary belongs to the newest push"
        gaps: dict[Worker, tuple[float, float]] = {}

        async def look(worker: Worker) -> None:
            gaps[worker] = await worker.differences(canary, push.adapter)
            if not gaps[worker][0] <= canary.limit:
                raise WorkerError(
                    f"differs from the learner by {gaps[worker][0]:.3g} nats per token (limit {canary.limit:g})"
                )

        async def look_again(worker: Worker) -> None:
            self._say(
                f"warning    rollout {worker.name}: its log-probs are not the learner's; pushing the weights again"
            )
            async with self._pushing:
                await self._load(worker, push)
            await look(worker)

        failed = await all_of([w for w in self._workers if w.up], look)
        failed = await all_of(list(failed), look_again)
        for worker, error in failed.items():
            await self._lose(worker, str(error))
        await self._least_loaded()
        if not self._summed:
            self._summed = True
            self._compare(await self.checksums())
        agreeing = [gap for worker, gap in gaps.items() if worker not in failed]
        return {
            "rollout/canary_mean": max((mean for mean, _ in agreeing), default=0.0),
            "rollout/canary_max": max((largest for _, largest in agreeing), default=0.0),
            "rollout/workers": float(sum(worker.up for worker in self._workers)),
            "rollout/worker_restarts": float(sum(worker.restarts for worker in self._workers)),
            "rollout/requests_resent": float(self.resent),
        }

    def _compare(self, sums: dict[str, dict[str, str]]) -> None:
        """RunError when workers hold different bytes after the first push, which their log-probs may not show."""
        (first, expected), *others = sums.items()
        for name, found in others:
            different = sorted(key for key in expected.keys() | found.keys() if expected.get(key) != found.get(key))
            if different:
                raise RunError(
                    f"rollout {first} and {name} hold different weights after the same push ({len(different)} tensors, first "
                    f"{different[0]}): start them with the same model, dtype and vLLM version"
                )

    async def checksums(self) -> dict[str, dict[str, str]]:
        """Every worker's sha256 by parameter, by the worker's name."""
        up = [worker for worker in self._workers if worker.up]
        return {worker.name: await worker.api.checksums() for worker in up}

    # -- failure -----------------------------------------------------------------------------------------------------

    async def _watch(self, worker: Worker) -> None:
        """Notice a process that ended at once, an engine that hangs after `worker_timeout_s`."""
        last = time.monotonic()
        while not worker.gone:
            await asyncio.sleep(_BEAT_S)
            ended = worker.server is not None and not worker.server.is_running
            due = time.monotonic() - last > self._settings.worker_timeout_s / 2
            if worker.up and not self._pushing.locked() and (ended or due):
                await self._examine(worker)
                last = time.monotonic()

    async def _examine(self, worker: Worker) -> None:
        try:
            await worker.check(self._settings.worker_timeout_s)
        except WorkerError as error:
            await self._lose(worker, str(error))

    async def _lose(self, worker: Worker, reason: str) -> None:
        """Take the worker's requests back; restart it if it is ours."""
        if not worker.up:
            return
        worker.up = False
        worker.drop_requests()
        if worker.server:
            self._in_background(self._restart(worker, reason))
        else:
            await self._drop(worker, reason)

    async def _restart(self, worker: Worker, reason: str) -> None:
        assert worker.server is not None
        while worker.restarts < self._settings.worker_restarts:
            worker.restarts += 1
            self._say(
                f"warning    rollout {worker.name} {reason}: restarting it; its unfinished completions are asked for again"
            )
            await asyncio.to_thread(worker.server.stop, True)
            try:
                await worker.launch()
                async with self._pushing:
                    await self._catch_up(worker)
                    worker.up = True
                self._say(f"workers    {worker.name} is back at {worker.api.url}")
                await self._announce()
                return
            except (WorkerError, TimeoutError) as error:
                reason = str(error)
        await asyncio.to_thread(worker.server.stop, True)
        await self._drop(worker, f"{reason}, after {worker.restarts} restarts")

    async def _catch_up(self, worker: Worker) -> None:
        """The newest push for a fresh worker, and its proof."""
        if self._push:
            await self._load(worker, self._push)
        if self._push and self._canary:
            mean, _ = await worker.differences(self._canary, self._push.adapter)
            if not mean <= self._canary.limit:
                raise WorkerError(
                    f"differs from the learner by {mean:.3g} nats per token (limit {self._canary.limit:g})"
                )

    async def _drop(self, worker: Worker, reason: str) -> None:
        """Go on without a worker, or fail when it was the last."""
        worker.gone = True
        left = sum(not other.gone for other in self._workers)
        if left:
            self._say(f"warning    rollout {worker.name} {reason}: dropped, {left} left")
        else:
            log = f"; its output is in {worker.server.log}" if worker.server and "output is in" not in reason else ""
            self._failure = self._failure or RunError(f"no rollout worker is left: {worker.name} {reason}{log}")
        await self._announce()
