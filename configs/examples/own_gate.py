"""A gate of your own: open at ratio 1, closing like a bell on both sides.

grpo-lab train --config configs/examples/own_gate.yaml
grpo-lab plot gates --method configs.examples.own_gate:Gate --method dapo
"""

from dataclasses import dataclass

import torch
from torch import Tensor


@dataclass(frozen=True)
class Gate:
    """f = 1 + tanh(sharpness * (ratio - 1)) / sharpness. `sharpness`: the larger, the sooner it closes."""

    sharpness: float = 4.0

    def f(self, ratio: Tensor, advantages: Tensor, old_probs: Tensor) -> Tensor:
        """The surrogate is f(ratio; A) * A. All arguments have one shape, which is the result's too."""
        return 1 + torch.tanh(self.sharpness * (ratio - 1)) / self.sharpness

    def df(self, ratio: Tensor, advantages: Tensor, old_probs: Tensor) -> Tensor:
        """The derivative of f by the ratio: the share of a token's signal that is let through. 1 at ratio 1."""
        return 1 - torch.tanh(self.sharpness * (ratio - 1)) ** 2
