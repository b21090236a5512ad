"""Batches sampled ahead of the learner, never more than `max_staleness` pushes behind when they are trained on."""

from __future__ import annotations

import time
from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass
from types import TracebackType
from typing import Generic, TypeVar

T = TypeVar("T")


@dataclass(frozen=True)
class SamplingTimes:
    """Seconds: sampling the batch took `generate`; the learner waited `wait_rollouts` for it; before, nothing was being sampled
    for `wait_learner` because the learner had not pushed. `ahead`: it was begun before the learner asked."""

    generate: float
    wait_rollouts: float
    wait_learner: float
    ahead: bool = False

    @property
    def overlap(self) -> float:
        """The share of the batch's sampling that ran while the learner did something else."""
        return max(0.0, 1 - self.wait_rollouts / self.generate) if self.generate > 0 else 0.0


class BatchesAhead(Generic[T]):
    """`collect(step)` makes the batch of a step; steps are taken in order and none is skipped, whoever is slow.

    After push v the batches of steps up to v + max_staleness may be sampled, so that the batch trained at step s was begun with
    weights of version s - max_staleness or newer. With 0 every batch is made in the caller's thread when it is taken.
    """

    def __init__(self, collect: Callable[[int], T], max_staleness: int, end: int) -> None:
        self._collect, self._staleness, self._end = collect, max_staleness, end
        self._threads = ThreadPoolExecutor(max_staleness + 1, "sampling") if max_staleness else None
        self._futures: dict[int, Future[tuple[T, float, float]]] = {}
        self._last_finish = time.perf_counter()

    def __enter__(self) -> BatchesAhead[T]:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if self._threads:
            self._threads.shutdown(wait=False, cancel_futures=True)

    def allow(self, version: int) -> None:
        """Weights of `version` are in the sampler: begin the batches they allow."""
        if self._threads:
            for step in range(version, min(version + self._staleness + 1, self._end)):
                if step not in self._futures:
                    self._futures[step] = self._threads.submit(self._timed, step)

    def take(self, step: int) -> tuple[T, SamplingTimes]:
        """The batch of `step` (`allow` has been called up to it); what went wrong in its sampling is raised here."""
        asked = time.perf_counter()
        future = self._futures.pop(step, None)
        batch, begun, finished = future.result() if future else self._timed(step)
        idle = max(0.0, begun - self._last_finish)
        self._last_finish = max(self._last_finish, finished)
        return batch, SamplingTimes(finished - begun, time.perf_counter() - asked, idle, future is not None)

    def _timed(self, step: int) -> tuple[T, float, float]:
        begun = time.perf_counter()
        return self._collect(step), begun, time.perf_counter()
