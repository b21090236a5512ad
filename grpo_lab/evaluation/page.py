"""Runs -> one HTML page that needs no network: figures as data, every text escaped."""

from __future__ import annotations

import base64
import tempfile
from collections.abc import Sequence
from importlib.resources import files
from pathlib import Path
from typing import Any

from jinja2 import Environment

from grpo_lab.config_file import dump_yaml
from grpo_lab.console import describe_config
from grpo_lab.errors import ConfigError
from grpo_lab.evaluation import comparison
from grpo_lab.evaluation.figures import draw_curves, draw_training
from grpo_lab.evaluation.report import evaluation_table, read_evaluations
from grpo_lab.objective.axes import resolve
from grpo_lab.records import read_groups
from grpo_lab.run_dir import RunDir

SAMPLES = 6


def write_page(runs: Sequence[RunDir], path: Path) -> None:
    """Write the report of `runs` to `path`. ConfigError when it cannot be written there."""
    template = files("grpo_lab.evaluation").joinpath("page.html.j2").read_text(encoding="utf-8")
    environment = Environment(autoescape=True, trim_blocks=True)
    text = environment.from_string(template).render(runs=[_run(run) for run in runs], overview=_overview(runs))
    try:
        path.write_text(text, encoding="utf-8")
    except OSError as error:
        raise ConfigError(f"cannot write {str(path)!r}: {error.strerror}; give a file in a writable folder") from None


def _run(run: RunDir) -> dict[str, Any]:
    config = run.config
    with tempfile.TemporaryDirectory() as folder:
        metrics = run.read_metrics()
        drawn = draw_training(metrics, Path(folder)) if metrics else []
        rows = read_evaluations(run)
        drawn = [*(draw_curves(rows, Path(folder)) if rows else []), *drawn]
        figures = [_figure(file) for file in drawn if file.suffix == ".svg"]
    step, samples = _samples(run)
    return {
        "name": run.path.name,
        "described": describe_config(config, resolve(config)),
        "table": evaluation_table(run),
        "figures": figures,
        "samples": samples,
        "samples_step": step,
        "config": dump_yaml(config),
    }


def _samples(run: RunDir) -> tuple[int, list[dict[str, Any]]]:
    """A few completions of the newest recorded step: right and wrong ones in turn."""
    recorded = run.rollout_files()
    if not recorded:
        return 0, []
    step = max(recorded)
    pairs = [
        (group, completion, grade)
        for group in read_groups(recorded[step])[0]
        for completion, grade in zip(group.completions, group.grades, strict=True)
    ]
    right = [pair for pair in pairs if pair[2].outcome == "correct"][: SAMPLES // 2]
    wrong = [pair for pair in pairs if pair[2].outcome != "correct"][: SAMPLES - len(right)]
    return step, [
        {
            "problem": group.problem.id, "answer": group.problem.answer, "text": completion.text, "reward": grade.reward,
            "outcome": grade.outcome, "extracted": grade.extracted, "tokens": len(completion.token_ids),
        }
        for group, completion, grade in right + wrong
    ]  # fmt: skip


def _overview(runs: Sequence[RunDir]) -> dict[str, Any] | None:
    items = comparison.compared(runs)
    if len(items) < 2:
        return None
    with tempfile.TemporaryDirectory() as folder:
        drawn = comparison.draw(items, Path(folder) / "free_energy")
        images = [_figure(file)["data"] for file in drawn if file.suffix == ".svg"]
    return {"head": comparison.HEAD, "rows": [comparison.cells(item) for item in items], "figures": images}


def _figure(file: Path) -> dict[str, str]:
    data = base64.b64encode(file.read_bytes()).decode()
    return {"alt": file.stem.replace("_", " "), "data": f"data:image/svg+xml;base64,{data}"}
