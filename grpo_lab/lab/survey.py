"""Every method and recipe on the toy model: rows of equilibria, their table, their figure."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from matplotlib.figure import Figure

from grpo_lab import plugins
from grpo_lab.config.file import build_config
from grpo_lab.drawing import GREY, PALETTE, legend_below, save
from grpo_lab.lab.equilibrium import find_equilibrium
from grpo_lab.lab.sampled import train_sampled
from grpo_lab.lab.toy import MAX_TOKENS, ToyState, gibbs_logits, measure
from grpo_lab.objective.axes import Objective, resolve
from grpo_lab.objective.gates import PACKAGE, build_gate

BETAS = (0.1, 0.25, 0.5, 1.0)
_ROUNDING = 1e-14  # a gap below it is 0, by float64 sums over the enumerated texts
_TOKEN_LOCAL, _ZSCORE = {"kl": "loss_k3_is"}, {"advantage": "zscore"}
AXES: Mapping[str, Mapping[str, str]] = {
    "leave-one-out, KL in the reward": {},
    "z-score, KL in the reward": _ZSCORE,
    "leave-one-out, sequence k2 in the loss": {"kl": "loss_k2_sequence"},
    "leave-one-out, token-local KL (k2, IS-k3)": _TOKEN_LOCAL,
    "leave-one-out, k3 in the loss": {"kl": "loss_k3"},
    "z-score, sequence k2 in the loss": {**_ZSCORE, "kl": "loss_k2_sequence"},
    "z-score, token-local KL (TRL's default)": {**_ZSCORE, **_TOKEN_LOCAL},
    "z-score, k3, sequence mean (GRPO's paper)": {**_ZSCORE, "kl": "loss_k3", "aggregate": "sequence_mean"},
}
"""Estimators of the advantage and the KL on their own, with GRPO's gate."""


@dataclass(frozen=True)
class Row:
    """One objective at one beta: where its expected update leads, and where sampled training does if asked."""

    name: str
    recipe: str
    beta: float
    exact: ToyState
    force: float
    sampled: ToyState | None

    def to_json(self) -> dict[str, Any]:
        sampled = {**asdict(self.sampled), "gap": self.sampled.gap} if self.sampled else None
        exact = {**asdict(self.exact), "gap": self.exact.gap}
        return {
            "name": self.name,
            "recipe": self.recipe,
            "beta": self.beta,
            "force": self.force,
            "exact": exact,
            "sampled": sampled,
        }


def toy_objective(method: str, recipe: str, beta: float, axes: Mapping[str, Any]) -> Objective:
    """The objective of a method and recipe on the toy model; what needs problems or lengths (DAPO's extras) is left out."""
    plain = {"dynamic_sampling": False, "overlong_cache": 0, **axes}
    tree = {
        "method": method,
        "recipe": recipe,
        "beta": beta,
        "objective": plain,
        "rollout": {"max_new_tokens": MAX_TOKENS},
    }
    objective = resolve(build_config(tree, "command line"))
    build_gate(objective.gate, objective.gate_options, objective.level)
    return objective


def method_rows(
    methods: Sequence[str], recipes: Sequence[str], betas: Sequence[float]
) -> list[tuple[str, str, Objective]]:
    """(name, recipe, objective) of every combination."""
    return [(m, r, toy_objective(m, r, b, {})) for r in recipes for m in methods for b in betas]


def axes_rows(betas: Sequence[float]) -> list[tuple[str, str, Objective]]:
    """The estimators of `AXES` one by one."""
    return [(name, "", toy_objective("grpo", "free_energy", b, axes)) for name, axes in AXES.items() for b in betas]


def gate_rows(betas: Sequence[float], more: Sequence[str] = ()) -> list[tuple[str, str, Objective]]:
    """Every gate of the folder, and those named in `more`, under the default recipe with default parameters."""
    gates = [*plugins.names(PACKAGE), *more]
    return [(g, "", toy_objective("reinforce", "free_energy", b, {"gate": g})) for g in gates for b in betas]


def survey(rows: Iterable[tuple[str, str, Objective]], sampled: bool, progress: Callable[[], None]) -> list[Row]:
    """Solve every row; `progress` is called after each."""
    done = []
    for name, recipe, objective in rows:
        found = find_equilibrium(objective)
        trained = train_sampled(objective) if sampled else None
        done.append(Row(name, recipe, objective.beta, found.state, found.force, trained))
        progress()
    return done


def table(rows: Sequence[Row]) -> list[str]:
    """One line a row: the gap to the floor first, then what the policy earns, spends, and at which temperature it stands."""
    head = ["", "recipe", "beta", "F - F*", "sampled", "E[r]", "KL", "F", "F*", "beta_eff"]
    cells = [head, *(_cells(row) for row in rows)]
    used = [column for column in range(len(head)) if any(line[column] for line in cells[1:])]
    widths = [max(len(line[column]) for line in cells) for column in used]
    left = {0, 1}
    return [
        "  ".join(f"{line[c]:{'<' if c in left else '>'}{w}}" for c, w in zip(used, widths, strict=True)).rstrip()
        for line in cells
    ]


def _cells(row: Row) -> list[str]:
    state = row.exact
    numbers = [f"{value:.4f}" for value in (state.reward, state.kl, state.free_energy, state.floor)]
    temperature = f"{state.beta_eff:.4f}" if state.reward < 1 - 1e-6 else "0 (q = 1)"
    sampled = _gap(row.sampled.gap) if row.sampled else ""
    return [row.name, row.recipe, f"{row.beta:g}", _gap(state.gap), sampled, *numbers, temperature]


def gate_table(rows: Sequence[Row]) -> list[str]:
    """One line a gate: its largest gap over the betas."""
    names = sorted({row.name for row in rows})
    worst = {name: max(abs(row.exact.gap) for row in rows if row.name == name) for name in names}
    width = max(map(len, names))
    return [f"{name:{width}}  largest F - F* {_gap(gap)}" for name, gap in worst.items()]


def _gap(value: float) -> str:
    return f"{max(value, 0.0):.1e}" if value < 1e-4 else f"{value:.5f}"


def draw(rows: Sequence[Row], stem: Path) -> list[Path]:
    """Left: how far each objective stays from the floor, by beta. Right: where it ends on the reward-KL plane.

    Objectives that end at the same places share one curve.
    """
    figure = Figure(figsize=(10.5, 5.0), layout="constrained")
    gaps, plane = figure.subplots(1, 2)
    for index, (label, mine) in enumerate(_curves(rows).items()):
        look = {"color": PALETTE[index % len(PALETTE)], "marker": "osD^vPX*"[index % 8], "ms": 6}
        gaps.plot([r.beta for r in mine], [max(r.exact.gap, _ROUNDING / 10) for r in mine], label=label, lw=1.3, **look)
        plane.plot([r.exact.kl for r in mine], [r.exact.reward for r in mine], ls="", **look)
    if any(row.exact.gap < _ROUNDING for row in rows):  # a logarithmic axis has no 0
        gaps.axhspan(_ROUNDING / 20, _ROUNDING, facecolor=GREY, alpha=0.18, lw=0, label="0 up to rounding")
    gibbs = [measure(gibbs_logits(1.03**-n), 1.0) for n in range(-120, 160)]
    plane.plot([g.kl for g in gibbs], [g.reward for g in gibbs], color=GREY, lw=1.2, zorder=0, label="Gibbs policies")
    betas = sorted({row.beta for row in rows})
    gaps.set(
        xscale="log", yscale="log", xlabel="β", ylabel="F − F* (reward units)", title="Distance from the Gibbs floor"
    )
    gaps.set_xticks(betas, [f"{beta:g}" for beta in betas], minor=False)
    gaps.minorticks_off()
    plane.set(
        xlabel="KL to the reference (nats per sequence)", ylabel="E[r]", title="Where training ends, one marker a β"
    )
    legend_below(figure, columns=2)
    return save(figure, stem)


def _curves(rows: Sequence[Row]) -> dict[str, list[Row]]:
    """Rows by curve, each labelled with all the objectives that share it."""
    by_objective: dict[tuple[str, str], list[Row]] = {}
    for row in rows:
        by_objective.setdefault((row.recipe, row.name), []).append(row)
    shared: dict[tuple[float, ...], list[tuple[str, str]]] = {}
    for key, mine in by_objective.items():
        place = tuple(round(math.log10(max(r.exact.gap, 1e-12)), 1) for r in mine)
        shared.setdefault(place, []).append(key)
    curves = {}
    for keys in shared.values():
        recipes = list(dict.fromkeys(recipe for recipe, _ in keys))
        names = {
            recipe: (", " if recipe else " / ").join(name for r, name in keys if r == recipe) for recipe in recipes
        }
        curves["; ".join(f"{recipe}: {text}" if recipe else text for recipe, text in names.items())] = by_objective[
            keys[0]
        ]
    return curves
