"""A smooth gate: it closes like a Cauchy curve."""

from dataclasses import dataclass

import torch
from torch import Tensor


@dataclass(frozen=True)
class Gate:
    """f' = 1 / (1 + x^2) with x = tau (ratio - 1), for both signs of A; f(1) = 1.

    An admissible smooth gate in the sense of 2602.19345: differentiable, largest at ratio 1 where it is 1, falling to 0.
    """

    tau: float = 1.0

    def f(self, ratio: Tensor, advantages: Tensor, old_probs: Tensor) -> Tensor:
        x = self.tau * (ratio - 1)
        return 1 + torch.arctan(x) / self.tau

    def df(self, ratio: Tensor, advantages: Tensor, old_probs: Tensor) -> Tensor:
        x = self.tau * (ratio - 1)
        return 1 / (1 + x.square())
