"""Batch -> gradient in the masters, summed over micro-batches and ranks. No weight moves here."""

from __future__ import annotations

import math
from dataclasses import dataclass

import torch
from torch import Tensor

from grpo_lab.errors import RunError
from grpo_lab.learner.collate import select
from grpo_lab.learner.forward import Forward, MicroBatch
from grpo_lab.learner.optimizer import PolicyOptimizer
from grpo_lab.learner.precision import MasterWeights
from grpo_lab.learner.sharding import local
from grpo_lab.objective.advantages import batch_advantages
from grpo_lab.objective.aggregate import BatchTotals
from grpo_lab.objective.axes import Objective
from grpo_lab.objective.gates import build_gate
from grpo_lab.objective.loss import LossInputs, batch_totals, loss_inputs, policy_loss
from grpo_lab.types import TokenBatch, TrainBatch


class NonFiniteError(RunError):
    """A loss or gradient is not finite; raised before the optimizer moves anything."""


@dataclass(frozen=True)
class Prepared:
    """A whole batch's gradient is in the masters: the advantages [N] it was taken with, and the loss."""

    advantages: Tensor
    loss: float

    def fits(self, advantages: Tensor) -> bool:
        return torch.allclose(self.advantages, advantages, rtol=1e-4, atol=1e-6)


class Gradient:
    """The gradient of one objective's loss with respect to the policy."""

    def __init__(
        self, forward: Forward, masters: MasterWeights, optimizer: PolicyOptimizer, objective: Objective
    ) -> None:
        self.objective = objective
        self.gate = build_gate(objective.gate, objective.gate_options, objective.level)
        self._forward, self._masters, self._optimizer = forward, masters, optimizer
        self._ranks = forward.ranks

    def of(self, batch: TrainBatch, advantages: Tensor, rows: Tensor, trained: Tensor, step: int = 0) -> float:
        """Leave the gradient of the mini-batch `rows` in the masters; returns the loss, fills `trained`.

        `trained` [N, C] receives the log-probs the rows were trained at. fp16: overflow halves the loss scale and starts over.
        Raises NonFiniteError.
        """
        while True:
            loss = self._accumulate(batch, advantages, rows, trained)
            if self._is_finite(loss):
                return loss
            self._optimizer.discard_gradients()
            if self._optimizer.loss_scale <= 1 or loss != loss:
                raise NonFiniteError(
                    f"step {step + 1}: the {'gradient' if math.isfinite(loss) else 'loss'} is not finite; this update changed "
                    "no weight; start again with a lower learner.learning_rate or model.dtype=float32"
                )
            self._optimizer.loss_scale /= 2

    @property
    def is_local(self) -> bool:
        """Whether a group's gradient needs nothing of other groups.

        Sharded weights need more, for every rank to run the same forwards: that a row's needs nothing of its siblings.
        """
        alone = not self._forward.policy.is_sharded or self.objective.kl != "reward"
        return alone and self.objective.advantage != "batch_zscore" and self.objective.correction != "m2po"

    def with_old_logprobs(self, tokens: TokenBatch, ref_logprobs: Tensor) -> tuple[Tensor, Prepared | None]:
        """The log-probs before the first update, [N, C], and the gradient of this update, from the same forward.

        Where the KL enters the advantages, a group's micro-batches wait for each other; groups over the token budget run
        twice. None instead of Prepared: it is not finite.
        """
        self._optimizer.discard_gradients()
        batch = TrainBatch(tokens, torch.zeros_like(ref_logprobs), ref_logprobs)
        in_reward = self.objective.kl == "reward"
        known = None if in_reward else batch_advantages(batch, self.objective)
        loss, used, totals = 0.0, torch.zeros(tokens.num_sequences), batch_totals(tokens, self.objective)
        for unit in self._forward.plan_groups(tokens) if in_reward else [[m] for m in self._forward.plan(tokens)]:
            loss += self._unit(unit, batch, known, used, totals)
        self._sum_gradients()
        prepared = Prepared(self._ranks.sum(used), float(self._ranks.sum(torch.tensor(loss, dtype=torch.float64))))
        finite = self._is_finite(prepared.loss)
        if not finite:
            self._optimizer.discard_gradients()
        return self._ranks.sum(batch.old_logprobs), prepared if finite else None

    def _unit(
        self, unit: list[MicroBatch], batch: TrainBatch, known: Tensor | None, used: Tensor, totals: BatchTotals
    ) -> float:
        """Log-probs of micro-batches, into `batch`, then their gradient; returns the loss.

        `known` are the advantages where they do not wait for log-probs; `used` receives those taken.
        """
        together = self._forward.fit_together(unit)
        with torch.set_grad_enabled(together):
            current = [self._forward.logprobs(micro) for micro in unit]
        for micro, logprobs in zip(unit, current, strict=True):
            batch.old_logprobs[micro.rows, : logprobs.shape[1]] = logprobs.detach().cpu()
        rows = torch.cat([micro.rows for micro in unit]).sort().values  # siblings are neighbours again
        part = select(batch.tokens, rows)
        columns = part.completion_mask.shape[1]
        own = TrainBatch(part, batch.old_logprobs[rows, :columns], batch.ref_logprobs[rows, :columns])
        used[rows] = batch_advantages(own, self.objective) if known is None else known[rows]
        inputs = loss_inputs(own, used[rows], self.objective, totals)
        places = [torch.searchsorted(rows, micro.rows) for micro in unit]
        if together:
            losses = [self._loss(inputs, *pair) for pair in zip(places, current, strict=True)]
            return self._backward(torch.stack(losses).sum())
        again = zip(places, unit, strict=True)
        return sum(self._backward(self._loss(inputs, place, self._forward.logprobs(micro))) for place, micro in again)

    def _accumulate(self, batch: TrainBatch, advantages: Tensor, rows: Tensor, trained: Tensor) -> float:
        inputs = loss_inputs(batch, advantages, self.objective, batch_totals(batch.tokens, self.objective, rows))
        loss, current = 0.0, torch.zeros_like(trained)
        for micro in self._forward.plan(batch.tokens, rows):
            logprobs = self._forward.logprobs(micro)
            loss += self._backward(self._loss(inputs, micro.rows, logprobs))
            current[micro.rows, : logprobs.shape[1]] = logprobs.detach().float().cpu()
        self._sum_gradients()
        trained[rows] = self._ranks.sum(current[rows])
        return float(self._ranks.sum(torch.tensor(loss, dtype=torch.float64)))

    def _loss(self, inputs: LossInputs, rows: Tensor, logprobs: Tensor) -> Tensor:
        own = inputs.rows(rows, logprobs.shape[1], logprobs.device)
        return policy_loss(logprobs, own, self.objective, self.gate)

    def _backward(self, loss: Tensor) -> float:
        (loss * self._optimizer.loss_scale).backward()
        self._masters.gather_gradients(self._optimizer.loss_scale)
        return float(loss.detach())

    def _sum_gradients(self) -> None:
        self._masters.unscale(self._optimizer.loss_scale)
        if self._ranks.count > 1 and not self._forward.policy.is_sharded:  # sharded ones are summed in backward
            for master in self._masters.masters.values():
                master.grad = self._ranks.sum(torch.zeros_like(master) if master.grad is None else master.grad)

    def _is_finite(self, loss: float) -> bool:
        """Whether loss and gradient are, on every rank; the norm too, for clipping to an infinite one erases the gradient."""
        gradients = [local(m.grad) for m in self._masters.masters.values() if m.grad is not None]
        finite = math.isfinite(loss) and bool(torch.isfinite(torch.nn.utils.get_total_norm(gradients)))
        return float(self._ranks.sum(torch.tensor(float(not finite)))) == 0
