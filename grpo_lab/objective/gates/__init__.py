"""Gates: one file = one gate. A file here that defines `Gate`, a frozen dataclass of its parameters, is a gate by its name.

A gate is f(ratio; A); the surrogate is J = f(ratio; A) * A and df = f'(ratio; A) is the share of the signal it lets through:
grad J = df * ratio * A * grad log pi. Every gate has df(1; A) = 1, so gates differ off-policy only.
"""

from collections.abc import Mapping
from dataclasses import fields, is_dataclass
from typing import Protocol

import torch
from torch import Tensor

from grpo_lab import plugins
from grpo_lab.config import Level
from grpo_lab.errors import ConfigError, in_words

PACKAGE = "grpo_lab.objective.gates"


class GateProtocol(Protocol):
    """`ratio`, `advantages` and `old_probs` have one shape [...]; both methods return that shape and change nothing.

    `old_probs` is the old policy's probability of the sampled token, for gates of probabilities; most gates ignore it.
    A gate that makes no sense at every level names those it does in a class attribute `levels`.
    """

    def f(self, ratio: Tensor, advantages: Tensor, old_probs: Tensor) -> Tensor: ...

    def df(self, ratio: Tensor, advantages: Tensor, old_probs: Tensor) -> Tensor: ...


def build_gate(name: str, options: Mapping[str, float], level: Level = "token") -> GateProtocol:
    """The gate `name` with `options`; ConfigError names the parameters it has when one is wrong, or its levels."""
    gate_class = plugins.load(PACKAGE, name, "Gate")
    if not isinstance(gate_class, type):
        raise ConfigError(
            f"gate {name!r} is a {type(gate_class).__name__}; a gate is a class with f and df(ratio, advantages, old_probs); "
            "its parameters are the fields of a dataclass"
        )
    allowed = [field.name for field in fields(gate_class)] if is_dataclass(gate_class) else []
    unknown = sorted(set(options) - set(allowed))
    if unknown:
        plain = "no parameters" if is_dataclass(gate_class) else "no parameters, which are the fields of a dataclass"
        raise ConfigError(
            f"objective.gate_options: gate {name!r} has no {unknown[0]!r}; it has: {', '.join(allowed) or plain}"
        )
    levels = getattr(gate_class, "levels", (level,))
    if level not in levels:
        raise ConfigError(
            f"objective.level={level} with objective.gate={name}: this gate is defined for single tokens' ratios; "
            f"it allows level {' or '.join(levels)}"
        )
    try:
        gate: GateProtocol = gate_class(**options)
    except Exception as error:
        raise ConfigError(f"gate {name!r} cannot be made with {dict(options)}: {in_words(error)}") from None
    _check_contract(gate, name)
    if plugins.is_outside(name):  # those of this folder are tested more closely
        _check_derivative(gate, name)
    return gate


def _check_contract(gate: GateProtocol, name: str) -> None:
    """A gate from outside may lack a method or an argument, and options may close a gate at ratio 1: said here, in one line."""
    ones = torch.ones(2)
    signs = torch.tensor([1.0, -1.0])
    for method in ("f", "df"):
        if not callable(getattr(gate, method, None)):
            raise ConfigError(
                f"gate {name!r} has no method {method}(ratio, advantages, old_probs); a gate has f and df"
            )
    try:
        value, slope = gate.f(ones, signs, ones / 2), gate.df(ones, signs, ones / 2)
    except Exception as error:
        raise ConfigError(
            f"gate {name!r}: f and df(ratio, advantages, old_probs) failed: {error!r}; see `clip` for one"
        ) from None
    for method, found in (("f", value), ("df", slope)):
        if getattr(found, "shape", None) != ones.shape:
            given = list(getattr(found, "shape", ())) or type(found).__name__
            raise ConfigError(
                f"gate {name!r}: {method} gave {given} for ratios of shape [2]; it must give the ratios' shape"
            )
    if not torch.isfinite(value).all() or not torch.allclose(slope.double(), ones.double(), atol=1e-6):
        raise ConfigError(
            f"gate {name!r} with {dict(vars(gate)) or 'no parameters'}: df at ratio 1 is {slope.tolist()} for A = 1 and -1; it "
            "must be 1, else the gate changes the gradient even on-policy; correct its parameters or its code"
        )


def _check_derivative(gate: GateProtocol, name: str, h: float = 1e-3, tolerance: float = 1e-2) -> None:
    """df must be the slope of f, from which it is read what the gate lets through; at a kink it may be that of either side."""
    ratios = torch.tensor([0.3, 0.55, 0.75, 0.9, 1.1, 1.25, 1.45, 1.8, 3.0])
    for sign in (1.0, -1.0):
        advantages, old_probs = torch.full_like(ratios, sign), torch.full_like(ratios, 0.3)
        rise = (gate.f(ratios + h, advantages, old_probs) - gate.f(ratios - h, advantages, old_probs)) / (2 * h)
        sides = torch.stack([gate.df(ratios + step, advantages, old_probs) for step in (-h, 0.0, h)])
        right = (rise >= sides.amin(dim=0) - tolerance) & (rise <= sides.amax(dim=0) + tolerance)
        if not right.all():
            ratio, slope, found = (values[~right][0].item() for values in (ratios, rise, sides[1]))
            raise ConfigError(
                f"gate {name!r}: at ratio {ratio:g} and A = {sign:g} df is {found:.4g}, but the slope of f is {slope:.4g}; "
                "df must be the derivative of f by the ratio; correct one of them"
            )
