"""KL penalties for the loss. Only `loss_k2_sequence` has the gradient of the KL; `kl: reward` has it too (advantages.py)."""

import torch
from torch import Tensor

from grpo_lab.config import KLName


def kl_penalty(name: KLName, logprobs: Tensor, ref_logprobs: Tensor, old_log_ratio: Tensor, mask: Tensor) -> Tensor:
    """Per-token penalty [n, C] of u = log pi_theta - log pi_ref, differentiable in `logprobs`.

    k1 = u, k2 = u^2 / 2, k3 = e^{-u} + u - 1 (Schulman's blog); k3_is = (pi_theta / pi_old) k3 with the ratio differentiated
    (DeepSeek-V3.2, 2512.02556). k2_sequence = l^2 / 2 with l = sum_t u_t, spread evenly over the sequence's tokens (Liu et al.
    2510.01555: its on-policy gradient is the trajectory KL's). Expected gradients: Tang & Munos 2506.09477.
    """
    u = (logprobs - ref_logprobs) * mask
    if name == "loss_k1":
        return u
    if name == "loss_k2":
        return u.square() / 2
    if name == "loss_k2_sequence":
        return u.sum(dim=1, keepdim=True).square() / (2 * mask.sum(dim=1, keepdim=True).clamp(min=1)) * mask
    k3 = torch.exp((-u).clamp(max=20.0)) + u - 1
    return old_log_ratio.exp() * k3 if name == "loss_k3_is" else k3
