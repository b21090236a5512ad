"""Engines: one file = one way to sample. A file here that defines `EngineImpl` is an engine by its name.

`generate` is a pure function of (weights, requests, sampling): seeds come with the requests, nothing is remembered.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Protocol

from grpo_lab import plugins
from grpo_lab.config import ModelConfig, RolloutConfig
from grpo_lab.types import Completion, GenerationRequest, Sampling


@dataclass(frozen=True)
class EngineSpec:
    """What an engine needs to start: the base model's local folder and the limits of a sequence."""

    model_path: Path
    model: ModelConfig
    rollout: RolloutConfig
    say: Callable[[str], None] = field(default=lambda text: None, compare=False)  # one line to the user

    @property
    def max_model_len(self) -> int:
        return self.rollout.max_prompt_tokens + self.rollout.max_new_tokens


class Engine(Protocol):
    """Samples completions with the newest weights it was given. Constructed as `EngineImpl(spec: EngineSpec)`.

    Two things more an engine may have: a class attribute `concurrent = True`, when it can sample while the learner trains and
    from several threads (asked for by `rollout.max_staleness`), and `verify(canary) -> metrics`, called after each push, which
    proves that every copy of the weights is the learner's.
    """

    def generate(self, requests: Sequence[GenerationRequest], sampling: Sampling) -> list[Completion]:
        """One completion a request, in order. `text` is left to the caller's tokenizer and is empty here."""
        ...

    def load_weights(self, folder: Path, version: int) -> None:
        """Take the weights of `folder` (safetensors of the whole model); later completions carry `version`."""
        ...

    def close(self) -> None:
        """Release memory and processes; safe to call twice."""
        ...


def build_engine(spec: EngineSpec) -> Engine:
    """The engine the configuration names; ConfigError when it is unknown or its package is missing."""
    engine: Engine = find_engine(spec.rollout.engine_name)(spec)
    return engine


def find_engine(name: str) -> Callable[[EngineSpec], Engine]:
    """The class of the engine `name`; ConfigError when there is none."""
    return plugins.load("grpo_lab.rollout.engines", name, "EngineImpl")  # type: ignore[no-any-return]
