"""A smooth gate: it closes slowest of all, with a kink in its slope at ratio 1."""

from dataclasses import dataclass

from torch import Tensor


@dataclass(frozen=True)
class Gate:
    """f' = 1 / (1 + |x|)^2 with x = tau (ratio - 1), for both signs of A; f(1) = 1.

    An admissible smooth gate in the sense of 2602.19345: differentiable, largest at ratio 1 where it is 1, falling to 0.
    """

    tau: float = 1.0

    def f(self, ratio: Tensor, advantages: Tensor, old_probs: Tensor) -> Tensor:
        x = self.tau * (ratio - 1)
        return 1 + x / (1 + x.abs()) / self.tau

    def df(self, ratio: Tensor, advantages: Tensor, old_probs: Tensor) -> Tensor:
        x = self.tau * (ratio - 1)
        return 1 / (1 + x.abs()).square()
