"""The trust region of DPPO: it bounds how far a token's probability moved, not its ratio."""

from dataclasses import dataclass
from typing import ClassVar

import torch
from torch import Tensor

from grpo_lab.config import Level


@dataclass(frozen=True)
class Gate:
    """Open while pi - pi_old <= limit for A > 0 and >= -limit for A < 0; the weight beyond ratio `cap` is cap / ratio.

    f is constant where the gate is closed, as for a clip at the ratio 1 +- limit / pi_old. Source: DPPO-TV (2602.04879).
    """

    limit: float = 0.15
    cap: float = 20.0

    levels: ClassVar[tuple[Level, ...]] = ("token",)

    def f(self, ratio: Tensor, advantages: Tensor, old_probs: Tensor) -> Tensor:
        room = self.limit / old_probs.clamp(min=1e-12)
        clipped = torch.where(advantages >= 0, ratio.minimum(1 + room), ratio.maximum(1 - room))
        inside = torch.where(self._is_open(ratio, advantages, old_probs), ratio, clipped)
        beyond = self.cap * (1 + torch.log(inside.clamp(min=self.cap) / self.cap))
        return torch.where(inside <= self.cap, inside, beyond)

    def df(self, ratio: Tensor, advantages: Tensor, old_probs: Tensor) -> Tensor:
        return self._is_open(ratio, advantages, old_probs) * (self.cap / ratio).clamp(max=1)

    def _is_open(self, ratio: Tensor, advantages: Tensor, old_probs: Tensor) -> Tensor:
        moved = old_probs * (ratio - 1)
        return torch.where(advantages >= 0, moved <= self.limit, moved >= -self.limit)
