"""rollouts, rollout and compare on runs that were really trained."""

from __future__ import annotations

import json
import subprocess
import sys
import time
from pathlib import Path

import numpy as np
import pytest
from conftest import REPOSITORY, write_tiny_config

from grpo_lab.cli import main
from grpo_lab.config.file import load_config
from grpo_lab.console import Console
from grpo_lab.run_dir import RunDir
from grpo_lab.storage.records import read_groups
from grpo_lab.train import train


@pytest.fixture(scope="module")
def runs(module_path: Path, tiny_model: Path) -> Path:
    """Two runs of two steps."""
    config = write_tiny_config(module_path / "tiny.yaml", tiny_model, module_path / "runs")
    for method in ("dapo", "sao"):
        sets = [f"run_name={method}", "learner.learning_rate=0.01"]
        assert train(load_config(config, sets, {"method": method}), Console("quiet"))
    return module_path


def said(capfd: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch, *arguments: object, code: int = 0) -> str:
    """What a command prints, in this process."""
    monkeypatch.setattr(sys, "argv", ["grpo-lab", *map(str, arguments)])
    capfd.readouterr()
    with pytest.raises(SystemExit) as stopped:
        main()
    out, error = capfd.readouterr()
    assert stopped.value.code == code, error
    return error if code else out


def test_rollouts_shows_the_record(
    runs: Path, capfd: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    run = RunDir.open(runs / "runs/dapo")
    groups, _ = read_groups(run.rollout_files()[2])
    text = said(capfd, monkeypatch, "rollouts", run.path, "--num", 8, "--width", 100)
    right = sum(grade.outcome == "correct" for group in groups for grade in group.grades)
    assert f"step 2     8 completions of 2 problems: {right} correct" in text
    assert text.count("advantage ") == 8
    for group in groups:
        number = group.problem.id.removeprefix("p")
        assert f"problem '{group.problem.id}', expected '{group.problem.answer}'" in text
        assert f"{number} + {number} =<|im_end|>" in text, "the prompt, by the run's tokenizer"
    found = json.loads(said(capfd, monkeypatch, "rollouts", run.path, "--step", 1, "--wrong", "--json"))
    assert found["step"] == 1 and {one["outcome"] for one in found["shown"]} <= {"wrong"}
    assert "these steps have: 1-2" in said(capfd, monkeypatch, "rollouts", run.path, "--step", 7, code=2)


def test_rollout_samples_what_the_run_samples_first(
    runs: Path, tmp_path: Path, capfd: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Without a learner: the texts of the run's own first step, and of its reference bank."""
    run, config = RunDir.open(runs / "runs/dapo"), runs / "tiny.yaml"
    kept = tmp_path / "few.parquet"
    text = said(capfd, monkeypatch, "rollout", "--config", config, "--num", 2, "--samples", 3, "--output", kept)
    assert "6 completions of 2 problems" in text and "tokens/s" in text and "+ " in text
    own, _ = read_groups(run.rollout_files()[1])
    few, _ = read_groups(kept)
    assert [group.problem.id for group in few] == [group.problem.id for group in own]
    for group, first in zip(few, own, strict=True):
        assert [c.token_ids for c in group.completions] == [c.token_ids for c in first.completions[:3]]
        assert group.grades == first.grades[:3]
    bank, _ = read_groups(run.evaluations / "reference_bank.parquet")
    heldout = json.loads(said(capfd, monkeypatch, "rollout", "--config", config, "--heldout", "--num", 3, "--json"))
    assert [one["text"] for one in heldout["shown"]] == [c.text for group in bank[:3] for c in group.completions[:2]]
    before = sorted(tmp_path.iterdir())
    assert "--output" in said(capfd, monkeypatch, "rollout", "--config", config, "--output", kept, code=2)
    assert "--num 99" in said(capfd, monkeypatch, "rollout", "--config", config, "--num", 99, code=2)
    attached = ("rollout.engine=vllm", "rollout.urls=[http://node:8000]")
    arguments = [part for item in attached for part in ("--set", item)]
    assert "rollout.urls" in said(capfd, monkeypatch, "rollout", "--config", config, *arguments, code=2)
    assert sorted(tmp_path.iterdir()) == before


def test_compare_pairs_what_the_runs_kept(
    runs: Path, tmp_path: Path, capfd: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    text = said(capfd, monkeypatch, "compare", runs / "runs", "--output", "figures")
    assert "A  dapo    free_energy" in text and "A - B  F at beta 0.05" in text
    assert (tmp_path / "figures/equal_kl.png").is_file() and (tmp_path / "figures/equal_rollouts.svg").is_file()
    dapo, sao = runs / "runs/dapo", runs / "runs/sao"
    found = json.loads(said(capfd, monkeypatch, "compare", dapo, sao, "--beta", 0.3, "--json"))
    assert not (tmp_path / "comparison").exists() and found["notes"] == []
    rows = [json.loads((run / "evaluations/rollouts_00000016.json").read_text()) for run in (dapo, sao)]
    assert rows[0]["per_problem"]["ids"] == ["p0", "p1", "p2", "p3"]
    floor = [rows[0]["floor"][end]["mean"] for end in ("lower", "upper")]
    assert f"the last evaluation of all; floor F* [{floor[0]:+.3f}, {floor[1]:+.3f}] for all" in text
    for row in rows:
        for name in ("reward", "kl", "kl_rao_blackwell", "reference_reward"):
            assert np.mean(row["per_problem"][name]) == pytest.approx(row[name]["mean"], rel=1e-12), name
    energies = [0.3 * np.array(row["per_problem"]["kl"]) - np.array(row["per_problem"]["reward"]) for row in rows]
    pair = next(pair for pair in found["pairs"] if pair["quantity"] == "F at beta 0.3")
    assert pair["difference"]["mean"] == pytest.approx((energies[0] - energies[1]).mean())
    assert pair["exact"] and pair["problems"] == 4 and pair["p"] * 2**4 == pytest.approx(round(pair["p"] * 2**4))
    assert "--beta 0" in said(capfd, monkeypatch, "compare", dapo, sao, "--beta", 0, code=2)
    assert "two runs or more" in said(capfd, monkeypatch, "compare", dapo, code=2)


@pytest.mark.parametrize("command", ["rollouts", "compare"])
def test_looking_loads_no_torch_and_is_quick(runs: Path, command: str) -> None:
    paths = [runs / "runs/dapo"] if command == "rollouts" else [runs / "runs", "--json"]
    code = (
        f"import sys; sys.argv = {['grpo-lab', command, *map(str, paths)]!r}\nfrom grpo_lab.cli import main\n"
        "try:\n    main()\nexcept SystemExit as stop:\n    assert stop.code == 0\n"
        "assert not {'torch', 'transformers', 'vllm'} & set(sys.modules), 'heavy imports'"
    )
    start = time.monotonic()
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, cwd=REPOSITORY)
    assert done.returncode == 0, done.stderr
    assert time.monotonic() - start < 5  # about 1 s on an idle machine
