"""Log-ratios between policies, per token or per sequence, and the detached sampler-learner correction."""

import torch
from torch import Tensor

from grpo_lab.config import CorrectionName, Level

LOG_RATIO_LIMIT = 20.0  # beyond e^20 a ratio is broken data: its gradient is cut before exp() overflows


def log_ratio(logprobs: Tensor, old_logprobs: Tensor, mask: Tensor, level: Level) -> Tensor:
    """log pi_theta - log pi_old, [n, C]; 0 off the mask.

    token: each token its own. sequence: the mean over the sequence's tokens, repeated on each of them, so that the
    ratio is the length-normalised one of GSPO (Zheng et al. 2507.18071 eq. 6) and gradients reach every token.
    """
    difference = (logprobs - old_logprobs) * mask
    if level == "sequence":
        lengths = mask.sum(dim=1, keepdim=True).clamp(min=1)
        difference = difference.sum(dim=1, keepdim=True) / lengths * mask
    return difference.clamp(-LOG_RATIO_LIMIT, LOG_RATIO_LIMIT)


def correction_weights(
    old_logprobs: Tensor,
    rollout_logprobs: Tensor,
    name: CorrectionName,
    truncate: float = 2.0,
    band: tuple[float, float] = (0.5, 5.0),
) -> Tensor:
    """Detached token weights pi_old / pi_rollout for the mismatch between learner and sampler, [n, C].

    tis: truncated at `truncate` (Yao et al. 2025). icepop: kept inside `band`, 0 outside (Ring-1T, 2510.18855).
    """
    if name == "none":
        return torch.ones_like(old_logprobs)
    ratio = (old_logprobs - rollout_logprobs).clamp(-LOG_RATIO_LIMIT, LOG_RATIO_LIMIT).exp().detach()
    if name == "tis":
        return ratio.clamp(max=truncate)
    low, high = band
    return torch.where((ratio >= low) & (ratio <= high), ratio, torch.zeros_like(ratio))
