"""The truncated importance weight of CISPO: no token is silenced, none counts more than `cap` times."""

from dataclasses import dataclass

import torch
from torch import Tensor


@dataclass(frozen=True)
class Gate:
    """f' = min(1, cap / ratio) for both signs of A, so that the signal is min(ratio, cap) A; f is its integral from 0.

    Source: MiniMax 2025 (2506.13585) eq. 4-5, written as a gate; cap 5 as in ScaleRL (2510.13786).
    """

    cap: float = 5.0

    def f(self, ratio: Tensor, advantages: Tensor, old_probs: Tensor) -> Tensor:
        beyond = self.cap * (1 + torch.log(ratio.clamp(min=self.cap) / self.cap))
        return torch.where(ratio <= self.cap, ratio, beyond)

    def df(self, ratio: Tensor, advantages: Tensor, old_probs: Tensor) -> Tensor:
        return (self.cap / ratio).clamp(max=1)
