"""No gate: plain importance weighting, REINFORCE where every update has its own batch."""

from dataclasses import dataclass

import torch
from torch import Tensor


@dataclass(frozen=True)
class Gate:
    """f = ratio, f' = 1: every token keeps its whole signal, however far it went."""

    def f(self, ratio: Tensor, advantages: Tensor, old_probs: Tensor) -> Tensor:
        return ratio

    def df(self, ratio: Tensor, advantages: Tensor, old_probs: Tensor) -> Tensor:
        return torch.ones_like(ratio)
