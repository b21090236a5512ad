"""Forward passes over a batch: micro-batches within the token budget, each rank its share of the groups."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from grpo_lab.config import Config
from grpo_lab.learner.collate import select
from grpo_lab.learner.logprobs import completion_hidden, completion_logprobs
from grpo_lab.learner.model import PolicyModel
from grpo_lab.learner.packing import count_tokens, plan_microbatches
from grpo_lab.learner.ranks import Ranks
from grpo_lab.types import TokenBatch


class Forward:
    """How one learner runs its models: the budget, whether a prompt is shared by its siblings, the ranks."""

    def __init__(self, policy: PolicyModel, ranks: Ranks, config: Config) -> None:
        self.policy, self.ranks = policy, ranks
        self.share_prompt = config.learner.share_prompt and policy.can_share_prompt
        self.budget = config.learner.microbatch_tokens
        self.temperature = config.rollout.temperature

    def plan(self, tokens: TokenBatch, rows: Tensor | None = None) -> list[Tensor]:
        """This rank's micro-batches of `rows` (default: all), as indices [n] each."""
        return plan_microbatches(tokens, self._own(tokens, rows), self.budget, self.share_prompt)

    def plan_groups(self, tokens: TokenBatch) -> list[list[Tensor]]:
        """This rank's micro-batches of all rows, group by group."""
        rows = self._own(tokens, None)
        groups = [rows[tokens.group_ids[rows] == group] for group in tokens.group_ids[rows].unique()]
        return [plan_microbatches(tokens, members, self.budget, self.share_prompt) for members in groups]

    def fit_together(self, tokens: TokenBatch, plan: list[Tensor]) -> bool:
        """Whether these micro-batches lie within one budget."""
        return sum(count_tokens(tokens, rows, self.share_prompt).run for rows in plan) <= self.budget

    def logprobs(self, part: TokenBatch) -> Tensor:
        """Log-probs of one micro-batch under the policy, [n, C] fp32, on the device, differentiable."""
        return completion_logprobs(self.policy.causal_lm, part, self.share_prompt, self.temperature)

    def hidden(self, model: Any, part: TokenBatch) -> Tensor:
        """Last hidden states that predict each completion token of one micro-batch, [n, C, H]."""
        return completion_hidden(model, part, self.share_prompt)

    @torch.no_grad()
    def score(self, model: Any, tokens: TokenBatch, temperature: float) -> Tensor:
        """Log-probs of a whole batch under a model, [N, C] fp32 on CPU, the same on every rank."""
        scores = torch.zeros(tokens.completion_mask.shape)
        for rows in self.plan(tokens):
            part = completion_logprobs(model, select(tokens, rows), self.share_prompt, temperature)
            scores[rows, : part.shape[1]] = part.cpu()
        return self.ranks.sum(scores)

    def packing_metrics(self, tokens: TokenBatch) -> dict[str, float]:
        """Share of the positions run that are tokens, not padding; share of the tokens that sharing prompts spared."""
        counts = [count_tokens(tokens, rows, self.share_prompt) for rows in self.plan(tokens)]
        sums = torch.tensor([[c.real, c.run, c.apart] for c in counts], dtype=torch.float64).reshape(-1, 3).sum(dim=0)
        real, run, apart = self.ranks.sum(sums).tolist()
        return {"perf/packing_fill": round(real / run, 4), "perf/prompt_share_saving": round(1 - real / apart, 4)}

    def _own(self, tokens: TokenBatch, rows: Tensor | None) -> Tensor:
        return self.ranks.own_rows(tokens, torch.arange(tokens.num_sequences) if rows is None else rows)
