"""fp32 master weights under a bf16 or fp16 model, so that the sampler and the learner compute with the same numbers.

The optimizer steps the masters; the model holds their cast, which is also what the sampler receives. Small updates add up
in the masters instead of vanishing in the rounding. In fp32 the masters are the parameters themselves.
"""

from __future__ import annotations

from collections.abc import Mapping

import torch
from torch import Tensor


class MasterWeights:
    """fp32 masters of named parameters, and fp32 gradients gathered over micro-batches."""

    def __init__(self, parameters: Mapping[str, torch.nn.Parameter], masters: Mapping[str, Tensor] | None = None) -> None:
        self.parameters = dict(parameters)
        self.is_exact = all(p.dtype == torch.float32 for p in parameters.values())
        if self.is_exact:
            self.masters: dict[str, Tensor] = dict(parameters)
        else:
            source = masters or parameters
            self.masters = {name: source[name].detach().to(p.device).float().clone() for name, p in parameters.items()}

    def gather_gradients(self, scale: float) -> None:
        """Add the parameters' gradients, divided by `scale`, to the masters'; in fp32 they are already there."""
        if self.is_exact:
            return
        for name, parameter in self.parameters.items():
            if parameter.grad is not None:
                master = self.masters[name]
                gradient = parameter.grad.float() / scale
                master.grad = gradient if master.grad is None else master.grad + gradient
                parameter.grad = None

    @torch.no_grad()
    def apply(self, before: Mapping[str, Tensor]) -> float:
        """Cast the masters into the model. Returns the share of the step lost in the rounding.

        absorbed = 1 - |cast(new) - cast(old)| / |new - old| over all parameters, where `before` holds the old masters.
        """
        if self.is_exact:
            return 0.0
        moved, wanted = 0.0, 0.0
        for name, parameter in self.parameters.items():
            cast = self.masters[name].to(parameter.dtype)
            moved += float((cast.float() - parameter.float()).square().sum())
            wanted += float((self.masters[name] - before[name]).square().sum())
            parameter.copy_(cast)
        return 1 - (moved / wanted) ** 0.5 if wanted else 0.0

    def snapshot(self) -> dict[str, Tensor]:
        """Copies of the masters, for `apply`; empty in fp32, where nothing can be absorbed."""
        return {} if self.is_exact else {name: master.detach().clone() for name, master in self.masters.items()}
