"""Token-local KL penalties for the loss. None of them has -grad F as its gradient; `kl: reward` has (see advantages.py)."""

import torch
from torch import Tensor

from grpo_lab.config import KLName


def kl_penalty(name: KLName, logprobs: Tensor, ref_logprobs: Tensor, old_log_ratio: Tensor) -> Tensor:
    """Per-token penalty [n, C] of u = log pi_theta - log pi_ref, differentiable in `logprobs`.

    k1 = u, k2 = u^2 / 2, k3 = e^{-u} + u - 1 (Schulman's blog); k3_is = (pi_theta / pi_old) k3 with the ratio differentiated
    (DeepSeek-V3.2, 2512.02556). Expected gradients: Tang & Munos 2506.09477.
    """
    u = logprobs - ref_logprobs
    if name == "loss_k1":
        return u
    if name == "loss_k2":
        return u.square() / 2
    k3 = torch.exp((-u).clamp(max=20.0)) + u - 1
    return old_log_ratio.exp() * k3 if name == "loss_k3_is" else k3
