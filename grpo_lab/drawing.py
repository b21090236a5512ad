"""What every figure shares: colours that survive colour blindness, quiet axes, and files as PNG and SVG."""

from __future__ import annotations

from pathlib import Path
from typing import Any, Literal

from matplotlib.figure import Figure
from matplotlib.ticker import MaxNLocator, StrMethodFormatter

from grpo_lab.storage.scratch import whole_file

BLUE, ORANGE, GREEN, GREY = "#0072B2", "#D55E00", "#009E73", "#666666"
PALETTE = (BLUE, ORANGE, GREEN, "#CC79A7", "#E69F00", "#56B4E9", "#000000", "#8C6D31")


def save(figure: Figure, stem: Path, grid: bool = True) -> list[Path]:
    """Write `stem`.png and `stem`.svg; returns both. The folder is made when it is missing."""
    for axes in figure.axes if grid else ():
        axes.spines[["top", "right"]].set_visible(False)
        axes.grid(alpha=0.25)
        axes.set_axisbelow(True)
    stem.parent.mkdir(parents=True, exist_ok=True)
    paths = [stem.parent / f"{stem.name}.{kind}" for kind in ("png", "svg")]
    for path in paths:
        with whole_file(path) as partial:
            figure.savefig(partial, format=path.suffix[1:], dpi=150)
    return paths


def plain(name: str) -> str:
    """A name from outside as a label: a dollar sign begins no formula."""
    return name.replace("$", r"\$")


def counts_on(axis: Any, most: int | Literal["auto"] = "auto") -> None:
    """Whole numbers at an axis' ticks, at most so many + 1, with thousands set apart."""
    axis.set_major_locator(MaxNLocator(most, integer=True, steps=[1, 2, 2.5, 5, 10]))
    axis.set_major_formatter(StrMethodFormatter("{x:,.0f}"))


def legend_below(figure: Figure, columns: int = 3) -> None:
    figure.legend(loc="outside lower center", ncols=columns, frameon=False, fontsize=9, columnspacing=1.2)
