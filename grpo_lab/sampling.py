"""A few completions of the model a config names, sampled and scored as its run would, without a learner."""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any

from grpo_lab.assemble import build_sampling, check
from grpo_lab.config import Config
from grpo_lab.errors import ConfigError
from grpo_lab.hub import load_tokenizer, resolve_model
from grpo_lab.rollout.collect import Collector, render_prompt
from grpo_lab.rollout.engines import EngineSpec, build_engine
from grpo_lab.tasks import TaskProtocol, load_task, problems_for_step
from grpo_lab.types import Problem, RolloutGroup


@dataclass(frozen=True)
class Sampled:
    """Graded groups, the seconds their sampling took (loading left out), and the tokenizer they were made with."""

    groups: list[RolloutGroup]
    seconds: float
    tokenizer: Any


def sample_few(config: Config, problems: int, samples: int, heldout: bool, say: Callable[[str], None]) -> Sampled:
    """`samples` completions of each of `problems` problems by the model itself, which nothing has trained.

    Of the training problems they are the first that the run's first step samples, with its seeds; of the held-out ones those
    that its evaluations sample, at temperature 1. ConfigError for what a run would refuse too, before the engine loads.
    """
    check(config)
    if config.rollout.urls:
        raise ConfigError(
            "rollout.urls: attached workers may hold weights of a run, and only a learner can tell; add --set rollout.urls=[]"
        )
    chosen = _problems(config, load_task(config.data), problems, heldout)
    base = resolve_model(config.model)
    tokenizer = load_tokenizer(base, config.model.trust_remote_code)
    sampling = build_sampling(config, base, tokenizer)
    if heldout:
        sampling = replace(sampling, temperature=1.0, top_p=1.0)
    for problem in chosen.problems:
        render_prompt(tokenizer, problem, config.rollout.max_prompt_tokens)
    say(f"loading    {config.model.place} and the {config.rollout.engine_name} engine")
    engine = build_engine(EngineSpec(base, config.model, config.rollout, say))
    try:
        collector = Collector(engine, tokenizer, chosen.task.grade, config.seed, config.rollout.max_prompt_tokens)
        start = time.monotonic()
        groups = collector.collect(chosen.problems, samples, sampling, ("evaluation",) if heldout else ("rollout", 0))
        return Sampled(groups, time.monotonic() - start, tokenizer)
    finally:
        engine.close()


@dataclass(frozen=True)
class _Chosen:
    task: TaskProtocol
    problems: list[Problem]


def _problems(config: Config, task: TaskProtocol, count: int, heldout: bool) -> _Chosen:
    source = task.heldout if heldout else task.train
    if count > len(source):
        raise ConfigError(
            f"--num {count}, but task {config.data.task!r} has {len(source)} {'held-out' if heldout else 'training'} problems: "
            "ask for fewer"
        )
    return _Chosen(task, list(source[:count]) if heldout else problems_for_step(source, config.seed, 0, count))
