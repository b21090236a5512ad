"""The loss of a micro-batch: -sum w * (f(ratio; A) * A * correction - beta * KL)."""

from dataclasses import dataclass

import torch
from torch import Tensor

from grpo_lab.objective.aggregate import BatchTotals, token_weights
from grpo_lab.objective.axes import Objective
from grpo_lab.objective.gates import GateProtocol
from grpo_lab.objective.kl import kl_penalty
from grpo_lab.objective.ratio import correction_weights, geometric_mean, log_ratio
from grpo_lab.types import TokenBatch, TrainBatch


@dataclass(frozen=True)
class LossInputs:
    """Everything constant in the loss of n sequences: [n, C] each, `advantages` [n].

    `behaviour_logprobs` are those of the old policy that the ratio is taken to; `weights` carry the aggregation and the
    global normalisation, and are 0 on tokens that give no gradient.
    """

    behaviour_logprobs: Tensor
    ref_logprobs: Tensor
    mask: Tensor
    weights: Tensor
    correction: Tensor
    advantages: Tensor

    def rows(self, rows: Tensor, columns: int, device: torch.device) -> "LossInputs":
        """The sequences `rows` [n] on `device`, cut to their first `columns` tokens."""
        cut = lambda tensor: tensor[rows, :columns].to(device)  # noqa: E731
        return LossInputs(
            cut(self.behaviour_logprobs),
            cut(self.ref_logprobs),
            cut(self.mask),
            cut(self.weights),
            cut(self.correction),
            self.advantages[rows].to(device),
        )


def loss_inputs(batch: TrainBatch, advantages: Tensor, objective: Objective, totals: BatchTotals) -> LossInputs:
    """What the objective makes of a whole batch; `advantages` [N]. `totals`: all sequences, the trained tokens, of all ranks.

    With `mask_truncated` a token mean is over what is left, while means over sequences count a masked one as 0.
    """
    tokens = batch.tokens
    trained = trained_mask(tokens, objective)
    return LossInputs(
        behaviour_logprobs=tokens.rollout_logprobs if objective.old == "rollout" else batch.old_logprobs,
        ref_logprobs=batch.ref_logprobs,
        mask=tokens.completion_mask,
        weights=token_weights(objective.aggregate, trained, totals, objective.max_tokens),
        correction=correction_weights(
            batch.old_logprobs,
            tokens.rollout_logprobs,
            tokens.completion_mask,
            objective.correction,
            objective.correction_options,
        ),
        advantages=advantages,
    )


def trained_mask(tokens: TokenBatch, objective: Objective) -> Tensor:
    """1 on the tokens that give a gradient, [N, C]: all, or those of completions that stopped in time."""
    mask = tokens.completion_mask
    return mask * ~tokens.truncated.unsqueeze(1) if objective.mask_truncated else mask


def batch_totals(tokens: TokenBatch, objective: Objective, rows: Tensor | None = None) -> BatchTotals:
    """What the loss of the mini-batch `rows` (default: all) is normalised over."""
    mask = trained_mask(tokens, objective)
    mask = mask if rows is None else mask[rows]
    return BatchTotals(len(mask), int(mask.sum()))


def policy_loss(logprobs: Tensor, inputs: LossInputs, objective: Objective, gate: GateProtocol) -> Tensor:
    """Scalar loss (a share of the global batch's) of the learner's current log-probs [n, C], which carry the gradient.

    `inputs.weights` carry the global normalisation, so the losses of all micro-batches add up to the batch's.
    """
    terms = surrogate(logprobs, inputs, objective, gate) * inputs.correction
    if objective.kl_in_loss:
        token_log_ratio = log_ratio(logprobs, inputs.behaviour_logprobs, inputs.mask, "token")
        penalty = kl_penalty(objective.kl, logprobs, inputs.ref_logprobs, token_log_ratio, inputs.mask)
        terms = terms - objective.beta * penalty
    return -torch.sum(inputs.weights * terms)


def surrogate(logprobs: Tensor, inputs: LossInputs, objective: Objective, gate: GateProtocol) -> Tensor:
    """J = f(ratio; A) * A of every token, [n, C]; at level `geometric_mean` f is averaged over the sequence first."""
    log_rho = log_ratio(logprobs, inputs.behaviour_logprobs, inputs.mask, objective.level)
    advantages = inputs.advantages.unsqueeze(1).expand_as(log_rho)
    gated = gate.f(log_rho.exp(), advantages, inputs.behaviour_logprobs.exp())
    if objective.level == "geometric_mean":
        gated = geometric_mean(gated, inputs.mask)
    return gated * advantages
