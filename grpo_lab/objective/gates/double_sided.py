"""The two-sided window of SAO: tokens whose ratio left it give no signal, whatever the sign of their advantage."""

from dataclasses import dataclass
from typing import ClassVar

from torch import Tensor

from grpo_lab.config import Level


@dataclass(frozen=True)
class Gate:
    """f = ratio inside the open window (1 - window_low, 1 + window_high), 0 outside.

    Source: Hou et al. 2026 (2607.07508) eq. 1-3 with f detached; defaults of its mathematics runs, window 0.7 to 6.
    """

    window_low: float = 0.3
    window_high: float = 5.0

    levels: ClassVar[tuple[Level, ...]] = ("token", "sequence", "sequence_token")  # f = 0 has no geometric mean

    def f(self, ratio: Tensor, advantages: Tensor, old_probs: Tensor) -> Tensor:
        return ratio * self.df(ratio, advantages, old_probs)

    def df(self, ratio: Tensor, advantages: Tensor, old_probs: Tensor) -> Tensor:
        return ((ratio > 1 - self.window_low) & (ratio < 1 + self.window_high)).to(ratio.dtype)
