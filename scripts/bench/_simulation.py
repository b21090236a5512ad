"""Learner and workers as a discrete-event simulation: the rules of grpo_lab's rollout side, any rates, no hardware.

The rules: after push v the batches of steps up to v + max_staleness are handed out (ahead.py), in chunks of one prompt to the
worker with the fewest requests (pool.py); a worker runs `concurrency` of them at once and queues the rest in order; a push
pauses every worker as `in_flight` says, queued requests begin after it with the new weights. Not modelled: prefill of
prompts, grading, failures, dropped groups. An aborted completion starts over on its own worker.
"""

from __future__ import annotations

import heapq
import math
from collections import Counter, deque
from collections.abc import Sequence
from dataclasses import dataclass

import numpy
from numpy.typing import NDArray

Floats = NDArray[numpy.float64]
Integers = NDArray[numpy.int64]


@dataclass(frozen=True)
class Workload:
    """A step's batch, and completion lengths: log-normal of `mean_length` and coefficient of variation, cut at the limit."""

    prompts_per_step: int
    group_size: int
    prompt_tokens: int
    mean_length: float
    variation: float
    max_new_tokens: int

    @property
    def rollouts(self) -> int:
        return self.prompts_per_step * self.group_size

    def lengths(self, steps: int, seed: int) -> Integers:
        """[steps, rollouts] completion tokens; the cut makes their mean a little smaller than `mean_length`."""
        spread = math.sqrt(math.log1p(self.variation**2))
        center = math.log(self.mean_length) - spread**2 / 2
        drawn = numpy.random.default_rng(seed).lognormal(center, spread, (steps, self.rollouts))
        return numpy.clip(numpy.rint(drawn), 1, self.max_new_tokens).astype(numpy.int64)


@dataclass(frozen=True)
class Rates:
    """Of one worker with n running sequences `peak` n / (n + half) tokens/s in all; of the whole learner, tokens/s.

    `push_seconds` a worker pauses for new weights; `recompute` tokens/s rebuild the cache of sequences kept over a push.
    """

    peak: float
    half: float
    concurrency: int
    learner: float
    push_seconds: float
    recompute: float = math.inf

    def decoding(self, running: float) -> float:
        """Tokens/s of one worker."""
        return self.peak * running / (running + self.half)


@dataclass(frozen=True)
class System:
    """Who works, and how far apart they may get."""

    workers: int
    rates: Rates
    max_staleness: int
    in_flight: str = "wait"  # or keep, abort


@dataclass(frozen=True)
class Outcome:
    """Seconds of every step [steps], and the staleness of every completion when it was trained on [steps, rollouts].

    The learner waited `wait` for the batch, whose sampling took `generate`; it worked for `learn`, and its push took `push`,
    running sequences included. `decoding` are worker-seconds with at least one sequence running. `finishes` counts how often
    every completion was finished, `ended` is the clock after every push.
    """

    wait: Floats
    generate: Floats
    learn: Floats
    push: Floats
    ended: Floats
    decoding: Floats
    staleness: Integers
    finishes: Integers
    workers: int

    def summary(self, first: int, end: int) -> dict[str, float]:
        """Means over the steps from `first` up to `end`; `overlap` as grpo_lab logs it (perf/overlap)."""
        part = slice(first, end)
        began = self.ended[first - 1] if first else 0.0
        seconds = float(self.ended[end - 1] - began)
        overlap = numpy.maximum(0, 1 - self.wait[part] / self.generate[part])
        return {
            "rollouts_per_second": self.staleness[part].size / seconds,
            "step_seconds": seconds / (end - first),
            "learner_idle": 1 - float(self.learn[part].sum()) / seconds,
            "worker_idle": 1 - float(self.decoding[part].sum()) / (self.workers * seconds),
            "wait_seconds": float(self.wait[part].mean()),
            "overlap": float(overlap.mean()),
            "staleness": float(self.staleness[part].mean()),
        }


def simulate(system: System, lengths: Integers, group_size: int, prompt_tokens: int = 0) -> Outcome:
    """Train on every row of `lengths` [steps, rollouts] in turn; the learner runs each prompt once a group."""
    steps, rollouts = lengths.shape
    rates, behind = system.rates, system.max_staleness
    tokens = lengths.sum(axis=1) + prompt_tokens * (rollouts // group_size)
    record = _Record(lengths.ravel().tolist(), rollouts, prompt_tokens)
    workers = [_Worker(rates, record) for _ in range(system.workers)]
    series: dict[str, list[float]] = {name: [] for name in ("wait", "generate", "learn", "push", "ended", "decoding")}
    begun, now, handed, decoded = [0.0] * steps, 0.0, 0, 0.0
    for step in range(steps):
        for allowed in range(handed, min(step + behind + 1, steps)):
            begun[allowed] = now
            _hand_out(workers, range(allowed * rollouts, (allowed + 1) * rollouts), group_size)
            handed = allowed + 1
        for worker in workers:
            worker.finish(step)
        finished = max(record.finished[step * rollouts : (step + 1) * rollouts])
        asked, now = now, max(now, finished)
        learn = float(tokens[step]) / rates.learner
        pushed = max(worker.push(now + learn, step + 1, system.in_flight) for worker in workers)
        for worker in workers:
            worker.advance(pushed)
        total = sum(worker.busy for worker in workers)
        values = (now - asked, finished - begun[step], learn, pushed - now - learn, pushed, total - decoded)
        for name, value in zip(series, values, strict=True):
            series[name].append(value)
        now, decoded = pushed, total
    version = numpy.array(record.version).reshape(steps, rollouts)
    staleness = numpy.arange(steps)[:, None] - version
    finishes = numpy.array(record.finishes).reshape(steps, rollouts)
    arrays = {name: numpy.array(values) for name, values in series.items()}
    return Outcome(**arrays, staleness=staleness, finishes=finishes, workers=system.workers)


def learner_speed_up(gpus: int, groups: int, loss: float) -> float:
    """Of `gpus` over one, with `groups` an update: an update ends with the GPU that has the most of them; each doubling of
    those that work loses the share `loss`."""
    shared = max(1, groups) / math.ceil(max(1, groups) / gpus)
    return shared * (1 - loss) ** math.log2(shared)


def candidates(gpus: int, fewest: int, size: int, most: int) -> list[tuple[int, int]]:
    """(learner GPUs, workers of `size`): about 32 evenly spread splits of `gpus` with `fewest` to `most` learner GPUs."""
    counts = {max(1, round(gpus * part / 32) // size) for part in range(1, 32)} | {max(1, (gpus - most) // size)}
    splits = {(min(gpus - size * workers, most), workers) for workers in counts}
    return sorted(split for split in splits if split[0] >= max(1, fewest))


def _hand_out(workers: Sequence[_Worker], requests: range, group_size: int) -> None:
    """Siblings go to one worker, the one with the fewest requests, cut where they are more than a fair share."""
    share = -(-len(requests) // len(workers))
    loads = [(worker.load, index) for index, worker in enumerate(workers)]
    heapq.heapify(loads)
    for first in range(requests.start, requests.stop, group_size):
        for start in range(first, first + group_size, share):
            chunk = range(start, min(start + share, first + group_size))
            load, index = loads[0]
            heapq.heapreplace(loads, (load + len(chunk), index))
            workers[index].take(chunk)
    for worker in workers:
        worker.admit()


class _Record:
    """What is known of every completion, by its number; a step has `rollouts` of them."""

    def __init__(self, lengths: list[int], rollouts: int, prompt_tokens: int) -> None:
        self.lengths, self.rollouts, self.prompt_tokens = lengths, rollouts, prompt_tokens
        self.version = [-1] * len(lengths)
        self.finished = [math.inf] * len(lengths)
        self.finishes = [0] * len(lengths)


class _Worker:
    """Processor sharing: every running sequence has been given `given` tokens more than when the worker was empty at first.

    So a sequence ends when `given` reaches what it was at its start plus its length, whatever else came and went.
    """

    def __init__(self, rates: Rates, record: _Record) -> None:
        self._rates, self._record = rates, record
        self._now = self._given = self.busy = 0.0
        self._running: list[tuple[float, int]] = []  # heap of (`given` at its end, number)
        self._waiting: deque[int] = deque()
        self._left: Counter[int] = Counter()  # by step: handed out and not finished
        self._version = 0

    @property
    def load(self) -> int:
        return len(self._running) + len(self._waiting)

    def take(self, chunk: range) -> None:
        """Queue completions of one step."""
        self._waiting.extend(chunk)
        self._left[chunk.start // self._record.rollouts] += len(chunk)

    def admit(self) -> None:
        """Begin what is waiting as far as there is room."""
        while self._waiting and len(self._running) < self._rates.concurrency:
            number = self._waiting.popleft()
            self._record.version[number] = self._version
            heapq.heappush(self._running, (self._given + self._record.lengths[number], number))

    def advance(self, until: float) -> None:
        """Decode up to the time `until`."""
        while self._running:
            wanted = (self._running[0][0] - self._given) * self._seconds_per_token()
            if self._now + wanted > until:
                break
            self._finish_next(wanted)
            self.admit()
        if until > self._now and self._running:
            self._given += (until - self._now) / self._seconds_per_token()
            self.busy += until - self._now
        self._now = max(self._now, until)

    def finish(self, step: int) -> None:
        """Decode until nothing of `step` is left here."""
        while self._left[step]:
            self._finish_next((self._running[0][0] - self._given) * self._seconds_per_token())
            self.admit()

    def push(self, now: float, version: int, in_flight: str) -> float:
        """Take weights that come at `now`; returns when decoding goes on."""
        self.advance(now)
        if in_flight == "wait":
            while self._running:
                self._finish_next((self._running[0][0] - self._given) * self._seconds_per_token())
        elif in_flight == "abort":
            self._waiting.extendleft(sorted((number for _, number in self._running), reverse=True))
            self._running.clear()
        lengths, cached = self._record.lengths, len(self._running) * self._record.prompt_tokens
        cached_tokens = cached + sum(lengths[number] - (end - self._given) for end, number in self._running)
        self._now += self._rates.push_seconds + cached_tokens / self._rates.recompute
        self._version = version
        self.admit()
        return self._now

    def _seconds_per_token(self) -> float:
        """Of each running sequence."""
        return (len(self._running) + self._rates.half) / self._rates.peak

    def _finish_next(self, seconds: float) -> None:
        self._now += seconds
        self.busy += seconds
        self._given, number = heapq.heappop(self._running)
        self._record.finished[number] = self._now
        self._record.finishes[number] += 1
        self._left[number // self._record.rollouts] -= 1
