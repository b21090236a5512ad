"""The toy model trained as models are trained: sampled groups, Adam, a decaying learning rate."""

from __future__ import annotations

import torch
from torch import Tensor

from grpo_lab.lab.equilibrium import UPDATES_PER_BATCH
from grpo_lab.lab.toy import MASK, MAX_TOKENS, REFERENCE, REWARDS, ToyState, measure, one_thread, token_logprobs
from grpo_lab.objective.advantages import advantages
from grpo_lab.objective.aggregate import BatchTotals, token_weights
from grpo_lab.objective.axes import Objective
from grpo_lab.objective.gates import build_gate
from grpo_lab.objective.loss import LossInputs, policy_loss


@one_thread()
def train_sampled(
    objective: Objective, group_size: int = 8, groups: int = 4, steps: int = 2000, seed: int = 0
) -> ToyState:
    """Where `steps` batches of `groups` x `group_size` sampled sequences lead, measured exactly; the learning rate decays."""
    gate = build_gate(objective.gate, objective.gate_options, objective.level)
    generator = torch.Generator().manual_seed(seed)
    logits = REFERENCE.clone().requires_grad_()
    optimizer = torch.optim.Adam([logits], lr=0.1, betas=(0.9, 0.99))
    schedule = torch.optim.lr_scheduler.LambdaLR(optimizer, lambda step: 1e-3 ** max(0.0, 2 * step / steps - 1))
    for _ in range(steps):
        with torch.no_grad():
            sampled, inputs = _sample(logits, objective, (groups, group_size), generator)
        for _ in range(UPDATES_PER_BATCH):
            optimizer.zero_grad()
            policy_loss(token_logprobs(logits)[sampled], inputs, objective, gate).backward()  # type: ignore[no-untyped-call]
            optimizer.step()
        schedule.step()
    return measure(logits.detach(), objective.beta)


def _sample(
    logits: Tensor, objective: Objective, shape: tuple[int, int], generator: torch.Generator
) -> tuple[Tensor, LossInputs]:
    """The indices of sampled sequences, [groups * G], and the constants of their loss."""
    old, ref = token_logprobs(logits), token_logprobs(REFERENCE)
    count = shape[0] * shape[1]
    sampled = torch.multinomial(old.sum(dim=1).exp(), count, replacement=True, generator=generator)
    returns = REWARDS[sampled]
    if objective.kl == "reward":
        returns = returns - objective.beta * (old - ref).sum(dim=1)[sampled]
    mask = MASK[sampled]
    advantage = advantages(returns.view(shape), objective.advantage, objective.zscore_ddof).flatten()
    weights = token_weights(objective.aggregate, mask, BatchTotals(count, float(mask.sum())), MAX_TOKENS)
    return sampled, LossInputs(old[sampled], ref[sampled], mask, weights, torch.ones_like(mask), advantage)
