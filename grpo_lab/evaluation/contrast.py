"""Arms side by side: at which rollouts and KL they are compared, which pairs may be, and the paired tests."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from itertools import combinations

import numpy as np
from numpy.typing import NDArray

from grpo_lab.evaluation.arms import Arm, between
from grpo_lab.evaluation.kept import Point, Problems, how_to_evaluate
from grpo_lab.evaluation.pairing import PairedTest, at_level, holm, paired_test
from grpo_lab.thermo.statistics import Estimate, clustered

Array = NDArray[np.float64]
Points = Sequence[Point]
Moment = Mapping[str, int]
"""The rollouts at which each arm is looked at, by its name."""
_HARDWARE = 0.02  # by which E[r] of one bank may differ between machines
SHARES = (0.25, 0.5, 0.75, 1.0)  # of the largest KL that every arm reached: where rewards are compared


@dataclass(frozen=True)
class Quantity:
    """What is compared: `of(path, rollouts)` gives its values by problem, [N], or None where they are not known."""

    name: str
    of: Callable[[Points, int], Array | None]


@dataclass(frozen=True)
class Contrast:
    """`first` - `second` (names of arms) in one quantity; `adjusted` is p after Holm over the pairs.

    `seeds_se` is the standard error over seeds, for these problems; nan where an arm has one run.
    """

    first: str
    second: str
    quantity: str
    test: PairedTest
    seeds_se: float
    adjusted: float


def common_moment(arms: Sequence[Arm]) -> Moment:
    """The last evaluation after the start that every arm has, else each one's last."""
    shared = set.intersection(*({point.rollouts for point in arm.path} for arm in arms)) - {0}
    return {arm.name: max(shared) for arm in arms} if shared else last_moment(arms)


def last_moment(arms: Sequence[Arm]) -> Moment:
    """Each arm's last evaluation."""
    return {arm.name: arm.path[-1].rollouts for arm in arms}


def is_equal(moment: Moment) -> bool:
    return len(set(moment.values())) == 1


def levels(arms: Sequence[Arm]) -> list[float]:
    """KL levels that every arm reached, rising, the last rounded down to two digits; none where an arm has not moved."""
    top = min(max(point.kl.mean for point in path) for arm in arms for path in (arm.path, *arm.replicates))
    if top < 1e-4:
        return []
    step = 10.0 ** (math.floor(math.log10(top)) - 1)
    top = math.floor(top * (1 - 1e-9) / step) * step
    return [float(f"{share * top:.6g}") for share in SHARES]


def reward_at(path: Points, level: float) -> Estimate | None:
    """E[r] where a path first reaches a KL; its error includes that of the KL, and needs values by problem."""
    values = _reward_at(path, level)
    if values is not None:
        return clustered(values)
    rewards, kls = (np.array([[getattr(point, key).mean] for point in path]) for key in ("reward", "kl"))
    found = at_level(rewards, kls, level)
    return None if found is None else Estimate(float(found[0]), math.nan)


def _reward_at(path: Points, level: float) -> Array | None:
    kept = [point.problems for point in path if point.problems]
    if len(kept) < len(path) or len({problems.digest for problems in kept}) > 1:
        return None
    rewards, kls = (np.stack([getattr(problems, key) for problems in kept]) for key in ("reward", "kl_rao_blackwell"))
    return at_level(rewards, kls, level)


def quantities(betas: Sequence[float], level: float | None) -> list[Quantity]:
    """E[r], KL, F at every beta; and E[r] where the KL first reaches `level`."""

    def at(of: Callable[[Problems], Array], path: Points, rollouts: int) -> Array | None:
        problems = next(point for point in path if point.rollouts == rollouts).problems
        return of(problems) if problems else None

    every = [
        Quantity("E[r]", partial(at, lambda problems: problems.reward)),
        Quantity("KL", partial(at, lambda problems: problems.kl_rao_blackwell)),
        *(Quantity(f"F at beta {beta:g}", partial(at, partial(Problems.free_energy, beta=beta))) for beta in betas),
    ]
    if level is not None:
        every.append(Quantity(f"E[r] at KL {level:.3g}", lambda path, rollouts: _reward_at(path, level)))
    return every


def contrasts(arms: Sequence[Arm], moment: Moment, every: Sequence[Quantity]) -> tuple[list[Contrast], list[str]]:
    """The paired tests of every pair that may be compared, and a line for everything that is not, or not quite, alike."""
    told: dict[str, list[str]] = {}
    old = [(arm.name, text) for arm in arms if (text := without_values(arm, moment))]
    pairs = []
    for first, second in combinations((arm for arm in arms if arm.name not in dict(old)), 2):
        reason = obstacle(first, second, moment)
        if reason is None:
            pairs.append((first, second))
        for text in cautions(first, second) if reason is None else [f"not compared: {reason}"]:
            told.setdefault(text, []).append(f"{first.name} - {second.name}")
    found: list[Contrast] = []
    for quantity in every:
        tested = [c for first, second in pairs if (c := _contrast(first, second, moment, quantity))]
        adjusted = holm([contrast.test.p for contrast in tested])
        found += [replace(contrast, adjusted=p) for contrast, p in zip(tested, adjusted, strict=True)]
    notes = [f"{name}: {text}" for name, text in old] + [f"{', '.join(names)}: {text}" for text, names in told.items()]
    return found, notes


def _contrast(first: Arm, second: Arm, moment: Moment, quantity: Quantity) -> Contrast | None:
    values = [quantity.of(arm.path, moment[arm.name]) for arm in (first, second)]
    if values[0] is None or values[1] is None:
        return None
    test = paired_test(values[0], values[1])
    return Contrast(first.name, second.name, quantity.name, test, _seeds_se(first, second, moment, quantity), test.p)


def _seeds_se(first: Arm, second: Arm, moment: Moment, quantity: Quantity) -> float:
    """Over seeds: of the differences seed by seed where both arms have the same seeds, else of two independent means."""
    by_seed = []
    for arm in (first, second):
        values = [quantity.of(path, moment[arm.name]) for path in arm.replicates]
        by_seed.append({seed: float(v.mean()) for seed, v in zip(arm.seeds, values, strict=True) if v is not None})
    if by_seed[0].keys() == by_seed[1].keys():
        return between([by_seed[0][seed] - by_seed[1][seed] for seed in by_seed[0]])
    return math.hypot(*(between(list(values.values())) for values in by_seed))


def obstacle(first: Arm, second: Arm, moment: Moment) -> str | None:
    """Why two arms cannot be compared, None where they can."""
    one, two = first.config, second.config
    if (one.model.place, one.model.revision) != (two.model.place, two.model.revision):
        return f"other models ({one.model.name}, {two.model.name}), so KL is to another reference"
    if (one.data.task, one.data.options) != (two.data.task, two.data.options):
        return f"other tasks ({one.data.task} {one.data.options}, {two.data.task} {two.data.options})"
    if one.rollout.max_new_tokens != two.rollout.max_new_tokens:
        return (
            f"other length limits (rollout.max_new_tokens={one.rollout.max_new_tokens}, {two.rollout.max_new_tokens})"
        )
    problems = [arm.at(moment[arm.name]).problems for arm in (first, second)]
    if problems[0] is None or problems[1] is None or problems[0].digest != problems[1].digest:
        counts = " and ".join(str(config.evaluation.problems) for config in (one, two))
        return f"other held-out problems ({counts}; data.split_seed={one.data.split_seed}, {two.data.split_seed})"
    return None


def without_values(arm: Arm, moment: Moment) -> str | None:
    """Why an arm takes no part in paired tests: one of its evaluations was kept by an older version."""
    for run, point in zip(arm.runs, arm.at_each(moment[arm.name]), strict=True):
        if point.problems is None:
            command = how_to_evaluate(run.evaluation_file(point.rollouts))
            return f"no test: an older version kept no values by problem; this adds them: {command}"
    return None


def cautions(first: Arm, second: Arm) -> list[str]:
    """What differs beside the method in a pair that is compared all the same."""
    found = []
    if first.config.beta != second.config.beta:
        found.append("trained at different betas; F = -E[r] + beta KL is compared at one beta at a time")
    found += _changed_reward(first, second)
    if set(first.seeds) != set(second.seeds):
        found.append("different seeds; the samples of a problem do not share their random numbers")
    return found


def _changed_reward(first: Arm, second: Arm) -> list[str]:
    """A line where one bank, drawn alike, pays differently; samples of other hardware may differ a little."""
    drawn = [(c.seed, c.rollout.engine, c.model.dtype, c.evaluation.samples) for c in (first.config, second.config)]
    one, two = first.path[0].reference_reward, second.path[0].reference_reward
    if drawn[0] != drawn[1] or abs(one - two) <= _HARDWARE:
        return []
    return [f"the reference has E[r] {one:.3f} in one, {two:.3f} in the other: was the reward changed between?"]
