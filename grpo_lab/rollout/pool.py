"""Rollout workers as one sampler: requests spread by load, weights pushed and proven, nothing lost.

A request belongs to the caller until it is answered: a worker that dies only changes who answers it (see crew.py). Everything
here runs in one asyncio loop.
"""

from __future__ import annotations

import asyncio
import uuid
from collections.abc import Callable, Sequence
from dataclasses import replace
from itertools import groupby
from pathlib import Path
from typing import Any

from grpo_lab.config import RolloutConfig
from grpo_lab.errors import RunError
from grpo_lab.rollout.client import WorkerError
from grpo_lab.rollout.crew import GOODBYE_S, Crew
from grpo_lab.rollout.engines._vllm_options import sampling_options
from grpo_lab.rollout.worker import Push, Worker, WorkerLost, all_of
from grpo_lab.types import Canary, Completion, GenerationRequest, Sampling

_ERRORS_ALLOWED = 3  # of one request, from workers that go on living
_ABORTED_S = 0.05  # before a completion that a push aborted is asked for again


class Pool:
    """See the module. `say` takes a line for the user. Every method raises RunError once no worker is left."""

    def __init__(self, workers: Sequence[Worker], settings: RolloutConfig, say: Callable[[str], None]) -> None:
        self._settings, self._say = settings, say
        self._crew = Crew(workers, settings, say, self._catch_up)
        self._push: Push | None = None
        self._canary: Canary | None = None
        self._summed = False
        self._run = f"policy-{uuid.uuid4().hex[:8]}"  # attached servers may hold adapters of other runs
        self._calls: set[asyncio.Task[Any]] = set()
        self.resent = 0  # requests that a lost worker or an error gave back

    async def start(self, longest: int) -> None:
        """Launch or attach every worker; each must take sequences of `longest` tokens. See Crew.start."""
        await self._crew.start(longest)

    async def close(self) -> None:
        """End what is being sampled, stop what was started here, let go of the attached."""
        await self._crew.close(self._end_calls)

    async def _end_calls(self) -> None:
        if self._calls:
            await asyncio.wait(self._calls, timeout=GOODBYE_S)

    # -- sampling ----------------------------------------------------------------------------------------------------

    async def generate(self, requests: Sequence[GenerationRequest], sampling: Sampling) -> list[Completion]:
        """One completion a request, in order. Siblings of a prompt go to one worker, whose prefix cache then has it."""
        tasks: list[asyncio.Task[Completion]] = []
        call = asyncio.current_task()
        assert call is not None
        self._calls.add(call)
        try:
            for chunk in self._chunks(requests):
                worker = await self._crew.least_loaded()
                worker.load += len(chunk)
                tasks += [asyncio.create_task(self._complete(request, sampling, worker)) for request in chunk]
            return list(await asyncio.gather(*tasks))
        finally:
            self._calls.discard(call)
            for task in tasks:
                task.cancel()

    def _chunks(self, requests: Sequence[GenerationRequest]) -> list[list[GenerationRequest]]:
        """Runs of one prompt, cut where they are more than a worker's fair share."""
        share = -(-len(requests) // max(1, len(self._crew.up)))
        runs = [list(run) for _, run in groupby(requests, key=lambda request: request.prompt_ids)]
        return [run[start : start + share] for run in runs for start in range(0, len(run), share)]

    async def _complete(self, request: GenerationRequest, sampling: Sampling, worker: Worker) -> Completion:
        """Ask until there is an answer; `worker` has been charged with the request already."""
        errors = 0
        while True:
            try:
                if worker.up:  # it may have been lost since it was chosen
                    completion = await self._ask(request, sampling, worker)
                    if completion is not None:
                        return completion
                    await asyncio.sleep(_ABORTED_S)
            except WorkerLost:
                self.resent += 1
            except WorkerError as error:
                errors += 1
                if error.refused or errors == _ERRORS_ALLOWED:
                    raise RunError(f"rollout {worker.name} cannot answer: {error}") from None
                self.resent += 1
                await self._crew.examine(worker)
            finally:
                worker.load -= 1
            worker = await self._crew.least_loaded()
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
        push = Push(folder, version, f"{self._run}-{version}" if is_adapter else None)
        async with self._crew.busy:
            failed = await all_of(self._crew.up, lambda worker: self._load(worker, push))
            failed = await all_of(list(failed), lambda worker: self._load(worker, push))
            self._push, self._canary = push, None
            await self._crew.lose_all(failed, f"did not take weight version {version} twice: ")
            await all_of(self._crew.up, lambda worker: worker.forget_adapters(but=push.adapter))
        await self._crew.least_loaded()

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
            gaps[worker] = await worker.differences(canary, push.adapter, self._settings.worker_timeout_s)
            if not gaps[worker][0] <= canary.limit:
                raise WorkerError(
                    f"differs from the learner by {gaps[worker][0]:.3g} nats per token (limit {canary.limit:g})"
                )

        async def look_again(worker: Worker) -> None:
            self._say(
                f"warning    rollout {worker.name}: its log-probs are not the learner's; pushing the weights again"
            )
            async with self._crew.busy:
                await self._load(worker, push)
            await look(worker)

        failed = await all_of(self._crew.up, look)
        failed = await all_of(list(failed), look_again)
        await self._crew.lose_all(failed)
        await self._crew.least_loaded()
        if not self._summed:
            self._summed = True
            self._compare(await self.checksums())
        agreeing = [gap for worker, gap in gaps.items() if worker not in failed]
        return {
            "rollout/canary_mean": max((mean for mean, _ in agreeing), default=0.0),
            "rollout/canary_max": max((largest for _, largest in agreeing), default=0.0),
            "rollout/workers": float(len(self._crew.up)),
            "rollout/worker_restarts": float(self._crew.restarts),
            "rollout/requests_resent": float(self.resent),
        }

    def _compare(self, sums: dict[str, dict[str, str]]) -> None:
        """RunError when workers hold different bytes after the first push, which their log-probs may not show."""
        (first, expected), *others = sums.items() or [("", {})]
        for name, found in others:
            different = sorted(key for key in expected.keys() | found.keys() if expected.get(key) != found.get(key))
            if different:
                raise RunError(
                    f"rollout {first} and {name} hold different weights after the same push ({len(different)} tensors, first "
                    f"{different[0]}): start them with the same model, dtype and vLLM version"
                )

    async def checksums(self) -> dict[str, dict[str, str]]:
        """Every worker's sha256 by parameter, by the worker's name."""
        sums: dict[str, dict[str, str]] = {}

        async def sum_up(worker: Worker) -> None:
            sums[worker.name] = await worker.alive_during(worker.api.checksums(), self._settings.worker_timeout_s)

        for worker, error in (await all_of(self._crew.up, sum_up)).items():
            self._say(f"warning    rollout {worker.name} gives no checksums of its weights: {error}")
        return dict(sorted(sums.items()))

    async def _catch_up(self, worker: Worker) -> None:
        """The newest push for a fresh worker, and its proof."""
        if self._push:
            await self._load(worker, self._push)
        if self._push and self._canary:
            mean, _ = await worker.differences(self._canary, self._push.adapter, self._settings.worker_timeout_s)
            if not mean <= self._canary.limit:
                raise WorkerError(
                    f"differs from the learner by {mean:.3g} nats per token (limit {self._canary.limit:g})"
                )
