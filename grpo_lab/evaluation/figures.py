"""Kept evaluations -> figures, PNG and SVG: free energy, reward and KL, frontier, landscape over beta, the gap taken apart."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
from matplotlib.figure import Figure

from grpo_lab.drawing import BLUE, GREEN, GREY, ORANGE, counts_on, legend_below, save

Rows = Sequence[dict[str, Any]]


def draw_curves(rows: Rows, folder: Path) -> list[Path]:
    """Draw every figure of a run's evaluations (`Evaluation.to_json` each) into `folder`; returns the files.

    `rows` is in order of rollouts and not empty. The split of the gap is drawn where every row has it.
    """
    figures = {"free_energy": _free_energy(rows), "reward_kl": _reward_kl(rows)}
    if all(row["landscape"] for row in rows):  # an older version kept none of graded rewards
        figures |= {"frontier": _frontier(rows), "landscape": _landscape(rows)}
    if all(row["gap_split"] for row in rows):
        figures["gap_split"] = _gap_split(rows)
    return [path for name, figure in figures.items() for path in save(figure, folder / name)]


def draw_training(metrics: Rows, folder: Path) -> list[Path]:
    """Reward, KL, F and the gate's opening of the training batches (lines of metrics.jsonl, not empty), by rollouts."""
    figure = Figure(figsize=(6.4, 5.6), layout="constrained")
    x = [row["rollouts/total"] for row in metrics]
    panels = (
        ("reward/mean", "reward", BLUE),
        ("policy/kl_ref", "KL (nats)", ORANGE),
        ("gate/open_fraction", "gate open", GREEN),
    )
    every = figure.subplots(3, 1, sharex=True)
    for axes, (key, label, color) in zip(every, panels, strict=True):
        axes.plot(x, [row[key] for row in metrics], color=color, lw=1.4, marker="o" if len(x) < 40 else "", ms=3)
        axes.set_ylabel(label)
    every[0].set_title("Training batches")
    every[-1].set_xlabel("rollouts")
    counts_on(every[-1].xaxis)
    return save(figure, folder / "training")


def _free_energy(rows: Rows) -> Figure:
    figure = Figure(figsize=(6.4, 4.2), layout="constrained")
    axes = figure.add_subplot()
    x = [row["rollouts"] for row in rows]
    lower, upper = rows[0]["floor"]["lower"]["mean"], rows[0]["floor"]["upper"]["mean"]
    axes.axhspan(lower, upper, color=ORANGE, alpha=0.25, lw=1, label="Gibbs floor F*, bracket")
    axes.axhline(-rows[0]["reference_reward"]["mean"], color=GREY, ls="--", lw=1.2, label="reference, F = −E[r]")
    _errorbar(axes, x, rows, "free_energy", BLUE, f"F of the policy, β = {rows[0]['beta']:g} (±1 SE)")
    axes.set(xlabel="rollouts", ylabel="free energy F (reward units)", title="Free energy against rollouts")
    counts_on(axes.xaxis)
    legend_below(figure)
    return figure


def _reward_kl(rows: Rows) -> Figure:
    figure = Figure(figsize=(6.4, 5.2), layout="constrained")
    top, bottom = figure.subplots(2, 1, sharex=True)
    x = [row["rollouts"] for row in rows]
    _errorbar(top, x, rows, "reward", BLUE, "E[r]")
    _errorbar(bottom, x, rows, "kl", ORANGE, "k1")
    _errorbar(bottom, x, rows, "kl_rao_blackwell", GREEN, "Rao–Blackwell", marker="s")
    top.set(ylabel="reward E[r]", ylim=_reward_range(rows), title="Reward and KL on the held-out problems (±1 SE)")
    bottom.set(xlabel="rollouts", ylabel="KL to the reference\n(nats per sequence)")
    counts_on(bottom.xaxis)
    bottom.legend(frameon=False, fontsize=9)
    return figure


def _frontier(rows: Rows) -> Figure:
    """Where the Gibbs policies of every temperature lie: no policy has more reward for its KL."""
    figure = Figure(figsize=(6.4, 4.2), layout="constrained")
    axes = figure.add_subplot()
    frontier = rows[0]["landscape"]
    axes.plot(frontier["kl"], frontier["reward"], color=ORANGE, lw=1.8, label="Gibbs policies of all β (from the bank)")
    x, y = [row["kl"]["mean"] for row in rows], [row["reward"]["mean"] for row in rows]
    axes.plot(x, y, color=BLUE, marker="o", ms=5, lw=1, label="checkpoints, by rollouts")
    axes.set(xlabel="KL to the reference (nats per sequence)", ylabel="reward E[r]", title="Reward–KL frontier")
    low, high = _reward_range(rows)
    axes.set_ylim(low, max(high, max(frontier["reward"]) + 0.04))
    axes.margins(x=0.1)
    legend_below(figure)
    figure.draw_without_rendering()  # the layout is settled here, so that places on the page are known
    for row, kl, reward in _apart(rows, x, y, axes):
        offset = (5, 5 if reward < 0.1 else -11)
        label = f"{row['rollouts']:,}"
        axes.annotate(label, (kl, reward), xytext=offset, textcoords="offset points", fontsize=8, color=BLUE)
    return figure


def _landscape(rows: Rows) -> Figure:
    """F against beta: the floor's bracket, the reference, the last checkpoint; below, where the Gibbs policy changes most."""
    figure = Figure(figsize=(6.4, 5.6), layout="constrained")
    top, bottom = figure.subplots(2, 1, sharex=True, height_ratios=(2, 1))
    draw_landscape(top, bottom, rows[0]["landscape"], rows[0]["reference_reward"]["mean"], rows[0]["beta"])
    betas, last = np.array(rows[0]["landscape"]["beta"]), rows[-1]
    energy = betas * last["kl"]["mean"] - last["reward"]["mean"]
    shown = energy < 0.15
    top.plot(
        betas[shown], energy[shown], color=BLUE, lw=1.5, label=f"policy at {last['rollouts']:,} rollouts, −E[r] + β KL"
    )
    legend_below(figure, columns=2)
    return figure


def draw_landscape(
    top: Any, bottom: Any, landscape: dict[str, list[float]], reference: float, beta: float | None
) -> None:
    """The floor bracket and F of the reference on `top`, the heat capacity on `bottom`, over a logarithmic beta."""
    betas = landscape["beta"]
    top.fill_between(
        betas,
        landscape["floor_lower"],
        landscape["floor_upper"],
        color=ORANGE,
        alpha=0.3,
        lw=1,
        label="Gibbs floor F*, bracket",
    )
    top.axhline(-reference, color=GREY, ls="--", lw=1.2, label="reference, F = −E[r]")
    bottom.plot(betas, landscape["heat_capacity"], color=ORANGE, lw=1.5)
    for axes in (top, bottom):
        axes.set_xscale("log")
        if beta is not None:
            axes.axvline(beta, color=GREY, lw=0.8, ls=":")
    top.set(ylabel="free energy F (reward units)", title="Free-energy landscape over β")
    bottom.set(
        xlabel="β" + (f" (dotted: this run's {beta:g})" if beta is not None else ""), ylabel="heat capacity\nVar(r)/β²"
    )


def _gap_split(rows: Rows) -> Figure:
    figure = Figure(figsize=(6.4, 4.2), layout="constrained")
    axes = figure.add_subplot()
    wasted = np.array([row["gap_split"]["wasted"] for row in rows])
    tilt = np.array([row["gap_split"]["tilt"] for row in rows])
    places = np.arange(len(rows))
    axes.bar(places, tilt, color=BLUE, width=0.6, label="wrong tilt: β d(q‖q*)")
    axes.bar(
        places,
        wasted,
        bottom=np.where(wasted > 0, tilt, 0),
        color=ORANGE,
        width=0.6,
        label="wasted KL: β [KL − d(q‖p)]",
    )
    every = -(-len(rows) // 9)  # at most nine labels fit
    axes.set_xticks(places[::every], [f"{row['rollouts']:,}" for row in rows[::every]], fontsize=8.5)
    axes.set(xlabel="rollouts", ylabel="gap F − F* (reward units)", title="What the gap to the floor is made of")
    legend_below(figure)
    return figure


def _apart(rows: Rows, x: Sequence[float], y: Sequence[float], axes: Any) -> list[tuple[dict[str, Any], float, float]]:
    """The checkpoints whose labels do not run into one another; the last one always has its label."""
    kept: list[tuple[dict[str, Any], float, float]] = []
    taken: list[tuple[float, float]] = []
    for row, kl, reward in reversed(list(zip(rows, x, y, strict=True))):
        across, up = axes.transData.transform((kl, reward)) * 72 / axes.figure.dpi  # points on the page
        if all(abs(across - a) > 44 or abs(up - b) > 13 for a, b in taken):
            taken.append((across, up))
            kept.append((row, kl, reward))
    return kept


def _reward_range(rows: Rows) -> tuple[float, float]:
    """0 to 1, wider where a reward lies outside, with room for markers."""
    means = [row["reward"]["mean"] for row in rows]
    return min(0.0, *means) - 0.04, max(1.0, *means) + 0.04


def _errorbar(axes: Any, x: Sequence[int], rows: Rows, key: str, color: str, label: str, marker: str = "o") -> None:
    mean, error = [row[key]["mean"] for row in rows], [row[key]["se"] for row in rows]
    axes.errorbar(x, mean, yerr=error, color=color, marker=marker, ms=4, lw=1.5, capsize=3, label=label)
