"""Rollout workers as one sampler: requests spread by load, weights pushed and proven, nothing lost.

A request belongs to the caller until it is answered: a worker that dies only changes who answers it (see crew.py). Everything
here runs in one asyncio loop.
"""

from __future__ import annotations

import asyncio
import uuid
from collections.abc import Callable, Sequence
from itertools import groupby
from pathlib import Path
from typing import Any

from grpo_lab.config import RolloutConfig
from grpo_lab.errors import RunError
from grpo_lab.rollout.checksums import differing
from grpo_lab.rollout.client import ForeignWeightsError, WorkerError
from grpo_lab.rollout.crew import Crew
from grpo_lab.rollout.vllm_options import sampling_options
from grpo_lab.rollout.worker import GOODBYE_S, Push, Worker, WorkerLost, all_of
from grpo_lab.types import Canary, Completion, GenerationRequest, Sampling

_ERRORS_ALLOWED = 3  # of one request, from workers that go on living
_ABORTED_S = 0.05  # before a completion that a push aborted is asked for again


class Pool:
    """See the module. `say` takes a line for the user. Every method raises RunError once no worker is left."""

    def __init__(self, workers: Sequence[Worker], settings: RolloutConfig, say: Callable[[str], None]) -> None:
        self._settings, self._say = settings, say
        self._crew = Crew(workers, settings, say, self._catch_up)
        self._run = uuid.uuid4().hex[:8]  # attached servers may hold weights of other runs
        self._push: Push | None = None
        self._canary: Canary | None = None
        self._versions = {self._label(0): 0}  # of every label this run gave
        self._summed = False
        self._calls: set[asyncio.Task[Any]] = set()
        self.resent = 0  # requests that a lost worker or an error gave back

    async def start(self, longest: int) -> None:
        """Launch or attach every worker; each must take sequences of `longest` tokens. See Crew.start."""
        await self._crew.start(longest)

    @property
    def has_failed(self) -> bool:
        """Whether no worker is left."""
        return self._crew.has_failed

    async def close(self) -> None:
        """End what is being sampled, stop what was started here, let go of the attached."""
        await self._crew.close(self._end_calls)

    async def _end_calls(self) -> None:
        if self._calls:
            await asyncio.wait(self._calls, timeout=GOODBYE_S)

    def _label(self, version: int) -> str:
        return f"{self._run}-{version}"

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
        options, errors = sampling_options(request, sampling), 0
        while True:
            try:
                if worker.up:  # it may have been lost since it was chosen
                    completion = await worker.complete(request.prompt_ids, options, self._versions)
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
                if isinstance(error, ForeignWeightsError):
                    await self._set_right(worker, error)
                else:
                    await self._crew.examine(worker)
            finally:
                worker.load -= 1
            worker = await self._crew.least_loaded()
            worker.load += 1

    async def _set_right(self, worker: Worker, error: ForeignWeightsError) -> None:
        """Give a worker that holds others' weights this run's again, once for all the requests that noticed."""
        async with self._crew.busy:
            try:
                label = self._push.label if self._push else self._label(0)
                if not worker.up or await worker.holds(label):
                    return
                self._say(f"warning    rollout {worker.name} {error}; giving it the weights again")
                await self._catch_up(worker)
            except (WorkerError, TimeoutError) as second:
                await self._crew.lose(worker, f"{error}, and does not take them again: {second}")

    # -- weights -----------------------------------------------------------------------------------------------------

    async def push(self, folder: Path, version: int, is_adapter: bool) -> None:
        """Give every worker new weights; one that fails gets them again, then a restart. Returns when one holds them."""
        push = Push(folder, version, self._label(version), is_adapter)
        self._versions[push.label] = version
        async with self._crew.busy:
            failed = await all_of(self._crew.up, lambda worker: worker.load_weights(push, self._settings.in_flight))
            failed = await all_of(list(failed), lambda worker: worker.load_weights(push, self._settings.in_flight))
            self._push, self._canary = push, None
            await self._crew.lose_all(failed, f"did not take weight version {version} twice: ")
        await self._crew.least_loaded()

    async def verify(self, canary: Canary) -> dict[str, float]:
        """Have every worker prove that its weights are the learner's; one that does not is pushed again, then restarted.

        Returns the largest differences of the workers that are up, in nats, and the pool's counters. RunError when the bytes of
        two workers, or of a worker and the learner, differ after the first push.
        """
        self._canary = canary
        gaps: dict[Worker, tuple[float, float]] = {}

        async def prove(worker: Worker) -> None:
            gaps[worker] = await worker.prove(canary)

        async def push_and_prove(worker: Worker) -> None:
            async with self._crew.busy:
                await self._give(worker)
                gaps[worker] = await worker.prove(canary)

        failed = await all_of(self._crew.up, prove)
        for worker, error in failed.items():
            self._say(f"warning    rollout {worker.name} {error}; giving it the weights again")
        failed = await all_of(list(failed), push_and_prove)
        await self._crew.lose_all(failed)
        await self._crew.least_loaded()
        if not self._summed:
            self._summed = True
            sums, digests = await self.checksums(), await asyncio.to_thread(canary.digests)
            for line in differing(sums, digests):
                raise RunError(f"rollout {line}: workers need the run's model, dtype and one version of vLLM")
        agreeing = [gap for worker, gap in gaps.items() if worker not in failed]
        return {
            "rollout/canary_mean": max((mean for mean, _ in agreeing), default=0.0),
            "rollout/canary_max": max((largest for _, largest in agreeing), default=0.0),
            "rollout/workers": float(len(self._crew.up)),
            "rollout/worker_restarts": float(self._crew.restarts),
            "rollout/requests_resent": float(self.resent),
        }

    async def checksums(self) -> dict[str, dict[str, str]]:
        """Every worker's sha256 by parameter, by the worker's name; without those that cannot say."""
        sums: dict[str, dict[str, str]] = {}

        async def sum_up(worker: Worker) -> None:
            sums[worker.name] = await worker.alive_during(worker.api.checksums())

        for worker, error in (await all_of(self._crew.up, sum_up)).items():
            self._say(f"warning    rollout {worker.name} gives no checksums of its weights: {error}")
        return dict(sorted(sums.items()))

    async def _catch_up(self, worker: Worker) -> None:
        """Bring a worker, however it was, to the newest weights and have it prove them, if there is a canary."""
        await self._give(worker)
        if self._canary:
            await worker.prove(self._canary)

    async def _give(self, worker: Worker) -> None:
        if self._push is None:
            await worker.api.resume()  # whoever used it before may have left it paused
            await worker.api.set_version(self._label(0))
        else:
            await worker.load_weights(self._push, self._settings.in_flight)
