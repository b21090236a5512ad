"""The floor before training, sweeps that go on where they stopped, pages that need no network, evaluation without traces."""

import hashlib
import json
import re
import shutil
import subprocess
import sys
from collections.abc import Callable
from dataclasses import replace
from html.parser import HTMLParser
from pathlib import Path

import pytest
from conftest import write_tiny_config

from grpo_lab.assemble import assemble
from grpo_lab.cli import main
from grpo_lab.config.file import load_config
from grpo_lab.console import Console
from grpo_lab.errors import RunError
from grpo_lab.evaluation.bank import ReferenceBank, run_bank
from grpo_lab.evaluation.page import write_page
from grpo_lab.run_dir import RunDir
from grpo_lab.storage.records import read_groups, write_groups
from grpo_lab.train import train

Run = Callable[..., subprocess.CompletedProcess[str]]


def trace(run: RunDir) -> tuple[list[dict[str, float]], list[str]]:
    """All metrics but the clock's, and the sha256 of weights and optimizer."""
    rows = [{k: v for k, v in r.items() if not k.startswith(("time/", "perf/"))} for r in run.read_metrics()]
    files = sorted(run.checkpoints.glob("*/**/*.safetensors"))
    return rows, [hashlib.sha256(file.read_bytes()).hexdigest() for file in files]


@pytest.mark.parametrize("engine", ["hf", pytest.param("vllm", marks=[pytest.mark.vllm, pytest.mark.slow])])
def test_evaluation_does_not_change_training(tiny_config: Path, tmp_path: Path, engine: str) -> None:
    """Metrics and weights of a run with evaluations equal those of one without, bit for bit."""
    traces = []
    for enabled in ("true", "false"):
        sets = [f"evaluation.enabled={enabled}", f"rollout.engine={engine}", f"run_name=eval-{enabled}"]
        traces.append(trace(train(load_config(tiny_config, sets, {"method": "sao"}), Console())))
    assert traces[0] == traces[1] and len(traces[0][1]) == 4
    assert (tmp_path / "runs/eval-true/evaluations").exists() and not (
        tmp_path / "runs/eval-false/evaluations"
    ).exists()


def test_sweep_skips_continues_and_compares(grpo_lab: Run, tiny_config: Path, tmp_path: Path) -> None:
    grid = ("--method", "dapo", "--beta", "0.05", "--beta", "0.5", "--name", "s", "--set", "tracking.rollouts=false")
    first = grpo_lab("sweep", "--config", tiny_config, *grid, "--recipe", "free_energy")
    assert first.returncode == 0, first.stderr
    folder = tmp_path / "runs/s"
    names = [f"dapo-free_energy-beta{beta}-seed0" for beta in ("0.05", "0.5")]
    assert all((folder / name / "checkpoints/rollouts_00000016").is_dir() for name in names)
    assert len(list((folder / "banks").glob("reference_bank-*.parquet"))) == 1  # both betas share it
    rows = json.loads((folder / "sweep.json").read_text())
    assert [row["beta"] for row in rows] == ["0.05", "0.5"] and rows[0]["rollouts"] == "16"
    before = trace(RunDir.open(folder / names[1]))
    shutil.rmtree(folder / names[1] / "checkpoints/rollouts_00000016")
    again = grpo_lab("sweep", "--config", tiny_config, *grid, "--recipe", "free_energy")
    assert again.returncode == 0, again.stderr
    assert f"{names[0]}, finished" in again.stdout and f"{names[1]}, unfinished" in again.stdout
    assert trace(RunDir.open(folder / names[1])) == before
    assert (folder / "free_energy.png").is_file()
    longer = grpo_lab("sweep", "--config", tiny_config, *grid, "--beta", "0.05", "--set", "total_rollouts=24")
    assert longer.returncode == 0, longer.stderr
    assert RunDir.open(folder / names[0]).read_metrics()[-1]["rollouts/total"] == 24
    changed = grpo_lab("sweep", "--config", tiny_config, *grid, "--set", "learner.passes=3")
    assert changed.returncode == 2 and "learner.passes: 1 -> 3" in changed.stderr
    wrong = grpo_lab("sweep", "--config", tiny_config, "--method", "dap", "--name", "t")
    assert wrong.returncode == 2 and "did you mean 'dapo'" in wrong.stderr and not (tmp_path / "runs/t").exists()


class _Page(HTMLParser):
    """Collects what a browser would fetch or run."""

    def __init__(self) -> None:
        super().__init__()
        self.tags: list[str] = []
        self.sources: list[str] = []

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.tags.append(tag)
        self.sources += [value or "" for name, value in attrs if name in ("src", "href")]


def test_report_is_one_page_that_escapes_what_models_write(tiny_config: Path, tmp_path: Path) -> None:
    runs = []
    for name in ("one", "two"):
        run = train(load_config(tiny_config, [f"run_name={name}"], {"method": "grpo", "recipe": "paper"}), Console())
        file = run.rollout_files()[2]
        groups, _ = read_groups(file)
        hostile = (
            groups[0]
            .completions[0]
            .__class__(**{**vars(groups[0].completions[0]), "text": "<script>alert(1)</script>"})
        )
        group = replace(groups[0], completions=(hostile, *groups[0].completions[1:]))
        write_groups(file, [group, *groups[1:]])
        runs.append(run)
    write_page(runs, tmp_path / "report.html")
    text = (tmp_path / "report.html").read_text()
    page = _Page()
    page.feed(text)
    assert "script" not in page.tags and text.count("&lt;script&gt;alert(1)") == 2
    assert page.sources and all(source.startswith(("data:image/svg+xml;base64,", "#run-")) for source in page.sources)
    assert "divided by std(r)" in text and re.search(r"F - F_ref|F − F_ref", text) and "beta: 0.05" in text


def test_report_of_no_run_is_one_line(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    for path in (tmp_path, tmp_path / "absent"):
        monkeypatch.setattr(sys, "argv", ["grpo-lab", "report", str(path), "--output", str(tmp_path / "r.html")])
        with pytest.raises(SystemExit) as stopped:
            main()
        assert stopped.value.code == 2 and "give the path" in capfd.readouterr().err
        assert not (tmp_path / "r.html").exists()


def test_eval_floor_compares_weightings_and_reuses_its_banks(grpo_lab: Run, tiny_config: Path, tmp_path: Path) -> None:
    arguments = ("eval", "floor", "--config", tiny_config, "--prompts", "4", "--candidates", "6", "--beta", "0.1")
    first = grpo_lab(*arguments, "--output", tmp_path / "f")
    assert first.returncode == 0, first.stderr
    numbers = json.loads((tmp_path / "f/floor_study.json").read_text())
    index = numbers["beta"].index(0.1)
    by_name = {w["name"]: w for w in numbers["weightings"]}
    assert set(by_name) == {"full_sequence", "length_normalised", "mc"}
    assert 1 <= by_name["full_sequence"]["ess"] <= by_name["length_normalised"]["ess"] + 1e-9 <= 6 + 1e-9
    assert all(-1 <= w["floor"][index] <= -w["reference_reward"] + 1e-12 for w in by_name.values())
    bounds = numbers["consistent"]["floor"]["0.1"]
    assert bounds["lower"]["mean"] <= bounds["upper"]["mean"]
    banks = {file: file.stat().st_mtime_ns for file in (tmp_path / "f").glob("*.parquet")}
    assert len(banks) == 2  # T 0.8 and T 1
    assert grpo_lab(*arguments, "--output", tmp_path / "f").returncode == 0
    assert banks == {file: file.stat().st_mtime_ns for file in (tmp_path / "f").glob("*.parquet")}
    many = grpo_lab("eval", "floor", "--config", tiny_config, "--prompts", "99")
    assert many.returncode == 2 and "data.heldout_problems=8" in many.stderr


def test_a_bank_is_refused_when_its_problems_or_grades_changed(tmp_path: Path, tiny_model: Path) -> None:
    """The same path and ids with other answers is another bank; the same bank under another reward is refused."""
    file = tmp_path / "p.jsonl"
    config = write_tiny_config(tmp_path / "c.yaml", tiny_model, tmp_path / "runs")
    sets = [
        "data.task=jsonl",
        f"data.path={file}",
        "data.heldout_problems=2",
        "evaluation.problems=2",
        "data.options.grading=exact",
    ]

    def bank(*answers: str) -> ReferenceBank:
        rows = [{"prompt": f"q{n}", "answer": answer} for n, answer in enumerate(answers)]
        file.write_text("".join(json.dumps(row) + "\n" for row in rows))
        parts = assemble(load_config(config, sets))
        try:
            return run_bank(parts, tmp_path / "bank")
        finally:
            parts.close()

    (tmp_path / "bank").mkdir()
    first = bank("1", "2", "3", "4")
    assert bank("1", "2", "3", "4").fingerprint == first.fingerprint
    with pytest.raises(RunError, match="other settings"):
        bank("5", "6", "7", "8")
    kept = tmp_path / "bank/reference_bank.parquet"
    groups, metadata = read_groups(kept)
    generous = [replace(g, grades=tuple(replace(grade, reward=1.0) for grade in g.grades)) for g in groups]
    write_groups(kept, generous, metadata)
    with pytest.raises(RunError, match="the reward changed"):
        bank("1", "2", "3", "4")
