"""The worked examples under configs/examples, each run with a tiny model in place of theirs."""

from pathlib import Path

import pytest

from grpo_lab.config.file import load_config
from grpo_lab.console import Console
from grpo_lab.run_dir import RunDir
from grpo_lab.storage.records import read_groups
from grpo_lab.train import train

EXAMPLES = Path(__file__).parents[2] / "configs/examples"
TASK = ("data.task=parity_task:Task", "data.heldout_problems=8")  # which even a random model solves at times


def run(example: str, tiny_model: Path, folder: Path, *more: str) -> RunDir:
    """Two steps of an example."""
    small = {
        "model.name": tiny_model, "output_dir": folder, "group_size": 4, "prompts_per_step": 2, "total_rollouts": 16,
        "checkpoint_every": 16, "rollout.max_new_tokens": 8, "evaluation.problems": 2, "evaluation.samples": 2,
    }  # fmt: skip
    config = load_config(EXAMPLES / example, [*(f"{key}={value}" for key, value in small.items()), *more])
    finished = train(config, Console())
    assert finished is not None
    return finished


def test_own_gate(tiny_model: Path, tmp_path: Path) -> None:
    narrow = ("rollout.engine=hf", "learner.learning_rate=0.01", *TASK, "objective.gate_options={sharpness: 50}")
    rows = run("own_gate.yaml", tiny_model, tmp_path, *narrow).read_metrics()
    assert len(rows) == 2 and rows[-1]["gate/mean"] < 0.99, "the gate has closed for some tokens"


def test_own_reward_on_own_problems(tiny_model: Path, tmp_path: Path) -> None:
    finished = run("words.yaml", tiny_model, tmp_path, "rollout.engine=hf", "data.options.truncated_reward=0.25")
    groups, _ = read_groups(finished.path / "rollouts/step_000001.parquet")
    for group in groups:
        asked = int(group.problem.answer)
        for completion, grade in zip(group.completions, group.grades, strict=True):
            words = len(completion.text.split())
            wanted = 0.25 if completion.truncated else max(0, 1 - abs(words - asked) / asked)
            assert grade.reward == pytest.approx(wanted)
            kind = "truncated" if completion.truncated else "partial" if 0 < wanted < 1 else None
            assert grade.outcome == (kind or ("correct" if wanted else "wrong"))
    drawn = {file.stem for file in finished.figures.glob("*.png")}
    assert {"free_energy", "frontier", "landscape"} <= drawn and "gap_split" not in drawn


def test_own_engine(tiny_model: Path, tmp_path: Path) -> None:
    rows = run("own_engine.yaml", tiny_model, tmp_path, *TASK, "learner.learning_rate=0.01").read_metrics()
    assert [row["rollout/mismatch_max"] < 1e-4 for row in rows] == [True, True], "the pushed weights are sampled from"
    assert rows[1]["policy/kl_ref"] != 0
