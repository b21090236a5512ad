"""Comparing runs: what may be compared with what, and that the numbers are those of the files, by another route."""

from __future__ import annotations

import json
import math
import re
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from numpy.typing import NDArray

from grpo_lab.config.file import dump_yaml, load_config
from grpo_lab.errors import ConfigError, RunError
from grpo_lab.evaluation.arms import arms, between
from grpo_lab.evaluation.contrast import common_moment, levels, reward_at
from grpo_lab.evaluation.contrast_figures import draw_comparison
from grpo_lab.evaluation.contrast_table import Comparison, compare, lines, to_json
from grpo_lab.evaluation.kept import read_points
from grpo_lab.evaluation.landscape import landscape
from grpo_lab.evaluation.pairing import holm
from grpo_lab.run_dir import RunDir
from grpo_lab.thermo.floor import bracket
from grpo_lab.thermo.statistics import clustered, paired_difference

Array = NDArray[np.float64]
PROBLEMS, SAMPLES = 12, 8


def estimate(values: Array) -> dict[str, float]:
    found = clustered(values)
    return {"mean": found.mean, "se": found.se}


def kept_row(rollouts: int, beta: float, reward: Array, kl: Array, reference: Array, digest: str) -> dict[str, Any]:
    """An evaluation as `measure` keeps it, in the parts a comparison reads; arrays are [problems][samples]."""
    energy, floor = beta * kl - reward, bracket(reference, beta)
    against = paired_difference(energy, -reference)
    by_problem = {
        "digest": digest,
        "ids": [f"p{n}" for n in range(len(reward))],
        "reward": reward.mean(axis=1).tolist(),
        "kl": kl.mean(axis=1).tolist(),
        "kl_rao_blackwell": kl.mean(axis=1).tolist(),
        "reference_reward": reference.mean(axis=1).tolist(),
    }
    ends = {end: {"mean": getattr(floor, end).mean, "se": getattr(floor, end).se} for end in ("lower", "upper")}
    found = landscape(reference)
    return {
        "rollouts": rollouts, "beta": beta, "problems": len(reward), "samples": reward.shape[1],
        "reward": estimate(reward), "kl": estimate(kl), "kl_rao_blackwell": estimate(kl),
        "free_energy": estimate(energy), "against_reference": {"mean": against.mean, "se": against.se},
        "reference_reward": estimate(reference), "floor": ends,
        "landscape": {"kl": found.kl, "reward": found.reward}, "per_problem": by_problem,
        "gap_split": {"wasted": 0.1, "tilt": 0.2},
    }  # fmt: skip


def write_run(
    folder: Path,
    overrides: list[str],
    gain: float,
    cost: float,
    digest: str = "same",
    old: bool = False,
    steps: int = 3,
) -> RunDir:
    """A run's folder with evaluations at 0, 64, ..: reward grows by `gain`, KL by `cost` an evaluation."""
    config = load_config(None, ["model.name=owner/model", *overrides])
    (folder / "checkpoints").mkdir(parents=True)
    (folder / "evaluations").mkdir()
    (folder / "config.yaml").write_text(dump_yaml(config))
    noise = np.random.default_rng([config.seed, round(1000 * gain)])
    easy = np.random.default_rng(7).uniform(0.05, 0.5, size=(PROBLEMS, 1))
    reference = (np.random.default_rng(8).uniform(size=(PROBLEMS, SAMPLES)) < easy).astype(np.float64)
    for step in range(steps):
        chance = np.clip(easy + gain * step, 0, 1)
        reward = (noise.uniform(size=reference.shape) < chance).astype(np.float64) if step else reference
        kl = cost * step * (1 + 0.3 * noise.standard_normal(reference.shape))
        row = kept_row(64 * step, config.beta, reward, kl, reference, digest)
        if old:
            del row["per_problem"]
        (folder / f"evaluations/rollouts_{64 * step:08d}.json").write_text(json.dumps(row))
    return RunDir.open(folder)


def compared(*runs: RunDir, betas: tuple[float, ...] = ()) -> Comparison:
    found, left_out = arms(runs)
    return compare(found, betas, left_out)


def test_two_runs_are_tested_pair_by_pair(tmp_path: Path) -> None:
    """The numbers of the comparison are those of the files, by another route."""
    first = write_run(tmp_path / "a", ["method=dapo"], 0.2, 0.4)
    second = write_run(tmp_path / "b", ["method=sao"], 0.1, 0.6)
    made = compared(first, second, betas=(0.05, 0.5))
    rows = [
        json.loads((run.evaluations / "rollouts_00000128.json").read_text())["per_problem"] for run in (first, second)
    ]
    by_name = {one.quantity: one for one in made.contrasts}
    assert list(by_name)[:4] == ["E[r]", "KL", "F at beta 0.05", "F at beta 0.5"]
    for name, of in {
        "E[r]": lambda row: np.array(row["reward"]),
        "KL": lambda row: np.array(row["kl_rao_blackwell"]),
        "F at beta 0.5": lambda row: 0.5 * np.array(row["kl"]) - np.array(row["reward"]),
    }.items():
        difference = of(rows[0]) - of(rows[1])
        test = by_name[name].test
        assert test.difference.mean == pytest.approx(difference.mean())
        assert test.difference.se == pytest.approx(math.sqrt(np.var(difference, ddof=1) / PROBLEMS))
        assert test.t == pytest.approx(test.difference.mean / test.difference.se)
    assert by_name["KL"].test.difference.mean < 0 < by_name["E[r]"].test.difference.mean
    assert all(one.adjusted == one.test.p and math.isnan(one.seeds_se) for one in made.contrasts)
    assert made.notes == []


def test_floor_and_f_at_another_beta_are_those_of_the_samples(tmp_path: Path) -> None:
    run = write_run(tmp_path / "a", ["beta=0.05"], 0.2, 0.4)
    other = write_run(tmp_path / "b", ["beta=0.5"], 0.2, 0.4)
    mine, its = read_points(run)[-1], read_points(other)[-1]
    assert mine.floor(0.5) == pytest.approx(its.floor(0.5), rel=1e-12)
    assert mine.floor(0.5) != mine.floor(0.05)
    assert mine.free_energy(0.5) == its.free_energy(0.5)
    kept = json.loads((run.evaluations / "rollouts_00000128.json").read_text())
    for key, found in (("free_energy", mine.free_energy(0.05)), ("against_reference", mine.against_reference(0.05))):
        assert (found.mean, found.se) == pytest.approx((kept[key]["mean"], kept[key]["se"]))


def test_seeds_are_replicates(tmp_path: Path) -> None:
    """Runs that differ in the seed alone are one arm: values averaged by problem, the error over seeds beside it."""
    runs = [write_run(tmp_path / f"a{seed}", ["method=dapo", f"seed={seed}"], 0.2, 0.4) for seed in range(3)]
    others = [write_run(tmp_path / f"b{seed}", ["method=sao", f"seed={seed}"], 0.1, 0.4) for seed in range(3)]
    made = compared(*runs, *others)
    assert [arm.seeds for arm in made.arms] == [[0, 1, 2], [0, 1, 2]]
    finals = [[read_points(run)[-1].reward.mean for run in part] for part in (runs, others)]
    assert made.arms[0].at(128).reward.mean == pytest.approx(np.mean(finals[0]))
    reward = next(one for one in made.contrasts if one.quantity == "E[r]")
    seed_by_seed = np.subtract(*finals)
    assert reward.test.difference.mean == pytest.approx(seed_by_seed.mean())
    assert reward.seeds_se == pytest.approx(np.std(seed_by_seed, ddof=1) / math.sqrt(3))
    assert f"({between(finals[0]):.3f})" in "\n".join(lines(made))
    unpaired = compared(*runs, *others[:2])
    reward = next(one for one in unpaired.contrasts if one.quantity == "E[r]")
    assert reward.seeds_se == pytest.approx(math.hypot(between(finals[0]), between(finals[1][:2])))
    assert any("different seeds" in note for note in unpaired.notes)


def test_what_differs_beside_the_seed_is_an_arm_of_its_own(tmp_path: Path) -> None:
    base = write_run(tmp_path / "a", ["seed=0"], 0.2, 0.4)
    seed = write_run(tmp_path / "b", ["seed=1"], 0.2, 0.4)
    rate = write_run(tmp_path / "c", ["seed=2", "learner.learning_rate=1e-5"], 0.2, 0.4)
    again = write_run(tmp_path / "d", ["seed=0"], 0.1, 0.4)
    found, _ = arms([base, seed, rate, again, base])
    assert [[run.path.name for run in arm.runs] for arm in found] == [["a", "b"], ["c"], ["d"]]


@pytest.mark.parametrize(
    ("overrides", "digest", "note"),
    [
        (["model.name=owner/other"], "same", "other models"),
        (["data.options={grading: flexible}"], "same", "other tasks"),
        (["rollout.max_new_tokens=64"], "same", "other length limits"),
        (["data.split_seed=3"], "others", "other held-out problems"),
    ],
)
def test_pairs_that_cannot_be_compared_are_named_once(
    tmp_path: Path, overrides: list[str], digest: str, note: str
) -> None:
    first = write_run(tmp_path / "a", [], 0.2, 0.4)
    second = write_run(tmp_path / "b", overrides, 0.2, 0.4, digest)
    made = compared(first, second)
    assert made.contrasts == [] and len(made.notes) == 1 and made.notes[0].startswith("A - B: not compared: " + note)
    assert made.notes[0] in "\n".join(lines(made))


def test_other_betas_are_compared_at_each(tmp_path: Path) -> None:
    runs = [write_run(tmp_path / f"{beta}", [f"beta={beta}"], 0.2, 0.4) for beta in (0.2, 0.02)]
    made = compared(*runs)
    names = [one.quantity for one in made.contrasts]
    assert names[:4] == ["E[r]", "KL", "F at beta 0.02", "F at beta 0.2"]
    assert any("different betas" in note for note in made.notes)


def test_settings_that_no_table_shows_are_named(tmp_path: Path) -> None:
    plain = write_run(tmp_path / "a", [], 0.2, 0.4)
    soft = write_run(tmp_path / "b", ["method=sao", "objective.gate=erf", "seed=3"], 0.2, 0.4)
    text = [line for line in lines(compared(plain, soft)) if "differs" in line]
    assert text == ["B differs from A in objective.gate: null -> 'erf'"]
    only_method = write_run(tmp_path / "c", ["method=sao"], 0.2, 0.4)
    assert not any("differs from" in line for line in lines(compared(plain, only_method)))


def test_holm_counts_the_pairs_of_one_quantity(tmp_path: Path) -> None:
    runs = [
        write_run(tmp_path / m, [f"method={m}"], gain, 0.4) for m, gain in (("dapo", 0.25), ("sao", 0.1), ("ppo", 0.0))
    ]
    made = compared(*runs)
    of_reward = [one for one in made.contrasts if one.quantity == "E[r]"]
    assert [(one.first, one.second) for one in of_reward] == [("A", "B"), ("A", "C"), ("B", "C")]
    assert [one.adjusted for one in of_reward] == holm([one.test.p for one in of_reward])
    assert "Holm over 3 pairs" in "\n".join(lines(made))


def test_older_evaluations_are_shown_but_not_tested(tmp_path: Path) -> None:
    old = write_run(tmp_path / "a", [], 0.2, 0.4, old=True)
    new = write_run(tmp_path / "b", ["method=sao"], 0.2, 0.4)
    made = compared(old, new, betas=(0.05, 0.5))
    text = "\n".join(lines(made))
    assert made.contrasts == [] and text.count("older version") == 1
    assert f"grpo-lab eval checkpoint {old.path}/checkpoints/rollouts_00000128 --json " in text
    point = made.arms[0].path[-1]
    kept = json.loads((old.evaluations / "rollouts_00000128.json").read_text())
    assert point.free_energy(0.05).se == kept["free_energy"]["se"]
    assert point.free_energy(0.5).mean == pytest.approx(0.5 * kept["kl"]["mean"] - kept["reward"]["mean"])
    assert math.isnan(point.free_energy(0.5).se) and point.floor(0.5) is None
    assert (
        json.loads(json.dumps(to_json(made), allow_nan=False))["arms"][0]["evaluations"][2]["free_energy"]["0.5"]["se"]
        is None
    )


def test_graded_rewards_have_no_floor_at_a_beta_they_were_not_evaluated_at(tmp_path: Path) -> None:
    runs = [
        write_run(tmp_path / name, [f"method={method}"], 0.2, 0.4) for name, method in (("a", "dapo"), ("b", "sao"))
    ]
    for run in runs:
        for file in run.evaluations.glob("*.json"):
            file.write_text(json.dumps(json.loads(file.read_text()) | {"gap_split": None}))
    made = compared(*runs, betas=(0.05, 0.5))
    assert made.arms[0].path[-1].floor(0.05) and made.arms[0].path[-1].floor(0.5) is None
    assert [note for note in made.notes if "no floor F* at beta 0.5 for" in note]
    text = "\n".join(lines(made))
    assert re.search(r"F at beta 0.05, .*; floor F\* \[", text) and re.search(r"F at beta 0.5, .* of all$", text, re.M)


def test_a_reference_that_is_paid_differently_is_said(tmp_path: Path) -> None:
    runs = [
        write_run(tmp_path / name, [f"method={method}"], 0.2, 0.4) for name, method in (("a", "dapo"), ("b", "sao"))
    ]
    assert not any("was the reward changed" in note for note in compared(*runs).notes)
    for file in runs[1].evaluations.glob("*.json"):
        row = json.loads(file.read_text())
        row["reference_reward"]["mean"] += 0.1
        file.write_text(json.dumps(row))
    (note,) = [note for note in compared(*runs).notes if "was the reward changed" in note]
    assert note.startswith("A - B: the reference has E[r] ")


def test_runs_of_unequal_length_meet_at_the_last_common_evaluation(tmp_path: Path) -> None:
    short = write_run(tmp_path / "a", [], 0.2, 0.4, steps=2)
    long = write_run(tmp_path / "b", ["method=sao"], 0.2, 0.2, steps=4)
    made = compared(short, long)
    assert made.moment == {"A": 64, "B": 64}
    text = "\n".join(lines(made))
    assert "the last evaluation of all" in text and "each one's last evaluation" in text and "192" in text
    top = made.levels[-1]
    assert top <= min(max(point.kl.mean for point in arm.path) for arm in made.arms) and top > 0
    assert all(reward_at(arm.path, top) for arm in made.arms)
    begun = write_run(tmp_path / "c", ["method=ppo"], 0.2, 0.2, steps=1)
    unequal = compared(long, begun)
    assert unequal.moment == {"A": 192, "B": 0} and "unequal rollouts" in unequal.notes[0] and unequal.levels == []
    assert common_moment(made.arms) == made.moment and levels(made.arms) == made.levels


def test_what_cannot_be_read_is_one_line(tmp_path: Path) -> None:
    run = write_run(tmp_path / "a", [], 0.2, 0.4)
    with pytest.raises(ConfigError, match="takes two runs or more"):
        arms([run, run])
    (run.evaluations / "rollouts_00000064.json").write_text('{"rollouts": 64}')
    with pytest.raises(RunError, match=r"rollouts_00000064\.json is damaged .*--json"):
        arms([run, run])


def test_figures_name_what_they_show(tmp_path: Path) -> None:
    runs = [
        write_run(tmp_path / f"{m}{s}", [f"method={m}", f"seed={s}"], 0.2, c)
        for m, c in (("dapo", 0.4), ("sao", 0.6))
        for s in (0, 1)
    ]
    paths = draw_comparison(compared(*runs, betas=(0.02, 0.2)), tmp_path / "figures")
    assert sorted(path.name for path in paths) == [
        "equal_kl.png",
        "equal_kl.svg",
        "equal_rollouts.png",
        "equal_rollouts.svg",
    ]
    drawing = (tmp_path / "figures/equal_rollouts.svg").read_text()
    for text in ("A: dapo, free_energy, β = 0.05, 2 seeds", "Gibbs floor", "rollouts", "β = 0.2"):
        assert f"<!-- {text}" in drawing, text
