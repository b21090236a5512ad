"""What a gate did to the tokens of a batch: the same record for every method."""

from dataclasses import dataclass

import torch
from torch import Tensor

from grpo_lab.objective.axes import Objective
from grpo_lab.objective.gates import GateProtocol
from grpo_lab.objective.loss import LossInputs, surrogate
from grpo_lab.objective.ratio import log_ratio

THRESHOLDS = (0.1, 0.5, 1.0)  # |log ratio| in nats


def learning_signal(logprobs: Tensor, inputs: LossInputs, objective: Objective, gate: GateProtocol) -> Tensor:
    """The coefficient of grad log pi_t in the sum of J over tokens, [N, C]; f' * ratio * A at token level."""
    with torch.enable_grad():
        leaf = logprobs.detach().requires_grad_()
        total = (surrogate(leaf, inputs, objective, gate) * inputs.mask).sum()
        (signal,) = torch.autograd.grad(total, leaf)
    return signal


@dataclass(frozen=True)
class TrainedTokens:
    """The tokens that give a gradient, float64, [n] each: advantage, log-ratio at the objective's level, f' and signal."""

    advantages: Tensor
    log_rho: Tensor
    opened: Tensor
    signal: Tensor


def trained_tokens(logprobs: Tensor, inputs: LossInputs, objective: Objective, gate: GateProtocol) -> TrainedTokens:
    """The trained tokens of a batch at the log-probs [N, C] they were trained at, row by row."""
    keep = inputs.weights > 0
    log_rho = log_ratio(logprobs, inputs.behaviour_logprobs, inputs.mask, objective.level)[keep].double()
    advantages = inputs.advantages.unsqueeze(1).expand_as(keep)[keep].double()
    opened = gate.df(log_rho.exp(), advantages, inputs.behaviour_logprobs[keep].double().exp())
    signal = learning_signal(logprobs, inputs, objective, gate)[keep].double()
    return TrainedTokens(advantages, log_rho, opened, signal)


def gate_record(logprobs: Tensor, inputs: LossInputs, objective: Objective, gate: GateProtocol) -> dict[str, float]:
    """`gate/*` and `ratio/*` over the tokens that were trained on, at the log-probs [N, C] they were trained at.

    open_fraction: share of tokens with f' >= 1/2, in all and by the advantage's sign (1 where no token has that sign).
    mean: mean f'. ess: (sum g)^2 / (n sum g^2) of the weights g = |signal / A|. signal_beyond_X: the share of sum |signal|
    that comes from tokens whose |log ratio| exceeds X nats.
    """
    tokens = trained_tokens(logprobs, inputs, objective, gate)
    advantages, log_rho, opened, signal = tokens.advantages, tokens.log_rho, tokens.opened, tokens.signal.abs()
    unit = (signal / advantages.abs())[advantages != 0]
    share = lambda which: float((opened[which] >= 0.5).double().mean()) if which.any() else 1.0  # noqa: E731
    total = max(float(signal.sum()), 1e-300)
    ratio = log_rho.exp()
    return {
        "gate/open_fraction": share(advantages == advantages),
        "gate/open_fraction_positive": share(advantages > 0),
        "gate/open_fraction_negative": share(advantages < 0),
        "gate/mean": float(opened.mean()) if opened.numel() else 1.0,
        "gate/ess": float(unit.sum().square() / (unit.square().sum() * unit.numel()).clamp(min=1e-300)),
        **{f"gate/signal_beyond_{t:g}": float(signal[log_rho.abs() > t].sum()) / total for t in THRESHOLDS},
        "ratio/min": float(ratio.min()) if ratio.numel() else 1.0,
        "ratio/mean": float(ratio.mean()) if ratio.numel() else 1.0,
        "ratio/max": float(ratio.max()) if ratio.numel() else 1.0,
    }


def correction_record(inputs: LossInputs) -> dict[str, float]:
    """The mean correction weight over the tokens that were trained on, and the share of them it silenced."""
    weights = inputs.correction[inputs.weights > 0].double()
    if not weights.numel():
        return {"correction/mean": 1.0, "correction/zero": 0.0}
    return {"correction/mean": float(weights.mean()), "correction/zero": float((weights == 0).double().mean())}
