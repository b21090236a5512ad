"""Forward passes over a batch: micro-batches within the token budget, each rank its share of the groups."""

from __future__ import annotations

from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from torch import Tensor

from grpo_lab.config import Config
from grpo_lab.learner.collate import select
from grpo_lab.learner.logprobs import TokenStatistics, completion_hidden, completion_logprobs, token_statistics
from grpo_lab.learner.model import PolicyModel
from grpo_lab.learner.packing import Packing, count_tokens, plan_microbatches, plan_units
from grpo_lab.learner.ranks import Ranks
from grpo_lab.learner.sharding import inside
from grpo_lab.types import TokenBatch


@dataclass(frozen=True)
class MicroBatch:
    """Rows [n] of a batch that run together, as a batch `part` of their own.

    With sharded weights a rank that has no more rows still runs what the others run: `rows` is empty then, `part` is not.
    """

    rows: Tensor
    part: TokenBatch


class Forward:
    """How one learner runs its models: the budget, whether a prompt is shared by its siblings, the ranks."""

    def __init__(self, policy: PolicyModel, ranks: Ranks, config: Config) -> None:
        self.policy, self.ranks = policy, ranks
        self.share_prompt = config.learner.share_prompt and policy.can_share_prompt
        self.budget = config.learner.microbatch_tokens
        self._temperature = config.rollout.temperature

    def plan(self, tokens: TokenBatch, rows: Tensor | None = None) -> list[MicroBatch]:
        """This rank's micro-batches of `rows` (default: all)."""
        shares = self.ranks.split(tokens, torch.arange(tokens.num_sequences) if rows is None else rows)
        if not self.policy.is_sharded:
            return self._micro_batches(tokens, shares[self.ranks.index])
        plans = [plan_microbatches(tokens, share, self.budget, self.share_prompt) for share in shares]
        own = plans[self.ranks.index]
        shortest = (tokens.prompt_lengths + tokens.completion_mask.sum(dim=1)).argmin().reshape(1)
        idle = MicroBatch(shortest[:0], select(tokens, shortest))
        return [MicroBatch(r, select(tokens, r)) for r in own] + [idle] * (max(map(len, plans)) - len(own))

    def plan_groups(self, tokens: TokenBatch) -> list[list[MicroBatch]]:
        """This rank's micro-batches of all rows, in units of whole groups."""
        rows = self.ranks.split(tokens, torch.arange(tokens.num_sequences))[self.ranks.index]
        units = plan_units(tokens, rows, self.budget, self.share_prompt)
        return [[MicroBatch(members, select(tokens, members)) for members in unit] for unit in units]

    def fit_together(self, unit: list[MicroBatch]) -> bool:
        """Whether these micro-batches lie within one budget (one alone always may)."""
        run = sum(self._count(micro).run for micro in unit)
        return len(unit) == 1 or run <= self.budget

    def logprobs(self, micro: MicroBatch) -> Tensor:
        """Log-probs of one micro-batch under the policy, [n, C] fp32, on the device, differentiable."""
        return self._logprobs(self.policy.causal_lm, micro, self._temperature)

    @torch.no_grad()
    def score(self, model: Any, tokens: TokenBatch, temperature: float | None = None) -> Tensor:
        """Log-probs of a whole batch under a model, [N, C] fp32 on CPU, the same on every rank."""
        scores = torch.zeros(tokens.completion_mask.shape)
        for micro in self.plan(tokens):
            found = self._logprobs(model, micro, temperature or self._temperature)
            scores[micro.rows, : found.shape[1]] = found.cpu()
        return self.ranks.sum(scores)

    @torch.no_grad()
    def statistics(self, tokens: TokenBatch) -> TokenStatistics:
        """Log-probs, full KL and entropy of the policy against the reference at temperature 1, [N, C] each, on CPU."""
        columns = torch.zeros(4, *tokens.completion_mask.shape)
        for micro in self.plan(tokens):
            found = self._statistics(micro.part).stack()[:, : len(micro.rows)]
            columns[:, micro.rows, : found.shape[2]] = found
        return TokenStatistics(*self.ranks.sum(columns))

    def packing_metrics(self, tokens: TokenBatch) -> dict[str, float]:
        """Share of the positions run that are tokens, not padding; share of the tokens that sharing prompts spared."""
        counts = [self._count(micro) for micro in self.plan(tokens) if len(micro.rows)]
        sums = torch.tensor([[c.real, c.run, c.apart] for c in counts], dtype=torch.float64).reshape(-1, 3).sum(dim=0)
        real, run, apart = self.ranks.sum(sums).tolist()
        return {"perf/packing_fill": round(real / run, 4), "perf/prompt_share_saving": round(1 - real / apart, 4)}

    def _micro_batches(self, tokens: TokenBatch, rows: Tensor) -> list[MicroBatch]:
        plan = plan_microbatches(tokens, rows, self.budget, self.share_prompt)
        return [MicroBatch(members, select(tokens, members)) for members in plan]

    def _count(self, micro: MicroBatch) -> Packing:
        return count_tokens(micro.part, torch.arange(micro.part.num_sequences), self.share_prompt)

    def _logprobs(self, model: Any, micro: MicroBatch, temperature: float) -> Tensor:
        run = partial(completion_logprobs, model, micro.part, self.share_prompt, temperature)
        return inside(model, run)[: len(micro.rows)]

    def _statistics(self, part: TokenBatch) -> TokenStatistics:
        policy = self.policy.causal_lm

        def compare() -> TokenStatistics:
            hidden = completion_hidden(policy, part, self.share_prompt)
            with self.policy.as_reference() as reference:
                run = partial(against, hidden, reference)
                return run() if reference is policy else inside(reference, run)

        def against(hidden: Tensor, reference: Any) -> TokenStatistics:
            heads = (policy.get_output_embeddings(), reference.get_output_embeddings())
            return token_statistics(hidden, completion_hidden(reference, part, self.share_prompt), heads, part)

        return inside(policy, compare)
