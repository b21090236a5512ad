"""fp32 master weights under a bf16 or fp16 model, so that the sampler and the learner compute with the same numbers.

The optimizer steps the masters; the model holds their cast, which is also what the sampler receives. A master must not sit
in the middle of its rounding cell, or small steps would move nothing for many updates: it starts from the file's fp32
number, or, where the file holds no more than the cast, from a seeded place in the cell. Then even a tiny step carries its
share of the weights over to the next value. In fp32 the masters are the parameters themselves.
"""

from __future__ import annotations

from collections.abc import Mapping

import torch
from torch import Tensor

from grpo_lab.seeding import derive_seed


class MasterWeights:
    """fp32 masters of named parameters, and fp32 gradients gathered over micro-batches."""

    def __init__(
        self, parameters: Mapping[str, torch.nn.Parameter], saved: Mapping[str, Tensor], files: Mapping[str, Tensor]
    ) -> None:
        """`saved` are a checkpoint's masters, used as they are; else `files` are the numbers the model was read from."""
        self.parameters = dict(parameters)
        self.is_exact = all(p.dtype == torch.float32 for p in parameters.values())
        if self.is_exact:
            self.masters: dict[str, Tensor] = dict(parameters)
        elif saved:
            self.masters = {name: saved[name].to(p.device).float().clone() for name, p in parameters.items()}
        else:
            self.masters = {name: _start(p.detach(), files.get(name), name) for name, p in parameters.items()}

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
        """Cast the masters into the model. Returns the share of the step that did not arrive there.

        absorbed = 1 - <cast(new) - cast(old), new - old> / |new - old|^2 over all parameters, where `before` holds the old
        masters: 1 when the model stood still, 0 when on average the whole step arrived. (A ratio of norms would count the
        rounding's own noise as arrival.)
        """
        if self.is_exact:
            return 0.0
        arrived, wanted = 0.0, 0.0
        for name, parameter in self.parameters.items():
            cast, step = self.masters[name].to(parameter.dtype), self.masters[name] - before[name]
            arrived += float(((cast.float() - parameter.float()) * step).sum())
            wanted += float(step.square().sum())
            parameter.copy_(cast)
        return 1 - arrived / wanted if wanted else 0.0

    def snapshot(self) -> dict[str, Tensor]:
        """Copies of the masters, for `apply`; empty in fp32, where nothing can be absorbed."""
        return {} if self.is_exact else {name: master.detach().clone() for name, master in self.masters.items()}


def _start(parameter: Tensor, file: Tensor | None, name: str) -> Tensor:
    """The first master of a parameter: some fp32 number whose cast is the parameter itself."""
    exact = parameter.float()
    if file is not None:
        source = file.detach().to(parameter.device).float()
        if not torch.equal(source, exact):
            return source.clone()
    generator = torch.Generator().manual_seed(derive_seed(0, "master_weights", name))
    place = torch.rand(parameter.shape, generator=generator).to(parameter.device) - 0.5
    spacing = torch.finfo(parameter.dtype).eps * torch.ldexp(torch.ones_like(exact), torch.frexp(exact).exponent - 1)
    dithered = exact + 0.999 * place * spacing
    return torch.where((dithered.to(parameter.dtype) == parameter) & (parameter != 0), dithered, exact)
