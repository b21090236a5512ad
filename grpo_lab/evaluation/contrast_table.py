"""A comparison of arms as lines for the terminal, and as plain values for JSON."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from typing import Any

from grpo_lab.config.file import PLACE, changes
from grpo_lab.errors import ConfigError
from grpo_lab.evaluation import contrast
from grpo_lab.evaluation.arms import Arm, between
from grpo_lab.evaluation.columns import aligned
from grpo_lab.evaluation.contrast import Contrast, Moment
from grpo_lab.evaluation.kept import Point
from grpo_lab.evaluation.pairing import DRAWS
from grpo_lab.thermo.statistics import Estimate


@dataclass(frozen=True)
class Comparison:
    """Arms, the temperatures F is compared at, the rollouts they are compared at, and what came out of it."""

    arms: Sequence[Arm]
    betas: Sequence[float]
    moment: Moment
    levels: Sequence[float]
    contrasts: Sequence[Contrast]
    notes: Sequence[str]


def compare(arms: Sequence[Arm], betas: Sequence[float], notes: Sequence[str]) -> Comparison:
    """Compare at the last common evaluation; `betas` empty: those the arms were trained at."""
    for arm in arms:
        if not arm.path:
            raise ConfigError(f"runs {', '.join(str(run.path) for run in arm.runs)} have no evaluation in common")
    chosen = sorted(set(betas or (arm.config.beta for arm in arms)))
    moment, levels = contrast.common_moment(arms), contrast.levels(arms)
    every = contrast.quantities(chosen, levels[-1] if levels else None)
    found, more = contrast.contrasts(arms, moment, every)
    if hidden := [f"{beta:g}" for beta in chosen if any(arm.at(moment[arm.name]).floor(beta) is None for arm in arms)]:
        more = [
            *more,
            f"no floor F* at beta {', '.join(hidden)} for runs trained at another: it is kept for rewards of 0 and 1 only",
        ]
    if not contrast.is_equal(moment):
        more = [
            "no evaluation after the start is common to all: each one's last is compared, at unequal rollouts",
            *more,
        ]
    return Comparison(arms, chosen, moment, levels, found, [*notes, *more])


HEAD = (
    "",
    "method",
    "recipe",
    "beta",
    "seeds",
    "rollouts",
    "E[r]",
    "KL (RB)",
    "F",
    "F - F_ref",
    "floor F*",
    "gap F - F*",
)
_SEEN = {"method", "recipe", "beta", "seed", *PLACE}  # in the tables, and where a run lies


def lines(made: Comparison) -> list[str]:
    """The whole comparison, for the terminal."""
    said = [f"{arm.name}  {run.path}" for arm in made.arms for run in arm.runs]
    said += [
        f"{arm.name} differs from {made.arms[0].name} in {'; '.join(found)}" for arm, found in _differing(made.arms)
    ]
    for beta in made.betas:
        when = "the last evaluation of all" if contrast.is_equal(made.moment) else "each one's last evaluation"
        floor = _common_floor(made.arms, made.moment, beta)
        same = f"; floor F* {_bracket(floor)} for all" if floor else ""
        said += ["", f"F at beta {beta:g}, {when}{same}", *aligned(_rows(made.arms, made.moment, beta, not floor))]
    last = contrast.last_moment(made.arms)
    if dict(last) != dict(made.moment):
        said += ["", "each one's last evaluation, F at its own beta", *aligned(_rows(made.arms, last, None, True))]
    if any(len(arm.runs) > 1 for arm in made.arms):
        said.append("in brackets: the standard error over seeds")
    if made.levels:
        said += ["", "E[r] where the KL first reaches (nats, Rao-Blackwell)", *aligned(_level_rows(made))]
    if made.contrasts:
        said += ["", *_tests(made.contrasts)]
    return [*said, *(["", *(f"note       {note}" for note in made.notes)] if made.notes else [])]


def _differing(arms: Sequence[Arm]) -> list[tuple[Arm, list[str]]]:
    """The arms whose settings differ from the first one's in more than the tables show, with what differs."""
    found = [
        (arm, [str(change) for change in changes(arms[0].config, arm.config) if change.key not in _SEEN])
        for arm in arms
    ]
    return [(arm, differing) for arm, differing in found if differing]


def _common_floor(arms: Sequence[Arm], moment: Moment, beta: float) -> tuple[float, float] | None:
    """The bracket that all arms share, as they do with one bank; None where they do not."""
    found = {arm.at(moment[arm.name]).floor(beta) for arm in arms}
    return found.pop() if len(found) == 1 else None


def _bracket(floor: tuple[float, float]) -> str:
    return f"[{floor[0]:+.3f}, {floor[1]:+.3f}]"


def _rows(arms: Sequence[Arm], moment: Moment, beta: float | None, with_floor: bool) -> list[list[str]]:
    rows = [list(HEAD)]
    for arm in arms:
        at, own, config = arm.at(moment[arm.name]), beta or arm.config.beta, arm.config
        floor, free_energy = at.floor(own), at.free_energy(own)
        each = arm.at_each(at.rollouts)
        rows.append([
            arm.name, config.method, config.recipe, f"{config.beta:g}", ",".join(map(str, arm.seeds)), f"{at.rollouts:,}",
            _shown(at.reward, between([point.reward.mean for point in each])),
            _shown(at.kl, between([point.kl.mean for point in each])),
            _shown(free_energy, between([point.free_energy(own).mean for point in each])),
            _shown(at.against_reference(own), between([point.against_reference(own).mean for point in each])),
            _bracket(floor) if floor and with_floor else "",
            f"[{free_energy.mean - floor[1]:.3f}, {free_energy.mean - floor[0]:.3f}]" if floor else "",
        ])  # fmt: skip
    return rows


def _level_rows(made: Comparison) -> list[list[str]]:
    rows = [["", *(f"{level:.3g}" for level in made.levels)]]
    for arm in made.arms:
        cells = []
        for level in made.levels:
            each = [reward for path in arm.replicates if (reward := contrast.reward_at(path, level))]
            found = contrast.reward_at(arm.path, level)
            cells.append(_shown(found, between([reward.mean for reward in each])) if found else "not reached")
        rows.append([arm.name, *cells])
    return rows


def _tests(found: Sequence[Contrast]) -> list[str]:
    pairs = len({(one.first, one.second) for one in found})
    rows = [["pair", "in", "difference", "t", "p", *(["p (Holm)"] if pairs > 1 else [])]]
    for one in found:
        test = one.test
        p = f"{test.p:.2g} {'exact' if test.exact else 'drawn'}"
        t = "" if math.isnan(test.t) else f"{test.t:+.2f}"
        difference = _shown(test.difference, one.seeds_se, sign="+")
        holm = [f"{one.adjusted:.2g}"] if pairs > 1 else []
        rows.append([f"{one.first} - {one.second}", one.quantity, difference, t, p, *holm])
    counts = sorted({one.test.problems for one in found})
    said = [
        f"paired by problem ({'/'.join(map(str, counts))} problems), +- clustered by problem; p: two-sided sign-flip test, "
        f"exact over all signs or over {DRAWS:,} drawn ones" + (f"; Holm over {pairs} pairs" if pairs > 1 else ""),
        "they hold for these trained policies on new problems; another seed trains another policy: see the errors over seeds",
    ]
    return said + aligned(rows)


def _shown(estimate: Estimate, seeds_se: float, sign: str = "") -> str:
    error = "" if math.isnan(estimate.se) else f" +- {estimate.se:.3f}"
    return f"{estimate.mean:{sign}.3f}{error}" + ("" if math.isnan(seeds_se) else f" ({seeds_se:.3f})")


def to_json(made: Comparison) -> dict[str, Any]:
    """Plain nested values; a number that is not known is null."""
    known: dict[str, Any] = _known(
        {
            "arms": [_arm(arm, made) for arm in made.arms],
            "compared_at": made.moment,
            "pairs": [_pair(one) for one in made.contrasts],
            "notes": made.notes,
        }
    )
    return known


def _pair(one: Contrast) -> dict[str, Any]:
    plain = asdict(one)
    return plain.pop("test") | plain


def _arm(arm: Arm, made: Comparison) -> dict[str, Any]:
    config = arm.config
    found = {f"{level:g}": contrast.reward_at(arm.path, level) for level in made.levels}
    return {
        "name": arm.name, "runs": [str(run.path) for run in arm.runs], "method": config.method, "recipe": config.recipe,
        "beta": config.beta, "seeds": arm.seeds, "evaluations": [_point(arm, point, made.betas) for point in arm.path],
        "reward_at_kl": {level: asdict(reward) for level, reward in found.items() if reward},
    }  # fmt: skip


def _point(arm: Arm, point: Point, betas: Sequence[float]) -> dict[str, Any]:
    each = arm.at_each(point.rollouts)
    return {
        "rollouts": point.rollouts,
        "reward": {**asdict(point.reward), "seeds_se": between([one.reward.mean for one in each])},
        "kl_rao_blackwell": {**asdict(point.kl), "seeds_se": between([one.kl.mean for one in each])},
        "free_energy": {f"{beta:g}": _energy(each, point, beta) for beta in betas},
    }


def _energy(each: Sequence[Point], point: Point, beta: float) -> Mapping[str, Any]:
    return {
        **asdict(point.free_energy(beta)),
        "seeds_se": between([one.free_energy(beta).mean for one in each]),
        "against_reference": asdict(point.against_reference(beta)),
        "floor": point.floor(beta),
    }


def _known(tree: Any) -> Any:
    if isinstance(tree, Mapping):
        return {key: _known(value) for key, value in tree.items()}
    if isinstance(tree, list | tuple):
        return [_known(value) for value in tree]
    return None if isinstance(tree, float) and not math.isfinite(tree) else tree
