"""The run's configuration as frozen pydantic models. Imports no torch; file.py reads and writes it.

The defaults are the GSM8K experiment with Qwen2.5-0.5B-Instruct. Axes left at null come from `--method` and `--recipe`
(see methods.py).
"""

from __future__ import annotations

from typing import Literal

from pydantic import Field

from grpo_lab.config.sections import (
    AdvantageName,
    AggregateName,
    CorrectionName,
    DataConfig,
    EvaluationConfig,
    KLName,
    LearnerConfig,
    Level,
    ModelConfig,
    ObjectiveConfig,
    OldPolicy,
    RolloutConfig,
    Section,
    TrackingConfig,
)
from grpo_lab.errors import ConfigError
from grpo_lab.paths import cache_folder, expand_path

__all__ = [
    "AdvantageName",
    "AggregateName",
    "Config",
    "CorrectionName",
    "DataConfig",
    "EvaluationConfig",
    "KLName",
    "LearnerConfig",
    "Level",
    "ModelConfig",
    "ObjectiveConfig",
    "OldPolicy",
    "RolloutConfig",
    "TrackingConfig",
    "cache_folder",
    "check_batch_algebra",
    "expand_path",
]

_MOST_CHECKPOINTS = 100_000


class Config(Section):
    """A whole run. `total_rollouts` is authoritative: groups, steps, epochs and checkpoints follow (see `BatchAlgebra`)."""

    method: str = "grpo"
    """A method of `grpo-lab list`: a row over the axes in `objective`."""
    recipe: Literal["free_energy", "paper"] = "free_energy"
    """free_energy sets the axes so that the loss descends F; paper takes what the method's paper says."""
    beta: float = Field(0.05, gt=0)
    """Temperature of F = -E[r] + beta KL(pi || pi_ref), in units of reward a nat."""
    seed: int = Field(0, ge=0)
    """Every random choice derives from it."""
    group_size: int = Field(32, ge=2)
    """Completions of one prompt (G)."""
    prompts_per_step: int = Field(32, ge=1)
    """Prompts of one step; it samples prompts_per_step x group_size completions."""
    total_rollouts: int = Field(262_144, ge=1)
    """Completions of the whole run, a multiple of those of one step."""
    checkpoint_every: int = Field(32_768, ge=1)
    """Rollouts from one checkpoint and evaluation to the next, a multiple of those of one step."""
    keep_last: int = Field(0, ge=0)
    """The newest checkpoints to keep; 0 = all."""
    keep_every: int = Field(0, ge=0)
    """With keep_last, also keep those at multiples of this many rollouts; 0 = none."""
    output_dir: str = "runs"
    """Folder of the run's folder; `~` and `$VARIABLES` are replaced."""
    run_name: str | None = None
    """Name of the run's folder; null = method, beta and the time."""
    model: ModelConfig = ModelConfig()
    """The policy."""
    data: DataConfig = DataConfig()
    """The task and its problems."""
    rollout: RolloutConfig = RolloutConfig()
    """Sampling of completions."""
    objective: ObjectiveConfig = ObjectiveConfig()
    """The axes of the loss; null = what method and recipe say."""
    learner: LearnerConfig = LearnerConfig()
    """The optimizer and how a batch is run."""
    evaluation: EvaluationConfig = EvaluationConfig()
    """Free-energy evaluations."""
    tracking: TrackingConfig = TrackingConfig()
    """What is recorded beside metrics.jsonl."""

    @property
    def rollouts_per_step(self) -> int:
        return self.prompts_per_step * self.group_size


def check_batch_algebra(config: Config) -> None:
    """Refuse counts that do not divide: every step is whole, every checkpoint falls on a step."""
    step = config.rollouts_per_step
    for key in ("total_rollouts", "checkpoint_every"):
        value = getattr(config, key)
        if value % step:
            near = max(step, round(value / step) * step)
            raise ConfigError(
                f"{key}={value} is not a multiple of prompts_per_step x group_size = "
                f"{config.prompts_per_step} x {config.group_size} = {step}: use for example {key}={near}"
            )
    if config.prompts_per_step % config.learner.mini_batches:
        raise ConfigError(
            f"learner.mini_batches={config.learner.mini_batches} does not divide prompts_per_step="
            f"{config.prompts_per_step}: groups are never split over mini-batches; choose a divisor"
        )
    if config.evaluation.enabled and config.evaluation.problems > config.data.heldout_problems:
        raise ConfigError(
            f"evaluation.problems={config.evaluation.problems} but only data.heldout_problems="
            f"{config.data.heldout_problems} are held out: lower the first or raise the second"
        )
    _check_checkpoints(config)


def _check_checkpoints(config: Config) -> None:
    """Refuse more checkpoints than anybody wants, and a choice of which to keep that keeps none or all."""
    every, kept = config.checkpoint_every, config.keep_every
    if config.total_rollouts // every > _MOST_CHECKPOINTS:
        raise ConfigError(
            f"total_rollouts={config.total_rollouts} with checkpoint_every={every} are {config.total_rollouts // every:,} "
            f"checkpoints, more than {_MOST_CHECKPOINTS:,}: raise checkpoint_every or lower total_rollouts"
        )
    if kept and not config.keep_last:
        raise ConfigError(
            f"keep_every={kept} without keep_last: all checkpoints are kept; set keep_last to how many of the newest to keep "
            "beside them, or leave keep_every at 0"
        )
    if kept % every:
        raise ConfigError(
            f"keep_every={kept} is not a multiple of checkpoint_every={every}, so it would keep none of most: use for example "
            f"keep_every={max(every, round(kept / every) * every)}"
        )
