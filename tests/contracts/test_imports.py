"""Imports point one way: cli -> train, evaluation -> rollout, learner -> objective, thermo, tasks -> types."""

import ast
import subprocess
import sys
from pathlib import Path

import pytest

PACKAGE = Path(__file__).parents[2] / "grpo_lab"
FILES = sorted(PACKAGE.rglob("*.py"))

FORBIDDEN = {
    "rollout": {"grpo_lab.learner", "grpo_lab.objective", "grpo_lab.thermo", "grpo_lab.evaluation", "grpo_lab.train"},
    "learner": {"grpo_lab.rollout", "grpo_lab.evaluation", "grpo_lab.tasks", "grpo_lab.train", "grpo_lab.thermo"},
    "objective": {"grpo_lab.rollout", "grpo_lab.learner", "grpo_lab.evaluation", "grpo_lab.tasks", "grpo_lab.train"},
    "thermo": {"torch", "transformers", "grpo_lab.rollout", "grpo_lab.learner", "grpo_lab.objective", "grpo_lab.types"},
    "tasks": {"torch", "grpo_lab.rollout", "grpo_lab.learner", "grpo_lab.objective", "grpo_lab.evaluation"},
}
OWNED = {"vllm": "rollout/engines", "accelerate": "learner", "typer": "cli.py", "wandb": "tracking.py"}


def imports(path: Path) -> set[str]:
    """Every module a file imports at run time, wherever in it; imports for type checkers only do not count."""
    tree = ast.parse(path.read_text())
    for node in ast.walk(tree):
        if isinstance(node, ast.If) and "TYPE_CHECKING" in ast.unparse(node.test):
            node.body = [ast.Pass()]
    found = set()
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            found |= {alias.name for alias in node.names}
        elif isinstance(node, ast.ImportFrom) and node.module:
            found |= {node.module} | {f"{node.module}.{alias.name}" for alias in node.names}
    return found


@pytest.mark.parametrize("path", FILES, ids=lambda p: str(p.relative_to(PACKAGE)))
def test_direction(path: Path) -> None:
    place = path.relative_to(PACKAGE)
    used = imports(path)
    for module in FORBIDDEN.get(place.parts[0], set()):
        assert not any(name == module or name.startswith(module + ".") for name in used), f"{place} imports {module}"
    for module, owner in OWNED.items():
        if any(name.split(".")[0] == module for name in used):
            assert str(place).startswith(owner), f"{place} imports {module}, which belongs to {owner}"


@pytest.mark.parametrize("module", ["grpo_lab.cli", "grpo_lab.config", "grpo_lab.methods", "grpo_lab.console"])
def test_loads_no_torch(module: str) -> None:
    code = f"import sys, {module}; print(sorted({{'torch', 'transformers', 'vllm'}} & set(sys.modules)))"
    result = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert result.stdout.strip() == "[]"


def test_files_stay_small() -> None:
    sizes = {str(path.relative_to(PACKAGE)): len(path.read_text().splitlines()) for path in FILES}
    assert max(sizes.values()) <= 300, max(sizes, key=lambda name: sizes[name])
