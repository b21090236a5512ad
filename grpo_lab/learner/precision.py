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

from grpo_lab.learner.sharding import whole
from grpo_lab.seeding import derive_seed


class MasterWeights:
    """fp32 masters of named parameters, and fp32 gradients gathered over micro-batches.

    The parameters may be the masters themselves: in fp32, and where the model is sharded and casts what it gathers.
    """

    def __init__(
        self, parameters: Mapping[str, torch.nn.Parameter], masters: Mapping[str, Tensor], compute_dtype: torch.dtype
    ) -> None:
        self.masters = dict(masters)
        self.is_exact = compute_dtype == torch.float32
        self._casts = {name: p for name, p in parameters.items() if p is not masters[name]}
        self._dtype = compute_dtype

    def gather_gradients(self, scale: float) -> None:
        """Add the parameters' gradients, divided by `scale`, to the masters'; they may be there already."""
        for name, parameter in self._casts.items():
            if parameter.grad is not None:
                master = self.masters[name]
                if master.grad is None:
                    master.grad = torch.zeros_like(master)
                master.grad.add_(parameter.grad, alpha=1 / scale)
                parameter.grad = None

    def unscale(self, scale: float) -> None:
        """Divide the gradients of a whole batch by `scale` where `gather_gradients` has not."""
        for name, master in self.masters.items():
            if scale != 1 and name not in self._casts and master.grad is not None:
                master.grad.div_(scale)

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
        for name, master in self.masters.items():
            cast, step = master.to(self._dtype), master - before[name]
            arrived += float(whole(cast.float().sub_(before[name].to(self._dtype)).mul_(step).sum()))
            wanted += float(whole(step.square_().sum()))
            if name in self._casts:
                self._casts[name].copy_(cast)
        return 1 - arrived / wanted if wanted else 0.0

    def snapshot(self) -> dict[str, Tensor]:
        """Copies of the masters, for `apply`; empty in fp32, where nothing can be absorbed."""
        return {} if self.is_exact else {name: master.detach().clone() for name, master in self.masters.items()}


def first_masters(
    parameters: Mapping[str, torch.nn.Parameter], saved: Mapping[str, Tensor], files: Mapping[str, Tensor]
) -> dict[str, Tensor]:
    """The masters a run starts from: in fp32 the parameters themselves, else `saved` (a checkpoint's, as they are), else from
    `files`, the numbers the model was read from."""
    if all(p.dtype == torch.float32 for p in parameters.values()):
        return dict(parameters)
    if saved:
        return {name: saved[name].to(p.device).float().clone() for name, p in parameters.items()}
    return {name: _start(p.detach(), files.get(name), name) for name, p in parameters.items()}


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
