"""The mask of IPO: a token whose probability moved too far, either way, gives no signal."""

from dataclasses import dataclass
from typing import ClassVar

from torch import Tensor

from grpo_lab.config import Level


@dataclass(frozen=True)
class Gate:
    """f = ratio while |pi - pi_old| <= limit, 0 outside, for both signs of A. Source: prime-rl's documentation of IPO."""

    limit: float = 0.3

    levels: ClassVar[tuple[Level, ...]] = ("token",)

    def f(self, ratio: Tensor, advantages: Tensor, old_probs: Tensor) -> Tensor:
        return ratio * self.df(ratio, advantages, old_probs)

    def df(self, ratio: Tensor, advantages: Tensor, old_probs: Tensor) -> Tensor:
        return ((old_probs * (ratio - 1)).abs() <= self.limit).to(ratio.dtype)
