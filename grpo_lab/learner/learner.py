"""Batches -> updates. Owns the policy, its reference, the optimizer and their precision; knows nothing of sampling."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch
from accelerate import Accelerator
from torch import Tensor

from grpo_lab.config import Config
from grpo_lab.errors import RunError
from grpo_lab.learner.collate import plan_microbatches, select
from grpo_lab.learner.logprobs import TokenStatistics, completion_hidden, completion_logprobs, token_statistics
from grpo_lab.learner.model import PolicyModel
from grpo_lab.learner.optimizer import LearnerState, PolicyOptimizer
from grpo_lab.learner.precision import MasterWeights
from grpo_lab.methods import Objective
from grpo_lab.objective.aggregate import BatchTotals, token_weights
from grpo_lab.objective.gates import build_gate
from grpo_lab.objective.loss import LossInputs, gate_metrics, policy_loss
from grpo_lab.seeding import derive_seed
from grpo_lab.types import TokenBatch, TrainBatch, UpdateReport


class NonFiniteError(RunError):
    """A loss or gradient is not finite; raised before the optimizer moves anything."""


class Learner:
    """`annotate` adds log-probs to a batch, `update` trains on it, `statistics` measures it against the reference."""

    def __init__(
        self,
        config: Config,
        objective: Objective,
        base: Path,
        source: Path | None = None,
        state: LearnerState | None = None,
    ) -> None:
        self._accelerator = Accelerator()
        self._config, self._objective = config, objective
        self._gate = build_gate(objective.gate, objective.gate_options)
        self.policy = PolicyModel(base, source or base, config.model, self._accelerator.device)
        self._share_prompt = config.learner.share_prompt and self.policy.can_share_prompt
        saved = state.masters if state else {}
        self.masters = MasterWeights(self.policy.trainable(), saved, self.policy.full_precision)
        self.policy.full_precision = {}
        self.optimizer = PolicyOptimizer(config, self.masters, state)

    # -- measuring ---------------------------------------------------------------------------------------------------

    def annotate(self, tokens: TokenBatch) -> TrainBatch:
        """Add the learner's log-probs under the current weights and under the reference, fp32, no gradient."""
        old = self._score(self.policy.causal_lm, tokens)
        with self.policy.as_reference() as reference:
            ref = self._score(reference, tokens)
        return TrainBatch(tokens, old, ref)

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
            for name in ("logprobs", "ref_logprobs", "full_kl", "entropy"):
                getattr(result, name)[rows, : part.completion_mask.shape[1]] = getattr(measured, name)
        return result

    @torch.no_grad()
    def _score(self, model: Any, tokens: TokenBatch) -> Tensor:
        scores = torch.zeros(tokens.completion_mask.shape)
        for rows in self._plan(tokens, torch.arange(tokens.num_sequences)):
            part = completion_logprobs(
                model, select(tokens, rows), self._share_prompt, self._config.rollout.temperature
            )
            scores[rows, : part.shape[1]] = part.cpu()
        return scores

    def _plan(self, tokens: TokenBatch, rows: Tensor) -> list[Tensor]:
        return plan_microbatches(tokens, rows, self._config.learner.microbatch_tokens, self._share_prompt)

    # -- training ----------------------------------------------------------------------------------------------------

    def update(self, batch: TrainBatch, advantages: Tensor, step: int) -> UpdateReport:
        """`passes` x `mini_batches` optimizer steps on one batch; `advantages` [N]. The order is derived from (seed, step).

        Raises NonFiniteError, before any weight moves, when a loss or gradient is not finite.
        """
        settings = self._config.learner
        log_rho = torch.zeros_like(batch.old_logprobs)
        totals = {"loss": 0.0, "policy/grad_norm": 0.0, "rollout/update_absorbed": 0.0}
        for index in range(settings.passes):
            for rows in self._mini_batches(batch.tokens, step, index):
                for key, value in self._optimizer_step(batch, advantages, rows, log_rho, step).items():
                    totals[key] += value / (settings.passes * settings.mini_batches)
        gates = gate_metrics(log_rho, advantages, batch.tokens.completion_mask, self._gate)
        return UpdateReport({**totals, "policy/learning_rate": self.optimizer.learning_rate, **gates})

    def _mini_batches(self, tokens: TokenBatch, step: int, index: int) -> list[Tensor]:
        count, groups = self._config.learner.mini_batches, self._config.prompts_per_step
        generator = torch.Generator().manual_seed(derive_seed(self._config.seed, "mini_batches", step, index))
        order = torch.randperm(groups, generator=generator) if count > 1 else torch.arange(groups)
        return [torch.isin(tokens.group_ids, part).nonzero().flatten() for part in order.chunk(count)]

    def _optimizer_step(
        self, batch: TrainBatch, advantages: Tensor, rows: Tensor, log_rho: Tensor, step: int
    ) -> dict[str, float]:
        loss = self._gradients(batch, advantages, rows, log_rho, step)
        return {"loss": loss, **self.optimizer.step()}

    def _gradients(self, batch: TrainBatch, advantages: Tensor, rows: Tensor, log_rho: Tensor, step: int) -> float:
        """Leave the global mini-batch's gradient in the masters. fp16: halve the loss scale and start over on overflow."""
        while True:
            loss = self._accumulate(batch, advantages, rows, log_rho)
            self._reduce_over_ranks()
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

    def _accumulate(self, batch: TrainBatch, advantages: Tensor, rows: Tensor, log_rho: Tensor) -> float:
        totals = self._global_totals(batch.tokens, rows)
        loss_sum = 0.0
        for micro in self._plan(batch.tokens, rows):
            part = select(batch.tokens, micro)
            inputs = self._loss_inputs(batch, part, advantages, micro, totals)
            logprobs = completion_logprobs(
                self.policy.causal_lm, part, self._share_prompt, self._config.rollout.temperature
            )
            loss, ratios = policy_loss(logprobs, inputs, self._objective, self._gate)
            (loss * self.optimizer.loss_scale).backward()
            self.masters.gather_gradients(self.optimizer.loss_scale)
            log_rho[micro, : ratios.shape[1]] = ratios.cpu()
            loss_sum += float(loss.detach())
        return loss_sum

    def _loss_inputs(
        self, batch: TrainBatch, part: TokenBatch, advantages: Tensor, micro: Tensor, totals: BatchTotals
    ) -> LossInputs:
        device, columns = self._accelerator.device, part.completion_mask.shape[1]
        mask = part.completion_mask.to(device)
        return LossInputs(
            old_logprobs=batch.old_logprobs[micro, :columns].to(device),
            ref_logprobs=batch.ref_logprobs[micro, :columns].to(device),
            rollout_logprobs=part.rollout_logprobs.to(device),
            mask=mask,
            weights=token_weights(self._objective.aggregate, mask, totals, self._objective.length_constant),
            advantages=advantages[micro].to(device),
        )

    def _global_totals(self, tokens: TokenBatch, rows: Tensor) -> BatchTotals:
        counts = torch.tensor([len(rows), int(tokens.completion_mask[rows].sum())], device=self._accelerator.device)
        sequences, count = self._accelerator.reduce(counts, "sum").tolist()
        return BatchTotals(sequences, count)

    def _reduce_over_ranks(self) -> None:
        if self._accelerator.num_processes > 1:
            for master in self.masters.masters.values():
                gradient = torch.zeros_like(master) if master.grad is None else master.grad
                master.grad = self._accelerator.reduce(gradient, "sum")
