"""Several runs side by side: one table of their last evaluations, and F against rollouts for every beta with its floor."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from matplotlib.figure import Figure

from grpo_lab.drawing import GREY, PALETTE, counts_on, legend_below, plain, save
from grpo_lab.evaluation.columns import aligned
from grpo_lab.evaluation.kept import read_evaluations
from grpo_lab.run_dir import RunDir
from grpo_lab.thermo.statistics import Estimate


@dataclass(frozen=True)
class Compared:
    """One run with its evaluations by rollouts."""

    name: str
    method: str
    recipe: str
    beta: float
    seed: int
    rows: list[dict[str, Any]]


def compared(runs: Sequence[RunDir]) -> list[Compared]:
    """The runs that have at least one evaluation, in their order."""
    found = []
    for run in runs:
        rows, config = read_evaluations(run), run.config
        if rows:
            found.append(Compared(run.path.name, config.method, config.recipe, config.beta, config.seed, rows))
    return found


HEAD = (
    "method",
    "recipe",
    "beta",
    "seed",
    "rollouts",
    "E[r]",
    "KL (RB)",
    "F",
    "F - F_ref",
    "floor F*",
    "wasted",
    "tilt",
)


def cells(item: Compared) -> list[str]:
    """The last evaluation of a run as text, by `HEAD`."""
    row = item.rows[-1]
    shown = [str(Estimate(**row[key])) for key in ("reward", "kl_rao_blackwell", "free_energy", "against_reference")]
    floor = f"[{row['floor']['lower']['mean']:+.3f}, {row['floor']['upper']['mean']:+.3f}]"
    split = [f"{row['gap_split'][key]:.3f}" for key in ("wasted", "tilt")] if row["gap_split"] else ["", ""]
    return [item.method, item.recipe, f"{item.beta:g}", str(item.seed), f"{row['rollouts']:,}", *shown, floor, *split]


def table(items: Sequence[Compared]) -> list[str]:
    """One line a run. KL is Rao-Blackwell; wasted KL and wrong tilt, of binary rewards, add up to the gap, in units of F."""
    return aligned([HEAD, *(cells(item) for item in items)])


def draw(items: Sequence[Compared], stem: Path) -> list[Path]:
    """F against rollouts, one panel a method and recipe, one colour a beta; its floor bracket is dashed, the reference grey.

    Runs that differ in none of these nor in the seed have a colour each, and their names.
    """
    panels = list(dict.fromkeys((item.method, item.recipe) for item in items))
    alike = len({(item.method, item.recipe, item.beta, item.seed) for item in items}) < len(items)
    label = lambda item: (f"{plain(item.name)}, " if alike else "") + f"β = {item.beta:g} (±1 SE)"  # noqa: E731
    labels = dict.fromkeys(label(item) for item in sorted(items, key=lambda item: item.beta))
    colors = {text: PALETTE[index % len(PALETTE)] for index, text in enumerate(labels)}
    columns = min(len(panels), 4)
    bands = -(-len(panels) // columns)
    figure = Figure(figsize=(max(7.0, 3.6 * columns + 0.6), 3.7 * bands + 0.5), layout="constrained")
    grid = figure.subplots(bands, columns, sharex=True, sharey=True, squeeze=False)
    for axes in grid.flat[len(panels) :]:
        axes.set_axis_off()
    for axes, (method, recipe) in zip(grid.flat, panels, strict=False):
        for item in (item for item in items if (item.method, item.recipe) == (method, recipe)):
            _curve(axes, item, colors[label(item)])
        axes.set_title(f"{method}, {recipe}", fontsize=10)
        axes.set_xlabel("rollouts")
        counts_on(axes.xaxis, most=5)
    for axes in grid[:, 0]:
        axes.set_ylabel("free energy F (reward units)")
    for text, color in colors.items():
        figure.axes[0].plot([], [], color=color, marker="o", ms=4, label=text)
    figure.axes[0].plot([], [], color=GREY, ls="--", lw=1, label="floor bracket of each β")
    figure.axes[0].plot([], [], color=GREY, lw=1, ls=":", label="reference, F = −E[r]")
    legend_below(figure, columns=min(len(colors) + 2, 2 * columns))
    return save(figure, stem)


def _curve(axes: Any, item: Compared, color: str) -> None:
    x = [row["rollouts"] for row in item.rows]
    y, error = ([row["free_energy"][key] for row in item.rows] for key in ("mean", "se"))
    axes.errorbar(x, y, yerr=error, color=color, marker="o", ms=4, lw=1.4, capsize=2)
    for end in ("lower", "upper"):
        axes.axhline(item.rows[0]["floor"][end]["mean"], color=color, ls="--", lw=0.9, alpha=0.8)
    axes.axhline(-item.rows[0]["reference_reward"]["mean"], color=GREY, ls=":", lw=1)
