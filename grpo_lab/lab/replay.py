"""Saved rollouts through other objectives: the loss, the gradient and the gate each of them would have had."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from grpo_lab import plugins
from grpo_lab.config import Config
from grpo_lab.config.file import build_config
from grpo_lab.errors import ConfigError, unknown_name
from grpo_lab.lab.recorded import RecordedStep
from grpo_lab.methods import METHODS
from grpo_lab.objective.axes import Objective, resolve
from grpo_lab.objective.gates import PACKAGE, build_gate
from grpo_lab.objective.loss import policy_loss
from grpo_lab.objective.record import gate_record

RECIPES = ("free_energy", "paper")


@dataclass(frozen=True)
class Replayed:
    """One objective on the recorded batch; `gradient` is the loss's, flat, by token log-prob or by parameter."""

    name: str
    loss: float
    gradient: Tensor
    record: Mapping[str, float]

    @property
    def norm(self) -> float:
        return float(self.gradient.norm())


def named_objective(config: Config, name: str) -> Objective:
    """`method`, `method:recipe` or `gate` -> its objective under the run's beta and lengths; ConfigError names what is allowed.

    A method or gate comes with its own axes: what the run overrode in `objective` belongs to the run. A gate comes with the
    free-energy recipe and its default parameters.
    """
    method, _, recipe = name.partition(":")
    if method not in METHODS:
        method, recipe = name, ""  # a gate of another file is named module:Class
    recipe = recipe or config.recipe
    if recipe not in RECIPES:
        raise unknown_name("recipe", recipe, RECIPES)
    gates = plugins.names(PACKAGE)
    is_gate = method not in METHODS and (method in gates or plugins.is_outside(method))
    if method not in METHODS and not is_gate:
        raise unknown_name("method or gate", method, [*METHODS, *gates])
    chosen = (
        {"method": "reinforce", "recipe": "free_energy", "objective": {"gate": method}}
        if is_gate
        else {"method": method, "recipe": recipe, "objective": {}}
    )
    tree = {**config.model_dump(mode="json"), **chosen}
    objective = resolve(build_config(tree, name))
    build_gate(objective.gate, objective.gate_options, objective.level)
    return objective


def replay(step: RecordedStep, objectives: Mapping[str, Objective]) -> list[Replayed]:
    """Loss, gradient by token log-prob and gate record of every objective, where the tokens were trained."""
    results = []
    for name, objective in objectives.items():
        gate = build_gate(objective.gate, objective.gate_options, objective.level)
        inputs = step.inputs(objective)
        logprobs = step.trained_logprobs.clone().requires_grad_()
        loss = policy_loss(logprobs, inputs, objective, gate)
        (gradient,) = torch.autograd.grad(loss, logprobs)
        record = gate_record(step.trained_logprobs, inputs, objective, gate)
        results.append(Replayed(name, float(loss.detach()), gradient.flatten(), record))
    return results


def cosines(results: Sequence[Replayed]) -> list[list[float | None]]:
    """Cosine of every pair of gradients; None where one of them is 0."""
    unit = [r.gradient / r.norm if r.norm else None for r in results]
    return [[None if a is None or b is None else float(a @ b) for b in unit] for a in unit]


def table(results: Sequence[Replayed]) -> list[str]:
    """Two tables: what each objective does to the batch, and how far their gradients agree."""
    width = max(len(r.name) for r in results)
    columns = {
        "open": "gate/open_fraction",
        "A>0": "gate/open_fraction_positive",
        "A<0": "gate/open_fraction_negative",
        "mean f'": "gate/mean",
        "ess": "gate/ess",
        ">0.1": "gate/signal_beyond_0.1",
        ">0.5": "gate/signal_beyond_0.5",
    }
    lines = [f"{'':{width}}  {'loss':>10}  {'|gradient|':>10}  " + "  ".join(f"{head:>7}" for head in columns)]
    for r in results:
        cells = "  ".join(f"{r.record[key]:>7.3f}" for key in columns.values())
        lines.append(f"{r.name:{width}}  {r.loss:>+10.5f}  {r.norm:>10.3e}  {cells}")
    lines += ["", f"{'cosine':{width}}  " + "  ".join(f"{r.name[:12]:>12}" for r in results)]
    for r, row in zip(results, cosines(results), strict=True):
        lines.append(
            f"{r.name:{width}}  " + "  ".join(f"{'-' if value is None else f'{value:.4f}':>12}" for value in row)
        )
    return lines


def to_json(step: RecordedStep, results: Sequence[Replayed]) -> dict[str, Any]:
    """Every number of the tables."""
    rows = [{"name": r.name, "loss": r.loss, "gradient_norm": r.norm, **r.record} for r in results]
    return {"step": step.step, "objectives": rows, "cosines": cosines(results)}


def objectives_of(config: Config, names: Sequence[str]) -> dict[str, Objective]:
    """The run's own objective first, then the named ones. ConfigError for an unknown or repeated name."""
    if len(set(names)) < len(names):
        raise ConfigError(f"--methods {','.join(names)}: every name once")
    own = f"run: {config.method}"
    return {own: resolve(config), **{name: named_objective(config, name) for name in names}}
