"""Kept evaluations -> figures, PNG and SVG: free energy, reward and KL, the reward-KL frontier, the gap taken apart."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
from matplotlib.figure import Figure

BLUE, ORANGE, GREEN, GREY = "#0072B2", "#D55E00", "#009E73", "#666666"
Rows = Sequence[dict[str, Any]]


def draw_curves(rows: Rows, folder: Path) -> list[Path]:
    """Draw every figure of one run's evaluations (as `Evaluation.to_json` gives them) into `folder`; returns the files."""
    folder.mkdir(parents=True, exist_ok=True)
    figures = {"free_energy": _free_energy(rows), "reward_kl": _reward_kl(rows), "frontier": _frontier(rows)}
    if all(row["gap_split"] for row in rows):
        figures["gap_split"] = _gap_split(rows)
    return [path for name, figure in figures.items() for path in _save(figure, folder / name)]


def _free_energy(rows: Rows) -> Figure:
    figure = Figure(figsize=(6.4, 4.2), layout="constrained")
    axes = figure.add_subplot()
    x = [row["rollouts"] for row in rows]
    lower, upper = rows[0]["floor"]["lower"]["mean"], rows[0]["floor"]["upper"]["mean"]
    axes.axhspan(lower, upper, color=ORANGE, alpha=0.25, lw=0, label="Gibbs floor F*, bracket")
    axes.axhline(-rows[0]["reference_reward"]["mean"], color=GREY, ls="--", lw=1.2, label="reference, F = −E[r]")
    _errorbar(axes, x, rows, "free_energy", BLUE, f"F of the policy, β = {rows[0]['beta']:g} (±1 SE)")
    axes.set(xlabel="rollouts", ylabel="free energy F (reward units)", title="Free energy against rollouts")
    axes.legend(frameon=False, fontsize=9)
    return figure


def _reward_kl(rows: Rows) -> Figure:
    figure = Figure(figsize=(6.4, 5.2), layout="constrained")
    top, bottom = figure.subplots(2, 1, sharex=True)
    x = [row["rollouts"] for row in rows]
    _errorbar(top, x, rows, "reward", BLUE, "E[r]")
    _errorbar(bottom, x, rows, "kl", ORANGE, "k1")
    _errorbar(bottom, x, rows, "kl_rao_blackwell", GREEN, "Rao–Blackwell")
    top.set(ylabel="E[r]", ylim=(0, 1.02), title="Reward and KL on the held-out problems (±1 SE)")
    bottom.set(xlabel="rollouts", ylabel="KL to the reference\n(nats per sequence)")
    bottom.legend(frameon=False, fontsize=9)
    return figure


def _frontier(rows: Rows) -> Figure:
    """Where the Gibbs policies of every temperature lie: no policy has more reward for its KL."""
    figure = Figure(figsize=(6.4, 4.2), layout="constrained")
    axes = figure.add_subplot()
    frontier = rows[0]["frontier"]
    axes.plot(frontier["kl"], frontier["reward"], color=ORANGE, lw=1.8, label="Gibbs policies of all β (from the bank)")
    x, y = [row["kl"]["mean"] for row in rows], [row["reward"]["mean"] for row in rows]
    axes.plot(x, y, color=BLUE, marker="o", ms=5, lw=1, label="checkpoints, by rollouts")
    for row, kl, reward in zip(rows, x, y, strict=True):
        axes.annotate(
            f"{row['rollouts']:,}", (kl, reward), xytext=(6, -10), textcoords="offset points", fontsize=8, color=BLUE
        )
    axes.set(
        xlabel="KL to the reference (nats per sequence)", ylabel="E[r]", ylim=(0, 1.05), title="Reward–KL frontier"
    )
    axes.margins(x=0.08)
    axes.legend(frameon=False, fontsize=9, loc="lower right")
    return figure


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
    axes.set_xticks(places, [f"{row['rollouts']:,}" for row in rows])
    axes.set(xlabel="rollouts", ylabel="gap F − F* (reward units)", title="What the gap to the floor is made of")
    axes.legend(frameon=False, fontsize=9)
    return figure


def _errorbar(axes: Any, x: Sequence[int], rows: Rows, key: str, color: str, label: str) -> None:
    mean, error = [row[key]["mean"] for row in rows], [row[key]["se"] for row in rows]
    axes.errorbar(x, mean, yerr=error, color=color, marker="o", ms=4, lw=1.5, capsize=3, label=label)


def _save(figure: Figure, stem: Path) -> list[Path]:
    for axes in figure.axes:
        axes.spines[["top", "right"]].set_visible(False)
        axes.grid(alpha=0.25)
    paths = [stem.with_suffix(".png"), stem.with_suffix(".svg")]
    for path in paths:
        figure.savefig(path, dpi=150)
    return paths
