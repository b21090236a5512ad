"""Saved rollouts of a run -> the batch its learner saw, without a model."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from grpo_lab.errors import ConfigError
from grpo_lab.learner.collate import collate
from grpo_lab.objective.advantages import batch_advantages
from grpo_lab.objective.axes import Objective
from grpo_lab.objective.loss import LossInputs, batch_totals, loss_inputs
from grpo_lab.run_dir import RunDir
from grpo_lab.storage.records import TOKEN_COLUMNS, read_groups, read_token_columns
from grpo_lab.types import TrainBatch


@dataclass(frozen=True)
class RecordedStep:
    """One step of a run: its batch, and the learner's log-probs [N, C] at which each token was last trained on."""

    step: int
    batch: TrainBatch
    trained_logprobs: Tensor

    def inputs(self, objective: Objective) -> LossInputs:
        """What `objective` makes of this batch: its advantages, weights and corrections, whatever the run itself used."""
        totals = batch_totals(self.batch.tokens, objective)
        return loss_inputs(self.batch, batch_advantages(self.batch, objective), objective, totals)


def read_step(run: RunDir, step: int | None = None) -> RecordedStep:
    """The record of `step`, or of the newest. ConfigError when the run kept none, or none with the learner's log-probs."""
    files = run.rollout_files()
    if not files:
        raise ConfigError(f"{run.path} has no rollout records: they are kept with tracking.rollouts=true")
    step = max(files) if step is None else step
    if step not in files:
        raise ConfigError(f"step {step} of {run.path} has no rollout record; steps {min(files)} to {max(files)} have")
    columns = read_token_columns(files[step])
    if set(columns) != set(TOKEN_COLUMNS):
        raise ConfigError(
            f"{files[step]} lacks the learner's log-probs ({', '.join(TOKEN_COLUMNS)}): it cannot be replayed"
        )
    tokens = collate(read_groups(files[step])[0])
    old, ref, trained = (_pad(columns[name], tokens.completion_mask.shape[1]) for name in TOKEN_COLUMNS)
    return RecordedStep(step, TrainBatch(tokens, old, ref), trained)


def _pad(rows: list[list[float]], length: int) -> Tensor:
    return torch.tensor([row + [0.0] * (length - len(row)) for row in rows], dtype=torch.float32)
