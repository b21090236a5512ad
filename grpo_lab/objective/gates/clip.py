"""The clip of PPO, GRPO, DAPO (wider above), GSPO (on sequence ratios) and GMPO (before the geometric mean)."""

from dataclasses import dataclass

import torch
from torch import Tensor


@dataclass(frozen=True)
class Gate:
    """f = min(ratio, 1 + clip_high) for A > 0 and max(ratio, 1 - clip_low) for A < 0; the boundary counts as open.

    Source: Schulman et al. 2017 (1707.06347) eq. 7; asymmetric bounds: Yu et al. 2025 (2503.14476) eq. 10.
    """

    clip_low: float = 0.2
    clip_high: float = 0.2

    def f(self, ratio: Tensor, advantages: Tensor, old_probs: Tensor) -> Tensor:
        return torch.where(advantages >= 0, ratio.clamp(max=1 + self.clip_high), ratio.clamp(min=1 - self.clip_low))

    def df(self, ratio: Tensor, advantages: Tensor, old_probs: Tensor) -> Tensor:
        is_open = torch.where(advantages >= 0, ratio <= 1 + self.clip_high, ratio >= 1 - self.clip_low)
        return is_open.to(ratio.dtype)
