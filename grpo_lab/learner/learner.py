"""Batches -> updates. Owns the policy, its reference, the optimizer and their precision; knows nothing of sampling."""

from __future__ import annotations

import copy
from pathlib import Path

import torch
from torch import Tensor

from grpo_lab.config import Config
from grpo_lab.errors import RunError
from grpo_lab.learner.collate import collate
from grpo_lab.learner.forward import Forward
from grpo_lab.learner.gradient import Gradient, NonFiniteError, Prepared
from grpo_lab.learner.logprobs import TokenStatistics
from grpo_lab.learner.model import PolicyModel
from grpo_lab.learner.optimizer import LearnerState, PolicyOptimizer
from grpo_lab.learner.precision import MasterWeights, first_masters
from grpo_lab.learner.ranks import Ranks, on_every_rank
from grpo_lab.learner.sharding import local
from grpo_lab.objective.axes import Objective
from grpo_lab.objective.loss import batch_totals, loss_inputs
from grpo_lab.objective.record import correction_record, gate_record
from grpo_lab.seeding import derive_seed
from grpo_lab.types import Completion, Grade, Problem, RolloutGroup, TokenBatch, TrainBatch, UpdateReport


class Learner:
    """`prepare` adds log-probs to a batch, `update` trains on it, `statistics` measures it against the reference.

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
        self._config = config
        sharded = (config.learner.shard or self.ranks.launcher_shards) and self.ranks.count > 1
        home = torch.device("cpu") if sharded else self.ranks.device
        self.policy = PolicyModel(base, source or base, config.model, home)
        masters = first_masters(self.policy.trainable(), state.masters if state else {}, self.policy.full_precision)
        self.policy.full_precision = {}
        if sharded:
            self.policy.shard(self.ranks.mesh(), masters)
            masters = dict(self.policy.trainable())
        self.masters = MasterWeights(self.policy.trainable(), masters, getattr(torch, config.model.dtype))
        self.optimizer = PolicyOptimizer(config, self.masters, state)
        self._forward = Forward(self.policy, self.ranks, config)
        self.gradient = Gradient(self._forward, self.masters, self.optimizer, objective)
        self._prepared: Prepared | None = None

    # -- measuring ---------------------------------------------------------------------------------------------------

    @on_every_rank
    def annotate(self, tokens: TokenBatch) -> TrainBatch:
        """Add the learner's log-probs under the current weights and under the reference, fp32, no gradient."""
        old = self._forward.score(self.policy.causal_lm, tokens)
        return TrainBatch(tokens, old, self._reference_logprobs(tokens))

    @on_every_rank
    def prepare(self, tokens: TokenBatch) -> TrainBatch:
        """What `annotate` gives, for `update`.

        Where one update follows, the log-probs come from its own forward, and its gradient waits for it: a forward less.
        """
        ref = self._reference_logprobs(tokens)
        if self._config.learner.passes * self._config.learner.mini_batches == 1 and self.gradient.is_local:
            old, self._prepared = self.gradient.with_old_logprobs(tokens, ref)
        else:
            old = self._forward.score(self.policy.causal_lm, tokens)
        return TrainBatch(tokens, old, ref)

    @on_every_rank
    def statistics(self, tokens: TokenBatch) -> TokenStatistics:
        """Log-probs, full KL and entropy of the policy against the reference at temperature 1, [N, C] each, on CPU.

        RunError when one is not finite.
        """
        found = self._forward.statistics(tokens)
        if not torch.isfinite(found.stack()).all():
            raise RunError(
                "the policy cannot be measured: its log-probs, or the reference's, are not finite; check the model, or use "
                "model.dtype=float32"
            )
        return found

    @on_every_rank
    def score(self, prompt: tuple[int, ...], completion: tuple[int, ...], reference: bool = False) -> tuple[float, ...]:
        """Log-probs of a completion's tokens under the current (or reference) weights at temperature 1, nats."""
        text = Completion(completion, (0.0,) * len(completion), "", "length", 0)
        tokens = collate([RolloutGroup(Problem("", (), ""), prompt, (text,), (Grade(0.0, "wrong"),))])
        if not reference:
            return tuple(self._forward.score(self.policy.causal_lm, tokens, 1.0)[0].tolist())
        with self.policy.as_reference() as model:
            return tuple(self._forward.score(model, tokens, 1.0)[0].tolist())

    # -- keeping -----------------------------------------------------------------------------------------------------

    @on_every_rank
    def weights(self, reference: bool = False) -> dict[str, Tensor]:
        """The policy's (or reference's) whole tensors by name, compute dtype; of a LoRA policy the adapter's. On rank 0."""
        return self.policy.weights(reference, keep=self.ranks.is_main)

    @on_every_rank
    def state(self) -> LearnerState:
        """What a checkpoint keeps beside the weights; on rank 0."""
        return self.optimizer.state(keep=self.ranks.is_main)

    def _reference_logprobs(self, tokens: TokenBatch) -> Tensor:
        with self.policy.as_reference() as reference:
            return self._forward.score(reference, tokens)

    # -- training ----------------------------------------------------------------------------------------------------

    @on_every_rank
    def update(self, batch: TrainBatch, advantages: Tensor, step: int) -> UpdateReport:
        """`passes` x `mini_batches` optimizer steps on one batch; `advantages` [N]. The order is derived from (seed, step).

        Raises NonFiniteError, before any weight moves, when a loss or gradient is not finite, and when weights are not
        after the step.
        """
        settings, objective = self._config.learner, self.gradient.objective
        trained = batch.old_logprobs.clone()
        totals = {"loss": 0.0, "policy/grad_norm": 0.0, "rollout/update_absorbed": 0.0}
        for index in range(settings.passes):
            for rows in self._mini_batches(batch.tokens, step, index):
                loss = self._take_prepared(advantages)
                if loss is None:
                    loss = self.gradient.of(batch, advantages, rows, trained, step)
                for key, value in {"loss": loss, **self.optimizer.step()}.items():
                    totals[key] += value / (settings.passes * settings.mini_batches)
                self._refuse_broken_weights(step)
        inputs = loss_inputs(batch, advantages, objective, batch_totals(batch.tokens, objective))
        metrics = {
            **totals,
            "policy/learning_rate": self.optimizer.learning_rate,
            **gate_record(trained, inputs, objective, self.gradient.gate),
            **self._forward.packing_metrics(batch.tokens),
        }
        if objective.correction != "none":
            metrics |= correction_record(inputs)
        return UpdateReport(metrics, trained)

    def _refuse_broken_weights(self, step: int) -> None:
        finite = all(bool(torch.isfinite(local(p)).all()) for p in self.policy.trainable().values())
        if float(self.ranks.sum(torch.tensor(float(not finite)))):
            raise NonFiniteError(
                f"step {step + 1}: the update made weights that {self._config.model.dtype} cannot hold; they were not saved "
                "and not sampled from; start again with a lower learner.learning_rate or another model.dtype"
            )

    def _take_prepared(self, advantages: Tensor) -> float | None:
        """The loss of the gradient that `prepare` left in the masters, if it is of these advantages."""
        prepared, self._prepared = self._prepared, None
        if prepared and prepared.fits(advantages):
            return prepared.loss
        self.optimizer.discard_gradients()
        return None

    def _mini_batches(self, tokens: TokenBatch, step: int, index: int) -> list[Tensor]:
        count, groups = self._config.learner.mini_batches, self._config.prompts_per_step
        generator = torch.Generator().manual_seed(derive_seed(self._config.seed, "mini_batches", step, index))
        order = torch.randperm(groups, generator=generator) if count > 1 else torch.arange(groups)
        return [torch.isin(tokens.group_ids, part).nonzero().flatten() for part in order.chunk(count)]

    def with_objective(self, objective: Objective) -> Learner:
        """This very learner (its weights and optimizer, not a copy of them) under another objective."""
        other = copy.copy(self)
        other.gradient = Gradient(self._forward, self.masters, self.optimizer, objective)
        return other

    def flat_gradient(self, batch: TrainBatch, advantages: Tensor, trained: Tensor) -> tuple[float, Tensor]:
        """The loss of the whole batch and its gradient by trainable parameter, flat, on CPU; no weight moves.

        `trained` [N, C] receives the current log-probs.
        """
        loss = self.gradient.of(batch, advantages, torch.arange(batch.tokens.num_sequences), trained)
        masters = self.masters.masters.values()
        flat = torch.cat([(torch.zeros_like(m) if m.grad is None else m.grad).flatten().float().cpu() for m in masters])
        self.optimizer.discard_gradients()
        return loss, flat
