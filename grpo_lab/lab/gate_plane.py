"""Gates on the plane of log-ratio and advantage: what they let through, what signal is left, and where a run's tokens lie."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
from matplotlib.figure import Figure
from matplotlib.ticker import MaxNLocator
from torch import Tensor

from grpo_lab.drawing import ORANGE, save
from grpo_lab.lab.recorded import RecordedStep
from grpo_lab.methods import gate_in_words
from grpo_lab.objective.axes import Objective
from grpo_lab.objective.gates import GateProtocol, build_gate
from grpo_lab.objective.record import trained_tokens

OLD_PROB = 0.5  # at which gates of probabilities are drawn
_WIDEST, _SIGNAL_LIMIT, _POINTS = 2.5, 3.0, 401


@dataclass(frozen=True)
class Cloud:
    """A run's trained tokens, [n] each: advantage, log-ratio, f' and the gradient mass |weight * signal| of each."""

    advantages: np.ndarray[Any, Any]
    log_rho: np.ndarray[Any, Any]
    opened: np.ndarray[Any, Any]
    mass: np.ndarray[Any, Any]


def token_cloud(steps: Sequence[RecordedStep], objective: Objective) -> Cloud:
    """The tokens of the recorded steps as `objective` sees them."""
    gate = build_gate(objective.gate, objective.gate_options, objective.level)
    parts: list[list[Tensor]] = []
    for step in steps:
        inputs = step.inputs(objective)
        tokens = trained_tokens(step.trained_logprobs, inputs, objective, gate)
        mass = tokens.signal.abs() * (inputs.weights * inputs.correction)[inputs.weights > 0].double()
        parts.append([tokens.advantages, tokens.log_rho, tokens.opened, mass])
    return Cloud(*(torch.cat(column).numpy() for column in zip(*parts, strict=True)))


def region_table(cloud: Cloud) -> list[str]:
    """The share of tokens and of gradient mass in every region of the plane; a region with neither is left out."""
    tokens, mass = max(len(cloud.mass), 1), max(cloud.mass.sum(), 1e-300)
    lines = [f"{'region':34}  {'tokens':>8}  {'gradient':>8}"]
    for name, where in regions(cloud).items():
        if where.any():
            lines.append(f"{name:34}  {where.sum() / tokens:>8.2%}  {cloud.mass[where].sum() / mass:>8.2%}")
    return lines


def regions(cloud: Cloud) -> dict[str, np.ndarray[Any, Any]]:
    """Masks [n] of the regions: by the advantage's sign, the side of ratio 1, and whether the gate is open (f' >= 1/2)."""
    signs = {"A > 0": cloud.advantages > 0, "A < 0": cloud.advantages < 0}
    sides = {"ratio < 1": cloud.log_rho < 0, "ratio = 1": cloud.log_rho == 0, "ratio > 1": cloud.log_rho > 0}
    gates = {"open": cloud.opened >= 0.5, "closed": cloud.opened < 0.5}
    found = {
        f"{sign}, {side}, {state}": a & b & c
        for sign, a in signs.items() for side, b in sides.items() for state, c in gates.items()
    }  # fmt: skip
    return {**found, "A = 0": cloud.advantages == 0}


def draw_gate(name: str, objective: Objective, stem: Path, cloud: Cloud | None = None) -> list[Path]:
    """f' and the learning signal f' * ratio * A side by side; the cloud's tokens lie over both.

    At level `geometric_mean` the ratio in the signal is the sequence's mean, drawn where that is 1.
    """
    figure = Figure(figsize=(10, 4.4), layout="constrained")
    left, right = figure.subplots(1, 2)
    reach = _reach(objective, cloud)
    images = _panels(left, right, objective, reach)
    for axes, image, label in ((left, images[0], "gate f′"), (right, images[1], "learning signal f′·ρ·A")):
        figure.colorbar(image, ax=axes, label=label, extend="both" if axes is right else "neither")
        axes.set(xlabel=_ratio_label(objective), ylabel="advantage A")
        if cloud is not None:
            size = min(0.6, 60 / max(len(cloud.mass), 1) ** 0.5)
            axes.scatter(
                cloud.log_rho, cloud.advantages, s=5, color=ORANGE if axes is left else "black", alpha=size, lw=0
            )
    if cloud is not None:
        _label_quadrants(right, cloud)
    figure.suptitle(_title(name, objective), fontsize=11)
    return save(figure, stem, grid=False)


def _label_quadrants(axes: Any, cloud: Cloud) -> None:
    """The share of tokens and of gradient mass in each corner of the plane."""
    mass = max(float(cloud.mass.sum()), 1e-300)
    for up, across, where in (
        (0.97, 0.02, (cloud.advantages > 0) & (cloud.log_rho < 0)),
        (0.97, 0.98, (cloud.advantages > 0) & (cloud.log_rho >= 0)),
        (0.03, 0.02, (cloud.advantages < 0) & (cloud.log_rho < 0)),
        (0.03, 0.98, (cloud.advantages < 0) & (cloud.log_rho >= 0)),
    ):
        text = f"{where.mean():.0%} of tokens\n{cloud.mass[where].sum() / mass:.0%} of gradient"
        place = {"ha": "left" if across < 0.5 else "right", "va": "top" if up > 0.5 else "bottom"}
        box = {"boxstyle": "round", "fc": "white", "ec": "none", "alpha": 0.8}
        axes.text(across, up, text, transform=axes.transAxes, fontsize=8, bbox=box, **place)


def draw_overview(objectives: Mapping[str, Objective], stem: Path, columns: int = 6) -> list[Path]:
    """Every gate at a glance: f' above, the learning signal below it."""
    columns = min(columns, len(objectives))
    bands = -(-len(objectives) // columns)
    figure = Figure(figsize=(2.35 * columns + 0.9, 4.3 * bands), layout="constrained")
    grid = figure.subplots(2 * bands, columns, squeeze=False)
    images: tuple[Any, Any] = (None, None)
    for index, (name, objective) in enumerate(objectives.items()):
        band, column = divmod(index, columns)
        top, bottom = grid[2 * band, column], grid[2 * band + 1, column]
        images = _panels(top, bottom, objective, _reach(objective, None))
        top.set_title(name, fontsize=10)
        top.tick_params(labelbottom=False)
        bottom.set_xlabel("log ρ" if objective.level in ("token", "geometric_mean") else "log ρ, sequence", fontsize=9)
        for axes in (top, bottom):
            axes.tick_params(labelsize=7.5, labelleft=column == 0)
            axes.xaxis.set_major_locator(MaxNLocator(4, symmetric=True))
            if column == 0:
                axes.set_ylabel("advantage A", fontsize=9)
    for axes in grid.flat:
        if not axes.has_data():
            axes.set_axis_off()
    look: dict[str, Any] = {
        "ax": grid,
        "location": "bottom",
        "shrink": 0.4,
        "aspect": 50,
        "pad": 0.02,
        "fraction": 0.05,
    }
    figure.colorbar(images[1], label="learning signal f′·ρ·A (lower panels)", extend="both", **look)
    figure.colorbar(images[0], label="gate f′ (upper panels)", **look)
    return save(figure, stem, grid=False)


def _panels(left: Any, right: Any, objective: Objective, reach: tuple[float, float]) -> tuple[Any, Any]:
    gate = build_gate(objective.gate, objective.gate_options, objective.level)
    x, y = (
        torch.linspace(-reach[0], reach[0], _POINTS, dtype=torch.float64),
        torch.linspace(-reach[1], reach[1], _POINTS, dtype=torch.float64),
    )
    advantages, log_rho = torch.meshgrid(y, x, indexing="ij")
    opened = gate.df(log_rho.exp(), advantages, torch.full_like(log_rho, OLD_PROB))
    weight = torch.ones_like(log_rho) if objective.level == "geometric_mean" else log_rho.exp()
    limit = _SIGNAL_LIMIT * reach[1] / 2
    look = {"extent": (-reach[0], reach[0], -reach[1], reach[1]), "origin": "lower", "aspect": "auto"}
    first = left.imshow(opened, cmap="viridis", vmin=0, vmax=1, **look)
    second = right.imshow(opened * weight * advantages, cmap="RdBu_r", vmin=-limit, vmax=limit, **look)
    for axes in (left, right):
        axes.set(xlim=(-reach[0], reach[0]), ylim=(-reach[1], reach[1]), autoscale_on=False)
        axes.axvline(0, color="white" if axes is left else "black", lw=0.6, ls=":")
        axes.axhline(0, color="white" if axes is left else "black", lw=0.6, ls=":")
        if opened.min() < 0.5:
            axes.contour(log_rho, advantages, opened, levels=[0.5], colors="black", linewidths=0.8)
    return first, second


def _reach(objective: Objective, cloud: Cloud | None) -> tuple[float, float]:
    """Half-widths of the plane: the log-ratios at which the gate acts or the cloud lies, and the advantages."""
    gate = build_gate(objective.gate, objective.gate_options, objective.level)
    edge = _edge(gate)
    width = 4 * edge if edge < 0.02 else _WIDEST
    if cloud is None or not len(cloud.mass):
        return width, 2.0
    height = 1.15 * max(float(np.abs(cloud.advantages).max()), 1e-6)
    spread = min(1.1 * float(np.abs(cloud.log_rho).max()), 2 * _WIDEST)
    return max(width if edge < 0.02 else 0.5, spread), height


def _edge(gate: GateProtocol) -> float:
    """The smallest |log ratio| at which f' falls below 1/2 for some sign of A; infinite where it never does."""
    x = torch.logspace(-5, 1, 2000, dtype=torch.float64)
    both = torch.cat([x, -x])
    half = torch.full_like(both, OLD_PROB)
    closed = [gate.df(both.exp(), torch.full_like(both, sign), half) < 0.5 for sign in (1.0, -1.0)]
    reached = both.abs()[closed[0] | closed[1]]
    return float(reached.min()) if len(reached) else float("inf")


def _ratio_label(objective: Objective) -> str:
    names = {"token": "log ρ of the token", "geometric_mean": "log ρ of the token, before the geometric mean"}
    return names.get(objective.level, "log ρ of the sequence, mean over its tokens")


def _title(name: str, objective: Objective) -> str:
    at = f", drawn at π_old = {OLD_PROB:g}" if objective.gate in ("total_variation", "probability_window") else ""
    return f"{name}: gate {gate_in_words(objective.gate, objective.gate_options)}{at}"
