"""PPO's clip with a second bound: a bad token whose ratio exploded no longer dominates the batch."""

from dataclasses import dataclass

import torch
from torch import Tensor


@dataclass(frozen=True)
class Gate:
    """The clip gate, and for A < 0 also f = cap beyond ratio > cap, which closes it there; boundaries count as open.

    Source: Ye et al. 2019 (1912.09729) eq. 5 with c = 3; INTELLECT-2 uses 4.
    """

    clip_low: float = 0.2
    clip_high: float = 0.2
    cap: float = 3.0

    def f(self, ratio: Tensor, advantages: Tensor, old_probs: Tensor) -> Tensor:
        below = ratio.clamp(min=1 - self.clip_low, max=self.cap)
        return torch.where(advantages >= 0, ratio.clamp(max=1 + self.clip_high), below)

    def df(self, ratio: Tensor, advantages: Tensor, old_probs: Tensor) -> Tensor:
        inside = (ratio >= 1 - self.clip_low) & (ratio <= self.cap)
        return torch.where(advantages >= 0, ratio <= 1 + self.clip_high, inside).to(ratio.dtype)
