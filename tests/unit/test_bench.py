"""Every benchmark runs, on next to nothing. All are started at once: most of their time is imports."""

import json
import math
import os
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

BENCH = Path(__file__).parents[2] / "scripts/bench"
NAMES = ("learner", "trl", "memory", "growth", "startup", "evaluation", "simulate")


@pytest.fixture(scope="module")
def results(module_path: Path, demo_model: Path) -> Iterator[dict[str, tuple[str, Any]]]:
    """What each script printed and wrote."""
    environment = {**os.environ, "OMP_NUM_THREADS": "1", "TMPDIR": str(module_path)}
    files = {name: module_path / f"{name}.json" for name in NAMES}
    calls = {name: ["--tiny", "--json", str(files[name])] for name in NAMES}
    several = "; ".join(f"{name}.main({calls[name]})" for name in ("learner", "growth", "evaluation", "simulate"))
    # one process, so that torch is imported once
    commands = {name: [BENCH / f"{name}.py", *calls[name]] for name in ("trl", "startup", "memory")}
    commands["learner"] = [
        "-c",
        f"import sys; sys.path.insert(0, {str(BENCH)!r}); import learner, growth, evaluation, simulate; {several}",
    ]
    started: dict[str, subprocess.Popen[str]] = {}
    for name in ("trl", "startup", "memory", "learner"):
        started[name] = subprocess.Popen(
            [sys.executable, *commands[name]],
            stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, env=environment,
        )  # fmt: skip
    try:
        printed = {name: process.communicate(timeout=200)[0] for name, process in started.items()}
        assert {process.returncode for process in started.values()} == {0}, printed
        printed |= dict.fromkeys(("growth", "evaluation", "simulate"), printed["learner"])
        yield {name: (printed[name], json.loads(files[name].read_text())) for name in NAMES}
    finally:
        for process in started.values():
            process.kill()


@pytest.mark.parametrize("name", NAMES)
def test_prints_a_table_and_writes_its_numbers(results: dict[str, tuple[str, Any]], name: str) -> None:
    printed, written = results[name]
    header, *rows = written["table"]
    assert rows and all(len(row) == len(header) for row in rows)
    assert all(str(header[0]) in printed and str(row[0]) in printed for row in rows)
    assert all(math.isfinite(cell) for row in rows for cell in row if isinstance(cell, float))
    assert written["settings"]["tiny"] is True and written["machine"]["torch"] and written["data"]


def test_the_contenders_compute_one_gradient(results: dict[str, tuple[str, Any]]) -> None:
    samples = results["learner"][1]["data"]["samples"]
    norms = [timed["grad_norm"][0] for timed in samples.values()]
    assert len(norms) == 5 and norms == pytest.approx([norms[0]] * 5, rel=1e-4) and norms[0] > 0


def test_memory_is_above_nothing(results: dict[str, tuple[str, Any]]) -> None:
    assert all(point["peak_mib"] > 0 for point in results["memory"][1]["data"])


def test_the_run_reaches_its_first_token_after_everything_else(results: dict[str, tuple[str, Any]]) -> None:
    reached = results["startup"][1]["data"]["train"]
    times = [reached[what][0] for what in ("configuration checked", "model and engine up", "first sampled token")]
    assert times == sorted(times)
