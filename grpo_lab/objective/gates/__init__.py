"""Gates: one file = one gate. A file here that defines `Gate`, a frozen dataclass of its parameters, is a gate by its name.

A gate is f(ratio; A); the surrogate is J = f(ratio; A) * A and df = f'(ratio; A) is the share of the signal it lets through:
grad J = df * ratio * A * grad log pi. Every gate has df(1; A) = 1, so gates differ off-policy only.
"""

from collections.abc import Mapping
from typing import Protocol

from torch import Tensor

from grpo_lab import plugins
from grpo_lab.errors import ConfigError


class GateProtocol(Protocol):
    """`ratio` and `advantages` broadcast to the same shape [...]; both methods return that shape and change nothing."""

    def f(self, ratio: Tensor, advantages: Tensor) -> Tensor: ...

    def df(self, ratio: Tensor, advantages: Tensor) -> Tensor: ...


def build_gate(name: str, options: Mapping[str, float]) -> GateProtocol:
    """The gate `name` with `options`; ConfigError names the parameters it has when one is wrong."""
    gate_class = plugins.load("grpo_lab.objective.gates", name, "Gate")
    allowed = getattr(gate_class, "__dataclass_fields__", {})
    unknown = sorted(set(options) - set(allowed))
    if unknown:
        raise ConfigError(
            f"objective.gate_options: gate {name!r} has no {unknown[0]!r}; it has: {', '.join(allowed) or 'no parameters'}"
        )
    gate: GateProtocol = gate_class(**options)
    return gate
