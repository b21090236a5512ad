"""The soft gate of SAPO: a sigmoid of the ratio in place of a hard clip."""

from dataclasses import dataclass

import torch
from torch import Tensor


@dataclass(frozen=True)
class Gate:
    """f = (4 / tau) sigmoid(tau (ratio - 1)), so f' = sech^2(tau (ratio - 1) / 2); tau depends on the sign of A.

    f(1) = 2 / tau, not 1: compare gradients, never surrogate values. Source: Gao et al. 2025 (2511.20347).
    """

    tau_positive: float = 1.0
    tau_negative: float = 1.05

    def f(self, ratio: Tensor, advantages: Tensor, old_probs: Tensor) -> Tensor:
        tau = self._tau(ratio, advantages)
        return 4 / tau * torch.sigmoid(tau * (ratio - 1))

    def df(self, ratio: Tensor, advantages: Tensor, old_probs: Tensor) -> Tensor:
        opened = torch.sigmoid(self._tau(ratio, advantages) * (ratio - 1))
        return 4 * opened * (1 - opened)

    def _tau(self, ratio: Tensor, advantages: Tensor) -> Tensor:
        return torch.where(advantages >= 0, ratio.new_tensor(self.tau_positive), ratio.new_tensor(self.tau_negative))
