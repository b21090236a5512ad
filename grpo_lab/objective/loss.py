"""The loss of a micro-batch: -sum w * (f(ratio; A) * A * correction - beta * KL), and what each gate did to each token."""

from dataclasses import dataclass

import torch
from torch import Tensor

from grpo_lab.methods import Objective
from grpo_lab.objective.gates import GateProtocol
from grpo_lab.objective.kl import kl_penalty
from grpo_lab.objective.ratio import correction_weights, log_ratio


@dataclass(frozen=True)
class LossInputs:
    """Everything constant in one micro-batch of n sequences: [n, C] each, `advantages` [n]."""

    old_logprobs: Tensor
    ref_logprobs: Tensor
    rollout_logprobs: Tensor
    mask: Tensor
    weights: Tensor
    advantages: Tensor


def policy_loss(
    logprobs: Tensor, inputs: LossInputs, objective: Objective, gate: GateProtocol
) -> tuple[Tensor, Tensor]:
    """Scalar loss (a share of the global batch's) and the detached log-ratio [n, C] it was computed at.

    `logprobs` [n, C] are the learner's current log-probs with gradient. `inputs.weights` carry the global normalisation,
    so the losses of all micro-batches add up to the batch's.
    """
    behaviour = inputs.rollout_logprobs if objective.old == "rollout" else inputs.old_logprobs
    log_rho = log_ratio(logprobs, behaviour, inputs.mask, objective.level)
    advantages = inputs.advantages.unsqueeze(1).expand_as(log_rho)
    surrogate = gate.f(log_rho.exp(), advantages) * advantages
    surrogate = surrogate * correction_weights(inputs.old_logprobs, inputs.rollout_logprobs, objective.correction)
    if objective.kl.startswith("loss"):
        token_log_ratio = log_ratio(logprobs, behaviour, inputs.mask, "token")
        penalty = kl_penalty(objective.kl, logprobs, inputs.ref_logprobs, token_log_ratio)
        surrogate = surrogate - objective.beta * penalty
    return -torch.sum(inputs.weights * surrogate), log_rho.detach()


def gate_metrics(log_rho: Tensor, advantages: Tensor, mask: Tensor, gate: GateProtocol) -> dict[str, float]:
    """The same record for every gate, over the masked tokens of [N, C]; `advantages` [N].

    open_fraction: share with f' >= 1/2. mean: mean f'. ess: (sum g)^2 / (n sum g^2) of the signal weights g = f' * ratio.
    """
    keep = mask.bool()
    ratio = log_rho[keep].double().exp()
    opened = gate.df(ratio, advantages.unsqueeze(1).expand_as(log_rho)[keep].double())
    signal = opened * ratio
    return {
        "gate/open_fraction": float((opened >= 0.5).double().mean()),
        "gate/mean": float(opened.mean()),
        "gate/ess": float(signal.sum().square() / (signal.square().sum() * signal.numel()).clamp(min=1e-300)),
        "ratio/min": float(ratio.min()),
        "ratio/mean": float(ratio.mean()),
        "ratio/max": float(ratio.max()),
    }
