"""Log-ratios between policies at every level, and the detached sampler-learner correction."""

from collections.abc import Mapping

import torch
from torch import Tensor

from grpo_lab.config import CorrectionName, Level

LOG_RATIO_LIMIT = 20.0  # beyond e^20 a ratio is broken data: its gradient is cut before exp() overflows


def log_ratio(logprobs: Tensor, old_logprobs: Tensor, mask: Tensor, level: Level) -> Tensor:
    """log pi_theta - log pi_old, [n, C]; 0 off the mask.

    token, geometric_mean: each token its own. sequence: the mean over the sequence's tokens, repeated on each of them, so
    that the ratio is the length-normalised one of GSPO (Zheng et al. 2507.18071 eq. 6) and gradients reach every token.
    sequence_token: the same value, but a token's gradient goes to that token alone (eq. 14 there).
    """
    difference = (logprobs - old_logprobs) * mask
    if level in ("sequence", "sequence_token"):
        mean = _sequence_mean(difference, mask)
        difference = mean if level == "sequence" else mean.detach() + difference - difference.detach()
    return difference.clamp(-LOG_RATIO_LIMIT, LOG_RATIO_LIMIT)


def geometric_mean(values: Tensor, mask: Tensor) -> Tensor:
    """exp of the mean over a sequence's tokens of log(values), repeated on each of them, [n, C]; values are positive.

    Source: GMPO (Zhao et al. 2507.20673 eq. 4), where `values` are the clipped token ratios.
    """
    return _sequence_mean(values.clamp(min=1e-30).log() * mask, mask).exp()


def _sequence_mean(values: Tensor, mask: Tensor) -> Tensor:
    return values.sum(dim=1, keepdim=True) / mask.sum(dim=1, keepdim=True).clamp(min=1) * mask


def correction_weights(
    old_logprobs: Tensor, rollout_logprobs: Tensor, mask: Tensor, name: CorrectionName, options: Mapping[str, float]
) -> Tensor:
    """Detached token weights pi_old / pi_rollout for the mismatch between learner and sampler, [N, C] of a whole batch.

    tis: the ratio, at most `cap` (Yao et al. 2025). icepop, mis: the ratio inside [`low`, `high`], 0 outside (Ring-1T,
    2510.18855). `_sequence`: the same for the product of a sequence's ratios. m2po: the tokens with the largest
    squared log-ratio get 0 until the mean of the others is at most `limit` (2510.01161); the others get their ratio.
    """
    if name == "none":
        return torch.ones_like(old_logprobs)
    log_ratios = ((old_logprobs - rollout_logprobs) * mask).detach()
    if name.endswith("_sequence"):
        log_ratios = log_ratios.sum(dim=1, keepdim=True).expand_as(log_ratios)
    ratio = log_ratios.clamp(-LOG_RATIO_LIMIT, LOG_RATIO_LIMIT).exp()
    if name == "m2po":
        return ratio * _second_moment_mask(log_ratios, mask, options["limit"])
    if name.startswith("tis"):
        return ratio.clamp(max=options["cap"])
    return torch.where((ratio >= options["low"]) & (ratio <= options["high"]), ratio, torch.zeros_like(ratio))


def _second_moment_mask(log_ratios: Tensor, mask: Tensor, limit: float) -> Tensor:
    """1 for the most tokens, smallest first, whose mean squared log-ratio is at most `limit`, else 0."""
    squares = torch.where(mask.bool(), log_ratios.square(), torch.inf).flatten()
    order = squares.argsort(stable=True)
    means = squares[order].cumsum(dim=0) / torch.arange(1, len(order) + 1, device=mask.device)
    kept = torch.zeros_like(squares)
    kept[order[: int((means <= limit).sum())]] = 1
    return kept.view_as(mask)
