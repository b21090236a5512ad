"""Batches -> updates. Owns the policy, its reference, the optimizer and their precision; knows nothing of sampling."""

from __future__ import annotations

import copy
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from grpo_lab.config import Config
from grpo_lab.errors import RunError
from grpo_lab.learner.collate import collate, plan_microbatches, select
from grpo_lab.learner.logprobs import TokenStatistics, completion_hidden, completion_logprobs, token_statistics
from grpo_lab.learner.model import PolicyModel
from grpo_lab.learner.optimizer import LearnerState, PolicyOptimizer
from grpo_lab.learner.precision import MasterWeights
from grpo_lab.learner.ranks import Ranks, on_every_rank
from grpo_lab.objective.aggregate import BatchTotals
from grpo_lab.objective.axes import Objective
from grpo_lab.objective.gates import build_gate
from grpo_lab.objective.loss import LossInputs, loss_inputs, policy_loss, trained_mask
from grpo_lab.objective.record import correction_record, gate_record
from grpo_lab.seeding import derive_seed
from grpo_lab.types import Completion, Grade, Problem, RolloutGroup, TokenBatch, TrainBatch, UpdateReport

_STATISTICS = ("logprobs", "ref_logprobs", "full_kl", "entropy")


class NonFiniteError(RunError):
    """A loss or gradient is not finite; raised before the optimizer moves anything."""


class Learner:
    """`annotate` adds log-probs to a batch, `update` trains on it, `statistics` measures it against the reference.

    With several ranks each works on its share of the rows; sums over the ranks give every rank what one process would have.
    """

    def __init__(
        self,
        config: Config,
        objective: Objective,
        base: Path,
        source: Path | None = None,
        state: LearnerState | None = None,
    ) -> None:
        self.ranks = Ranks()
        self._config, self._objective = config, objective
        self._gate = build_gate(objective.gate, objective.gate_options, objective.level)
        self.policy = PolicyModel(base, source or base, config.model, self.ranks.device)
        self._share_prompt = config.learner.share_prompt and self.policy.can_share_prompt
        saved = state.masters if state else {}
        self.masters = MasterWeights(self.policy.trainable(), saved, self.policy.full_precision)
        self.policy.full_precision = {}
        self.optimizer = PolicyOptimizer(config, self.masters, state)

    # -- measuring ---------------------------------------------------------------------------------------------------

    @on_every_rank
    def annotate(self, tokens: TokenBatch) -> TrainBatch:
        """Add the learner's log-probs under the current weights and under the reference, fp32, no gradient."""
        temperature = self._config.rollout.temperature
        old = self._score(self.policy.causal_lm, tokens, temperature)
        with self.policy.as_reference() as reference:
            ref = self._score(reference, tokens, temperature)
        return TrainBatch(tokens, old, ref)

    @on_every_rank
    @torch.no_grad()
    def statistics(self, tokens: TokenBatch) -> TokenStatistics:
        """Log-probs, full KL and entropy of the policy against the reference at temperature 1, [N, C] each, on CPU."""
        shape = tokens.completion_mask.shape
        result = TokenStatistics(*(torch.zeros(shape) for _ in range(4)))
        for rows in self._plan(tokens, torch.arange(tokens.num_sequences)):
            part = select(tokens, rows)
            hidden = completion_hidden(self.policy.causal_lm, part, self._share_prompt)
            with self.policy.as_reference() as reference:
                ref_hidden = completion_hidden(reference, part, self._share_prompt)
                heads = (self.policy.causal_lm.get_output_embeddings(), reference.get_output_embeddings())
            measured = token_statistics(hidden, ref_hidden, heads, part)
            for name in _STATISTICS:
                getattr(result, name)[rows, : part.completion_mask.shape[1]] = getattr(measured, name)
        return TokenStatistics(*(self.ranks.sum(getattr(result, name)) for name in _STATISTICS))

    @on_every_rank
    def score(self, prompt: tuple[int, ...], completion: tuple[int, ...], reference: bool = False) -> tuple[float, ...]:
        """Log-probs of a completion's tokens under the current (or reference) weights at temperature 1, nats."""
        text = Completion(completion, (0.0,) * len(completion), "", "length", 0)
        tokens = collate([RolloutGroup(Problem("", (), ""), prompt, (text,), (Grade(0.0, "wrong"),))])
        if not reference:
            return tuple(self._score(self.policy.causal_lm, tokens, 1.0)[0].tolist())
        with self.policy.as_reference() as model:
            return tuple(self._score(model, tokens, 1.0)[0].tolist())

    @torch.no_grad()
    def _score(self, model: Any, tokens: TokenBatch, temperature: float) -> Tensor:
        scores = torch.zeros(tokens.completion_mask.shape)
        for rows in self._plan(tokens, torch.arange(tokens.num_sequences)):
            part = completion_logprobs(model, select(tokens, rows), self._share_prompt, temperature)
            scores[rows, : part.shape[1]] = part.cpu()
        return self.ranks.sum(scores)

    def _plan(self, tokens: TokenBatch, rows: Tensor) -> list[Tensor]:
        """This rank's micro-batches of `rows`."""
        budget = self._config.learner.microbatch_tokens
        return plan_microbatches(tokens, self.ranks.own_rows(tokens, rows), budget, self._share_prompt)

    # -- training ----------------------------------------------------------------------------------------------------

    @on_every_rank
    def update(self, batch: TrainBatch, advantages: Tensor, step: int) -> UpdateReport:
        """`passes` x `mini_batches` optimizer steps on one batch; `advantages` [N]. The order is derived from (seed, step).

        Raises NonFiniteError, before any weight moves, when a loss or gradient is not finite.
        """
        settings = self._config.learner
        trained = batch.old_logprobs.clone()
        totals = {"loss": 0.0, "policy/grad_norm": 0.0, "rollout/update_absorbed": 0.0}
        for index in range(settings.passes):
            for rows in self._mini_batches(batch.tokens, step, index):
                loss = self.gradient(batch, advantages, rows, trained, step)
                for key, value in {"loss": loss, **self.optimizer.step()}.items():
                    totals[key] += value / (settings.passes * settings.mini_batches)
        everything = torch.arange(batch.tokens.num_sequences)
        inputs = self._loss_inputs(batch, advantages, everything)
        gates = gate_record(trained, inputs, self._objective, self._gate)
        metrics = {**totals, "policy/learning_rate": self.optimizer.learning_rate, **gates}
        if self._objective.correction != "none":
            metrics |= correction_record(inputs)
        return UpdateReport(metrics, trained)

    def _mini_batches(self, tokens: TokenBatch, step: int, index: int) -> list[Tensor]:
        count, groups = self._config.learner.mini_batches, self._config.prompts_per_step
        generator = torch.Generator().manual_seed(derive_seed(self._config.seed, "mini_batches", step, index))
        order = torch.randperm(groups, generator=generator) if count > 1 else torch.arange(groups)
        return [torch.isin(tokens.group_ids, part).nonzero().flatten() for part in order.chunk(count)]

    def gradient(self, batch: TrainBatch, advantages: Tensor, rows: Tensor, trained: Tensor, step: int) -> float:
        """Leave the gradient of the mini-batch `rows` in the masters; returns the loss, fills `trained`.

        `trained` [N, C] receives the log-probs the rows were trained at. fp16: overflow halves the loss scale and starts over.
        """
        while True:
            loss = self._accumulate(batch, advantages, rows, trained)
            self._sum_gradients()
            gradients = [m.grad for m in self.masters.masters.values() if m.grad is not None]
            if loss == loss and abs(loss) != float("inf") and all(torch.isfinite(g).all() for g in gradients):
                return loss
            self.optimizer.discard_gradients()
            if self._config.model.dtype != "float16" or self.optimizer.loss_scale <= 1 or loss != loss:
                raise NonFiniteError(
                    f"step {step}: the {'loss' if loss != loss else 'gradient'} is not finite; no weight was changed; lower "
                    "learner.learning_rate or use --set model.dtype=float32"
                )
            self.optimizer.loss_scale /= 2

    def with_objective(self, objective: Objective) -> Learner:
        """This very learner (its weights and optimizer, not a copy of them) under another objective."""
        other = copy.copy(self)
        other._objective = objective
        other._gate = build_gate(objective.gate, objective.gate_options, objective.level)
        return other

    def flat_gradient(self, batch: TrainBatch, advantages: Tensor, trained: Tensor) -> tuple[float, Tensor]:
        """The loss of the whole batch and its gradient by trainable parameter, flat, on CPU; no weight moves.

        `trained` [N, C] receives the current log-probs.
        """
        loss = self.gradient(batch, advantages, torch.arange(batch.tokens.num_sequences), trained, 0)
        masters = self.masters.masters.values()
        flat = torch.cat([(torch.zeros_like(m) if m.grad is None else m.grad).flatten().float().cpu() for m in masters])
        self.optimizer.discard_gradients()
        return loss, flat

    def _accumulate(self, batch: TrainBatch, advantages: Tensor, rows: Tensor, trained: Tensor) -> float:
        inputs, device = self._loss_inputs(batch, advantages, rows), self.ranks.device
        loss_sum, current = torch.zeros((), dtype=torch.float64), torch.zeros_like(trained)
        for micro in self._plan(batch.tokens, rows):
            part = select(batch.tokens, micro)
            columns = part.completion_mask.shape[1]
            logprobs = completion_logprobs(
                self.policy.causal_lm, part, self._share_prompt, self._config.rollout.temperature
            )
            loss = policy_loss(logprobs, inputs.rows(micro, columns, device), self._objective, self._gate)
            (loss * self.optimizer.loss_scale).backward()
            self.masters.gather_gradients(self.optimizer.loss_scale)
            current[micro, :columns] = logprobs.detach().float().cpu()
            loss_sum += float(loss.detach())
        trained[rows] = self.ranks.sum(current[rows])
        return float(self.ranks.sum(loss_sum))

    def _loss_inputs(self, batch: TrainBatch, advantages: Tensor, rows: Tensor) -> LossInputs:
        """The constants of the whole batch's loss, normalised over the mini-batch `rows`."""
        tokens = int(trained_mask(batch, self._objective)[rows].sum())
        return loss_inputs(batch, advantages, self._objective, BatchTotals(len(rows), tokens))

    def _sum_gradients(self) -> None:
        if self.ranks.count > 1:
            for master in self.masters.masters.values():
                master.grad = self.ranks.sum(torch.zeros_like(master) if master.grad is None else master.grad)
