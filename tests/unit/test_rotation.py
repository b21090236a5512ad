"""Which checkpoints go, and that nothing goes while it could be needed."""

import os
import shutil
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st
from learner_cases import make_learner
from transformers import AutoTokenizer

from grpo_lab.config import Config
from grpo_lab.environment.limits import disk_fact
from grpo_lab.environment.model_files import measure
from grpo_lab.learner.checkpoint import Progress, newest_checkpoint, save_checkpoint
from grpo_lab.planning.plan import checkpoint_steps
from grpo_lab.run_dir import RunDir
from grpo_lab.storage.rotation import most_at_once, rotate, spare


def config(total: int = 80, **values: object) -> Config:
    sizes = {"group_size": 4, "prompts_per_step": 2, "total_rollouts": total, "checkpoint_every": 8}
    return Config.model_validate({**sizes, **values})


@pytest.mark.parametrize(
    ("settings", "gone"),
    [
        ({}, []),
        ({"keep_last": 2}, [8, 16, 24]),
        ({"keep_last": 2, "keep_every": 16}, [8, 24]),
        ({"keep_last": 9}, []),
        ({"keep_last": 1, "total_rollouts": 24}, [8, 16, 32]),
    ],
)
def test_spare(settings: dict[str, int], gone: list[int]) -> None:
    assert spare([40, 8, 32, 16, 24], config(**settings)) == gone


@given(last=st.integers(0, 5), every=st.integers(0, 4), saves=st.integers(1, 30), data=st.data())
def test_the_newest_and_the_final_one_never_go(last: int, every: int, saves: int, data: st.DataObject) -> None:
    chosen = config(8 * saves, keep_last=last, keep_every=8 * every)
    saved = data.draw(st.sets(st.integers(1, 40).map(lambda n: 8 * n), min_size=1))
    gone = spare(saved, chosen)
    assert max(saved) not in gone and chosen.total_rollouts not in gone and set(gone) <= saved
    assert len(saved) - len(gone) >= min(len(saved), last or len(saved))


@given(last=st.integers(1, 5), every=st.integers(0, 4), saves=st.integers(1, 30))
def test_estimate_is_what_lies_there_at_once(last: int, every: int, saves: int) -> None:
    """Counted directly: at each save the new one, the newest `last` before it and the older multiples."""
    chosen = config(8 * saves, keep_last=last, keep_every=8 * every)
    there = [
        1 + sum(n - old <= last or bool(every and old % every == 0) for old in range(1, n)) for n in range(1, saves + 1)
    ]
    assert most_at_once(chosen) == max(there)
    assert most_at_once(config(8 * saves)) == saves == len(checkpoint_steps(chosen))


def test_disk_estimate_counts_what_is_kept(tiny_model: Path) -> None:
    size = measure(tiny_model, 0)
    assert "10 checkpoints" in next(iter(disk_fact(config(), size))).text
    assert " 3 checkpoints" in next(iter(disk_fact(config(keep_last=2), size))).text


@pytest.fixture(scope="module")
def saved(tiny_model: Path, module_path: Path) -> Path:
    """One real checkpoint."""
    tokenizer = AutoTokenizer.from_pretrained(tiny_model)
    return save_checkpoint(module_path, make_learner(tiny_model), tokenizer, Progress(1, 8, 9)).folder


def run_of(folder: Path, saved: Path, *rollouts: int, evaluated: bool = True) -> RunDir:
    """A run with checkpoints at these rollouts, their evaluations made; files are links to one checkpoint's."""
    run = RunDir(folder)
    for at in rollouts:
        shutil.copytree(saved, run.checkpoints / f"rollouts_{at:08d}", copy_function=os.link)
        if evaluated:
            run.evaluations.mkdir(exist_ok=True)
            run.evaluation_file(at).write_text("{}")
    return run


def test_old_ones_go_and_evaluations_stay(saved: Path, tmp_path: Path) -> None:
    run, said = run_of(tmp_path, saved, 8, 16, 24, 32), list[str]()
    rotate(run, config(keep_last=1, keep_every=16), said.append)
    assert list(run.checkpoint_folders()) == [16, 32] and not said
    assert sorted(path.name for path in run.checkpoints.iterdir()) == ["rollouts_00000016", "rollouts_00000032"]
    assert len(list(run.evaluations.iterdir())) == 4
    found = newest_checkpoint(run.checkpoints)
    assert found and found.folder.name == "rollouts_00000032"


def test_none_goes_while_the_newest_is_damaged(saved: Path, tmp_path: Path) -> None:
    run, said = run_of(tmp_path, saved, 8, 16, 24), list[str]()
    (run.checkpoints / "rollouts_00000024/manifest.json").unlink()
    rotate(run, config(keep_last=1), said.append)
    assert list(run.checkpoint_folders()) == [8, 16, 24]
    assert len(said) == 1 and "rollouts_00000024" in said[0] and "no older one is deleted" in said[0]


def test_one_whose_evaluation_is_due_stays(saved: Path, tmp_path: Path) -> None:
    run = run_of(tmp_path, saved, 8, 12, 16, 24, evaluated=False)
    rotate(run, config(keep_last=1), lambda line: None)
    assert list(run.checkpoint_folders()) == [8, 16, 24]  # 12 is of a stop between milestones: none is due there
    rotate(run, config(keep_last=1, evaluation={"enabled": False}), lambda line: None)
    assert list(run.checkpoint_folders()) == [24]


def test_numbers_beyond_eight_digits_are_in_order(saved: Path, tmp_path: Path) -> None:
    run = run_of(tmp_path, saved, 99_999_992, 100_000_000)
    found = newest_checkpoint(run.checkpoints)
    assert found and found.folder.name == "rollouts_100000000"
    rotate(run, config(200_000_000, checkpoint_every=80_000, keep_last=1), lambda line: None)
    assert list(run.checkpoint_folders()) == [100_000_000]
