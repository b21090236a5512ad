"""Replays in parameter space: the real gradients of other objectives on a run's rollouts, at a checkpoint's weights."""

from __future__ import annotations

from collections.abc import Mapping

from grpo_lab.errors import ConfigError
from grpo_lab.hub import resolve_model
from grpo_lab.lab.recorded import RecordedStep
from grpo_lab.lab.replay import Replayed
from grpo_lab.learner.checkpoint import Checkpoint, saved_checkpoints
from grpo_lab.learner.learner import Learner
from grpo_lab.objective.advantages import batch_advantages
from grpo_lab.objective.axes import Objective
from grpo_lab.objective.gates import build_gate
from grpo_lab.objective.record import gate_record
from grpo_lab.run_dir import RunDir


def nearest_checkpoint(run: RunDir, step: int) -> Checkpoint:
    """The checkpoint whose weights are nearest to those after `step`. ConfigError when the run has none."""
    damaged = list[str]()
    found = list(saved_checkpoints(run.checkpoints, damaged.append))
    if not found:
        why = f" ({'; '.join(damaged)})" if damaged else ""
        raise ConfigError(f"{run.path} has no whole checkpoint to compute gradients at{why}; leave --parameters out")
    return min(found, key=lambda checkpoint: abs(checkpoint.progress.step - step))


def replay_parameters(
    run: RunDir, checkpoint: Checkpoint, step: RecordedStep, objectives: Mapping[str, Objective]
) -> list[Replayed]:
    """Loss, gradient by parameter and gate record of every objective on the recorded batch at the checkpoint's weights.

    One forward and backward of the whole batch for each objective; every gradient is kept in memory.
    """
    config = run.config
    learner = Learner(config, next(iter(objectives.values())), resolve_model(config.model), checkpoint.folder)
    results = []
    for name, objective in objectives.items():
        trained = step.trained_logprobs.clone()
        loss, gradient = learner.with_objective(objective).flat_gradient(
            step.batch, batch_advantages(step.batch, objective), trained
        )
        gate = build_gate(objective.gate, objective.gate_options, objective.level)
        results.append(Replayed(name, loss, gradient, gate_record(trained, step.inputs(objective), objective, gate)))
    return results
