"""Figures of a comparison: F against rollouts for every beta, and E[r] against KL beside the Gibbs frontier."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
from matplotlib.figure import Figure

from grpo_lab.drawing import GREY, PALETTE, counts_on, legend_below, plain, save
from grpo_lab.evaluation.arms import Arm
from grpo_lab.evaluation.contrast_table import Comparison
from grpo_lab.thermo.statistics import Estimate

MARKERS = "osD^vP*X"


def draw_comparison(made: Comparison, folder: Path) -> list[Path]:
    """Write both figures as PNG and SVG; returns the files."""
    return [*save(_free_energies(made), folder / "equal_rollouts"), *save(_frontier(made), folder / "equal_kl")]


def _free_energies(made: Comparison) -> Figure:
    columns = min(len(made.betas), 3)
    rows = -(-len(made.betas) // columns)
    size = (max(7.0, 4.2 * columns), 3.6 * rows + 0.5 + 0.11 * len(made.arms))
    figure = Figure(figsize=size, layout="constrained")
    grid = figure.subplots(rows, columns, sharex=True, squeeze=False)
    for axes in grid.flat[len(made.betas) :]:
        axes.set_axis_off()
    for number, (axes, beta) in enumerate(zip(grid.flat, made.betas, strict=False)):
        _floor_and_reference(axes, made.arms[0], beta, named=number == 0)
        for index, arm in enumerate(made.arms):
            x = [point.rollouts for point in arm.path]
            label = _labels(made.arms)[arm.name] if number == 0 else ""
            _curve(axes, x, [point.free_energy(beta) for point in arm.path], _look(index), label)
            for path in arm.replicates if len(arm.runs) > 1 else ():
                y = [point.free_energy(beta).mean for point in path]
                axes.plot([point.rollouts for point in path], y, color=_look(index)["color"], lw=0.7, alpha=0.5)
        axes.set_title(f"β = {beta:g}", fontsize=10)
        counts_on(axes.xaxis, most=5)
        axes.set_xlabel("rollouts")
    for axes in grid[:, 0]:
        axes.set_ylabel("free energy F (reward units)")
    if any(len(arm.runs) > 1 for arm in made.arms):
        grid[0, 0].plot([], [], color=GREY, lw=0.7, label="thin: single seeds")
    figure.suptitle("At equal rollouts: free energy (±1 SE over problems)", fontsize=11)
    legend_below(figure, columns=2)
    return figure


def _floor_and_reference(axes: Any, arm: Arm, beta: float, named: bool) -> None:
    start = arm.path[0]
    floor = start.floor(beta)
    if floor:
        label = "Gibbs floor F*, bracket" if named else ""
        axes.axhspan(*floor, facecolor=GREY, alpha=0.18, lw=0, label=label)
    label = "reference, F = −E[r]" if named else ""
    axes.axhline(-start.reference_reward, color=GREY, ls="--", lw=1.1, label=label)


def _frontier(made: Comparison) -> Figure:
    figure = Figure(figsize=(7.0, 4.4 + 0.11 * len(made.arms)), layout="constrained")
    axes = figure.add_subplot()
    landscape = made.arms[0].path[0].rows[0]["landscape"]
    reached = max(point.kl.mean for arm in made.arms for point in arm.path)
    if landscape:
        kl, reward = np.array(landscape["kl"]), np.array(landscape["reward"])
        shown = kl <= max(1.1 * reached, 0.1)
        label = "Gibbs policies of all β (from the bank)"
        axes.plot(kl[shown], reward[shown], color=GREY, lw=1.6, ls="--", label=label)
    for index, arm in enumerate(made.arms):
        _path(axes, [point.kl for point in arm.path], [point.reward for point in arm.path], index)
        axes.plot([], [], label=_labels(made.arms)[arm.name], lw=1.6, ms=5, **_look(index))
    for number, level in enumerate(made.levels):
        axes.axvline(level, color=GREY, lw=0.6, ls=":", zorder=0, label="" if number else "where rewards are compared")
    axes.set(xlabel="KL to the reference (nats per sequence, Rao–Blackwell)", ylabel="reward E[r]")
    axes.set_title("At equal KL: reward (±1 SE over problems)", fontsize=11)
    axes.margins(x=0.06)
    legend_below(figure, columns=2)
    figure.draw_without_rendering()  # the layout is settled here, so that places on the page are known
    _name_ends(axes, made.arms)
    return figure


def _name_ends(axes: Any, arms: Sequence[Arm]) -> None:
    """Each arm's letter beside its last point, above those it would lie on."""
    taken: list[tuple[float, float]] = []
    for index, arm in enumerate(arms):
        end = (arm.path[-1].kl.mean, arm.path[-1].reward.mean)
        across, up = axes.transData.transform(end) * 72 / axes.figure.dpi  # points on the page
        shift = -3.0
        while any(abs(across - a) < 9 and abs(up + shift - b) < 10 for a, b in taken):
            shift += 10
        taken.append((across, up + shift))
        look = {"color": _look(index)["color"], "fontsize": 9}
        axes.annotate(arm.name, end, xytext=(7, shift), textcoords="offset points", **look)


def _curve(axes: Any, x: Sequence[float], estimates: Sequence[Estimate], look: dict[str, Any], label: str) -> None:
    """A line through the means with a band of one standard error; no band where the error is not known."""
    mean, error = (np.array([getattr(estimate, key) for estimate in estimates]) for key in ("mean", "se"))
    axes.plot(x, mean, label=label, lw=1.6, ms=5, **look)
    axes.fill_between(x, mean - error, mean + error, color=look["color"], alpha=0.15, lw=0)


def _path(axes: Any, across: Sequence[Estimate], up: Sequence[Estimate], index: int) -> None:
    """A line through the means, which may turn back, with the errors of both where they are known."""
    (x, x_error), (y, y_error) = (np.array([(one.mean, one.se) for one in each]).T for each in (across, up))
    errors = {"xerr": np.nan_to_num(x_error), "yerr": np.nan_to_num(y_error)}
    axes.errorbar(x, y, **errors, lw=1.6, ms=5, elinewidth=0.9, capsize=0, **_look(index))


def _look(index: int) -> dict[str, Any]:
    """Colour and marker of an arm; the line changes too once the colours are used up."""
    return {
        "color": PALETTE[index % len(PALETTE)],
        "marker": MARKERS[index % len(MARKERS)],
        "ls": ("-", "--", ":", "-.")[index // len(PALETTE) % 4],
    }


def _labels(arms: Sequence[Arm]) -> dict[str, str]:
    """A legend's text for each arm; arms that look alike get the name of their folder."""
    counts = Counter(arm.label for arm in arms)
    more = {arm.name: f" ({plain(arm.runs[0].path.name)})" if counts[arm.label] > 1 else "" for arm in arms}
    seeds = {arm.name: f", {len(arm.runs)} seeds" if len(arm.runs) > 1 else "" for arm in arms}
    return {arm.name: f"{arm.name}: {arm.label}{seeds[arm.name]}{more[arm.name]}" for arm in arms}
