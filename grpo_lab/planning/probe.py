"""How long a run will take, from some seconds of it: a batch is sampled, measured, put through a backward; nothing is kept."""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch

from grpo_lab.assemble import Parts, assemble
from grpo_lab.config import Config
from grpo_lab.console import Console
from grpo_lab.learner.collate import collate
from grpo_lab.planning.plan import checkpoint_steps
from grpo_lab.tasks import problems_for_step
from grpo_lab.types import RolloutGroup, TrainBatch

_SECONDS = 5.0  # of sampling, and of the learner's work, about


@dataclass(frozen=True)
class Speeds:
    """What was measured: seconds of a completion in each part of a step, of a push, and tokens of a completion on average."""

    length: float
    sampling: float
    logprobs: float
    update: float
    push: float
    completions: int


@dataclass(frozen=True)
class Estimate:
    """Seconds of the parts of a step, of a whole one, of an evaluation and of the run."""

    sampling: float
    logprobs: float
    update: float
    push: float
    step: float
    evaluation: float
    run: float


def probe(config: Config, console: Console) -> None:
    """Load what the run loads, measure, print the estimate. Errors are those of a training."""
    start = time.monotonic()
    parts = assemble(config, say=console.say)
    try:
        loading = time.monotonic() - start
        speeds = measure(parts)
    finally:
        parts.close()
    for line in lines(config, speeds, estimate(config, speeds), loading):
        console.say(line)


def measure(parts: Parts) -> Speeds:
    """One group first, which also warms up, then as many as fit in the time, at most a step's."""
    parts.push_weights(0)
    first, spent = _timed(lambda: _sample(parts, 1))
    groups, sampling = _timed(lambda: _sample(parts, _fitting(parts.config, spent)))
    push = _timed(lambda: parts.push_weights(1))[1]
    spent = _timed(lambda: _learn(parts, first))[1]
    batches = groups[: _fitting(parts.config, spent)]
    (logprobs, update), trained = _learn(parts, batches), sum(len(group.completions) for group in batches)
    lengths = [len(completion.token_ids) for group in groups for completion in group.completions]
    return Speeds(
        length=sum(lengths) / len(lengths),
        sampling=sampling / len(lengths),
        logprobs=logprobs / trained,
        update=update / trained,
        push=push,
        completions=len(lengths),
    )


def _fitting(config: Config, seconds_of_one: float) -> int:
    return max(1, min(config.prompts_per_step, int(_SECONDS / seconds_of_one)))


def _sample(parts: Parts, prompts: int) -> list[RolloutGroup]:
    problems = problems_for_step(parts.task.train, parts.config.seed, 0, parts.config.prompts_per_step)[:prompts]
    return parts.collector.collect(problems, parts.config.group_size, parts.sampling, ("probe",))


def _learn(parts: Parts, groups: list[RolloutGroup]) -> tuple[float, float]:
    """Seconds of the log-probs under policy and reference, and of a backward over the whole batch."""
    batch, logprobs = _timed(lambda: parts.learner.annotate(collate(groups)))
    return logprobs, _timed(lambda: _backward(parts, batch))[1]


def _backward(parts: Parts, batch: TrainBatch) -> None:
    advantages = torch.linspace(-1, 1, batch.tokens.num_sequences)
    parts.learner.flat_gradient(batch, advantages, batch.old_logprobs.clone())


def _timed(work: Callable[[], Any]) -> tuple[Any, float]:
    start = time.perf_counter()
    result = work()
    if torch.cuda.is_available():
        torch.cuda.synchronize()
    return result, time.perf_counter() - start


def estimate(config: Config, speeds: Speeds) -> Estimate:
    """A step's parts one after the other, or where sampling runs ahead the longer of sampling and learning; an evaluation is
    as many completions sampled, and their log-probs under both models; that of step 0 is the reference's and one more."""
    count, settings = config.rollouts_per_step, config.evaluation
    sampling, logprobs = speeds.sampling * count, speeds.logprobs * count
    update = speeds.update * count * config.learner.passes
    learning = logprobs + update + speeds.push
    step = max(sampling, learning) if config.rollout.max_staleness else sampling + learning
    evaluation = (speeds.sampling + speeds.logprobs) * settings.problems * settings.samples if settings.enabled else 0.0
    steps = config.total_rollouts // count
    run = steps * step + (len(checkpoint_steps(config)) + 1) * evaluation
    return Estimate(sampling, logprobs, update, speeds.push, step, evaluation, run)


def lines(config: Config, speeds: Speeds, found: Estimate, loading: float) -> list[str]:
    steps, evaluated = config.total_rollouts // config.rollouts_per_step, config.evaluation.enabled
    tests = f", {len(checkpoint_steps(config)) + 1} evaluations of {clock(found.evaluation)}" if evaluated else ""
    return [
        f"probe      {speeds.completions} completions of {speeds.length:.0f} tokens on average, loading {clock(loading)}; "
        f"sampling {speeds.length / speeds.sampling:,.0f} tokens/s, log-probs {speeds.length / speeds.logprobs:,.0f}, update "
        f"{speeds.length / speeds.update:,.0f}",
        f"time       about {clock(found.run)}: {steps:,} steps of {clock(found.step)} (sampling {clock(found.sampling)}, "
        f"log-probs {clock(found.logprobs)}, update {clock(found.update)}, push {clock(found.push)}){tests}; completions that "
        "grow take longer",
    ]


def clock(seconds: float) -> str:
    """Seconds in words: 0.4 s, 31 s, 9 min, 3.5 h, 2.1 days."""
    for size, unit in ((86400, "days"), (3600, "h"), (60, "min")):
        if seconds >= 2 * size:
            return f"{seconds / size:.1f} {unit}"
    return f"{seconds:.0f} s" if seconds >= 10 else f"{seconds:.1f} s"
