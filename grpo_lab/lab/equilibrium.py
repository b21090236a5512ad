"""Where an objective leads on the toy model: its exact expected update, repeated until it stands still."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from grpo_lab.lab.toy import (
    MASK,
    MAX_TOKENS,
    REFERENCE,
    REWARDS,
    ToyState,
    measure,
    occupancy,
    one_thread,
    token_logprobs,
)
from grpo_lab.objective.advantages import ZSCORE_EPS
from grpo_lab.objective.aggregate import BatchTotals, token_weights
from grpo_lab.objective.axes import Objective
from grpo_lab.objective.gates import GateProtocol, build_gate
from grpo_lab.objective.loss import LossInputs, policy_loss

TRAINING_STEPS = 300
UPDATES_PER_BATCH = 2  # so that ratios leave 1 and gates act
_LONGEST_STEP = 0.1  # of one logit in training: longer ones throw sequences away for good
_LONGEST_JUMP = 1.0  # of one logit in an implicit step


@dataclass(frozen=True)
class Equilibrium:
    """The end of one training, `logits` [prefixes, 3]; `force` is the largest gradient left on a logit, 0 at a fixed point."""

    logits: Tensor
    state: ToyState
    force: float


@one_thread()
def find_equilibrium(objective: Objective) -> Equilibrium:
    """Train the toy policy from the reference with the project's own loss, in expectation over infinitely large groups.

    First natural-gradient steps (Kakade 2001; the same fixed points as gradient steps) with the gate, several updates a
    batch; then the same flow, implicitly, until it stands still. Objectives without a fixed point end where the flow led.
    """
    gate = build_gate(objective.gate, objective.gate_options, objective.level)
    logits = _settle(_train(REFERENCE, objective, gate), objective, gate)
    return Equilibrium(logits, measure(logits, objective.beta), float(_force(logits, objective, gate).abs().max()))


def _train(logits: Tensor, objective: Objective, gate: GateProtocol) -> Tensor:
    """`TRAINING_STEPS` batches; a step is 1 / (2 beta) long at first and shrinks over the second half."""
    for step in range(TRAINING_STEPS):
        size = 0.5 / objective.beta * min(1.0, 10 ** (8 * (0.5 - step / TRAINING_STEPS)))
        inputs, scale = expected_inputs(logits, objective)
        for _ in range(UPDATES_PER_BATCH):
            visits = occupancy(token_logprobs(logits).sum(dim=1).exp()).clamp(min=1e-300)
            logits = logits + _bounded(size * scale * _ascent(logits, inputs, objective, gate) / visits, _LONGEST_STEP)
        logits = logits - logits.mean(dim=1, keepdim=True)
    return logits


def _settle(logits: Tensor, objective: Objective, gate: GateProtocol, rounds: int = 60) -> Tensor:
    """Follow d logits / dt = force by implicit Euler steps of growing length (pseudo-transient continuation)."""
    time = 1.0 / objective.beta
    for _ in range(rounds):
        force = _force(logits, objective, gate)
        if force.abs().max() < 1e-13:
            break
        system = torch.eye(force.numel(), dtype=torch.float64) / time - _jacobian(logits, force, objective, gate)
        logits = logits + _bounded(torch.linalg.solve(system, force.flatten()).view_as(force), _LONGEST_JUMP)
        logits = logits - logits.mean(dim=1, keepdim=True)
        time *= 1.5
    return logits


def _jacobian(logits: Tensor, force: Tensor, objective: Objective, gate: GateProtocol, width: float = 1e-6) -> Tensor:
    columns = []
    for index in range(logits.numel()):
        moved = logits.flatten().index_add(0, torch.tensor([index]), torch.tensor([width], dtype=torch.float64))
        columns.append((_force(moved.view_as(logits), objective, gate) - force).flatten() / width)
    return torch.stack(columns, dim=1)


def _force(logits: Tensor, objective: Objective, gate: GateProtocol) -> Tensor:
    """The on-policy expected update direction, [prefixes, 3]."""
    inputs, scale = expected_inputs(logits, objective)
    return scale * _ascent(logits, inputs, objective, gate)


def _bounded(step: Tensor, longest: float) -> Tensor:
    return step * min(1.0, longest / max(float(step.abs().max()), 1e-300))


def expected_inputs(logits: Tensor, objective: Objective) -> tuple[LossInputs, float]:
    """The loss inputs of all sequences, each weighted by its probability, and the factor that undoes the normaliser.

    The baseline is the exact mean of R and the std its exact std: what groups give as G grows.
    """
    old, ref = token_logprobs(logits), token_logprobs(REFERENCE)
    probability = old.sum(dim=1).exp()
    returns = REWARDS - objective.beta * (old - ref).sum(dim=1) if objective.kl == "reward" else REWARDS
    centered = returns - (probability * returns).sum()
    if objective.advantage in ("zscore", "batch_zscore"):
        centered = centered / ((probability * centered.square()).sum().sqrt() + ZSCORE_EPS)
    tokens = float((probability * MASK.sum(dim=1)).sum())
    weights = token_weights(objective.aggregate, MASK, BatchTotals(1, tokens), MAX_TOKENS) * probability.unsqueeze(1)
    return LossInputs(old, ref, MASK, weights, torch.ones_like(MASK), centered), tokens / float(weights.sum())


def _ascent(logits: Tensor, inputs: LossInputs, objective: Objective, gate: GateProtocol) -> Tensor:
    leaf = logits.detach().requires_grad_()
    (gradient,) = torch.autograd.grad(policy_loss(token_logprobs(leaf), inputs, objective, gate), leaf)
    return -gradient
