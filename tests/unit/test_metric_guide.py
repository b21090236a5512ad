"""The guide explains what runs log, all of it and nothing else."""

import ast
import json
import re
import sys
from pathlib import Path

import pytest

import grpo_lab
from grpo_lab.cli import main
from grpo_lab.cli.guide import find
from grpo_lab.config.file import load_config
from grpo_lab.console import Console
from grpo_lab.errors import ConfigError
from grpo_lab.metric_guide import GUIDE, Metric, newest_values
from grpo_lab.train import train

PACKAGE = Path(grpo_lab.__file__).parent
LOGGING = (
    "metrics.py",
    "batch.py",
    "train.py",
    "tracking.py",
    "learner",
    "objective",
    "rollout",
    "evaluation/evaluate.py",
)
FAMILIES = {name.split("/")[0] for name in GUIDE if "/" in name}
SHOWN = re.compile(r"(eval/samples|figures/.*)")  # no numbers


def texts() -> tuple[set[str], set[str], set[str]]:
    """Of the code that logs: its plain strings, its f-strings as patterns, and every constant that can fill one."""
    plain, patterns, constants = set(), set(), set()
    files = [
        f for name in LOGGING for f in ([PACKAGE / name] if name.endswith(".py") else (PACKAGE / name).rglob("*.py"))
    ]
    for file in files:
        tree = ast.parse(file.read_text())
        pieces = {id(piece) for node in ast.walk(tree) if isinstance(node, ast.JoinedStr) for piece in node.values}
        for node in ast.walk(tree):
            if isinstance(node, ast.Constant) and isinstance(node.value, str | int | float):
                constants.add(f"{node.value:g}" if isinstance(node.value, float) else str(node.value))
                plain |= {node.value} if isinstance(node.value, str) and id(node) not in pieces else set()
            elif isinstance(node, ast.JoinedStr):
                parts = (re.escape(v.value) if isinstance(v, ast.Constant) else "(.+)" for v in node.values)
                patterns.add("".join(parts))
    return plain, patterns, constants


def test_no_entry_is_stale() -> None:
    """Every name stands in the code that logs, or an f-string there makes it of constants that stand there too."""
    plain, patterns, constants = texts()
    families = [p for p in patterns if p.split("/")[0] in FAMILIES and "/" in p]

    def is_made(name: str) -> bool:
        found = (re.fullmatch(pattern, name) for pattern in families)
        return name in plain or any(match and set(match.groups()) <= constants for match in found)

    assert [name for name in GUIDE if not is_made(name)] == []
    assert not is_made("time/sleep") and not is_made("gate/median")


def test_every_name_in_the_code_has_an_entry() -> None:
    name = re.compile(rf"({'|'.join(sorted(FAMILIES))})/[a-z0-9_.]+")
    found = {text for text in texts()[0] if name.fullmatch(text) and not SHOWN.fullmatch(text)}
    assert len(found) > 40 and found - set(GUIDE) == set()


def test_a_run_logs_what_the_guide_explains(
    tiny_config: Path, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    config = load_config(
        tiny_config, ["objective.correction=tis", "total_rollouts=8"], {"method": "dapo", "recipe": "paper"}
    )
    run = train(config, Console())
    assert run is not None
    (logged,) = run.read_metrics()
    assert set(logged) - set(GUIDE) == set() and {"rollouts/sampled", "reward/overlong_penalty"} <= set(logged)
    values = newest_values(run)
    assert values["eval/free_energy"] == json.loads(
        (run.evaluations / "rollouts_00000008.json").read_text()
    )["free_energy"]["mean"]  # fmt: skip
    assert {name for name in GUIDE if name.startswith("eval/")} <= set(values)
    run.append_metrics({**logged, "step": 2, "rollout/mismatch_mean": 0.25, "gate/ess": 0.9})
    capfd.readouterr()
    monkeypatch.setattr(sys, "argv", ["grpo-lab", "metrics", "--run", str(run.path), "*m*"])
    with pytest.raises(SystemExit) as stopped:
        main()
    out = capfd.readouterr().out
    assert (
        stopped.value.code == 0 and "after step 2" in out and re.search(r"^! rollout/mismatch_mean +0.25 ", out, re.M)
    )
    assert "grpo-lab doctor" in out and "gate/ess" not in out


def test_ranges_and_texts() -> None:
    assert Metric("", "", low=0, high=1).is_healthy(1) and not Metric("", "", high=1).is_healthy(1.1)
    assert Metric("", "").is_healthy(-1e9) and Metric("", "").marked == ""
    assert Metric("", "", low=0.5, high=2).marked == "Marked below 0.5 or above 2."
    assert Metric("", "", high=0).marked == "Marked above 0."
    for name, metric in GUIDE.items():
        assert metric.meaning.endswith(".") and metric.healthy.endswith("."), name
        assert metric.remedy or (metric.low, metric.high) == (None, None), f"{name}: a range needs a remedy"


def test_names_are_found() -> None:
    assert find("loss") == ["loss"] and set(find("time/*")) == {name for name in GUIDE if name.startswith("time/")}
    assert "policy/kl_ref" in find("kl") and "eval/kl" in find("kl")
    for wrong, near in (("policy/loss", "'loss'"), ("gate/open_fractoin", "'gate/open_fraction'")):
        with pytest.raises(ConfigError, match=f"did you mean {near}"):
            find(wrong)
