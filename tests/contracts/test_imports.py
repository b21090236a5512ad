"""Imports point one way: cli -> train, evaluation -> rollout, learner -> objective, thermo, tasks -> types."""

import ast
import subprocess
import sys
from pathlib import Path

import pytest

PACKAGE = Path(__file__).parents[2] / "grpo_lab"
FILES = sorted(PACKAGE.rglob("*.py"))

# What a folder may import of grpo_lab besides itself; a folder that is not listed may import all but train and cli.
SHARED = {"types", "config", "errors", "plugins", "seeding", "storage"}
ALLOWED = {
    "thermo": set[str](),
    "objective": SHARED | {"methods"},
    "tasks": SHARED,
    "rollout": SHARED,
    "learner": SHARED | {"methods", "objective", "signals"},
}
ABOVE = {"cli": {"__main__.py"}, "train": {"cli/training.py"}}  # the entry points and their only importers
LIBRARIES = {"objective": {"torch"}, "thermo": {"numpy"}}  # the only third-party imports of a folder
OWNED = {"vllm": "rollout/engines", "accelerate": "learner", "typer": "cli", "wandb": "tracking.py"}
NO_TORCH = ("tasks", "cli", "config", "methods.py", "plugins.py", "seeding.py", "types.py")


def imports(source: str) -> set[str]:
    """Every module that a source imports at run time, wherever in it; imports for type checkers only do not count."""
    tree = ast.parse(source)
    for node in ast.walk(tree):
        if isinstance(node, ast.If) and "TYPE_CHECKING" in ast.unparse(node.test):
            node.body = [ast.Pass()]
    found = set()
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            found |= {alias.name for alias in node.names}
        elif isinstance(node, ast.ImportFrom):
            assert node.level == 0 and node.module, f"line {node.lineno}: write the import with its full name"
            found |= {f"{node.module}.{alias.name}" for alias in node.names}
    return found


def violations(place: Path, source: str) -> list[str]:
    """What the file at `place` of the package imports against the rules above."""
    folder, used = place.parts[0], imports(source)
    own = {name.split(".")[1] for name in used if name.startswith("grpo_lab.")} - {folder.removesuffix(".py")}
    libraries = {name.split(".")[0] for name in used} - set(sys.stdlib_module_names) - {"grpo_lab"}
    wrong = {name for name, importers in ABOVE.items() if name in own and str(place) not in importers}
    wrong |= {name for name, owner in OWNED.items() if name in libraries and not place.is_relative_to(owner)}
    wrong |= libraries - LIBRARIES.get(folder, libraries)
    wrong |= own - ALLOWED.get(folder, own)
    return sorted(wrong | ({"torch"} & libraries if folder in NO_TORCH else set()))


@pytest.mark.parametrize("path", FILES, ids=lambda p: str(p.relative_to(PACKAGE)))
def test_direction(path: Path) -> None:
    assert violations(path.relative_to(PACKAGE), path.read_text(encoding="utf-8")) == []


@pytest.mark.parametrize(
    ("place", "source", "wrong"),
    [
        ("learner/x.py", "def f():\n    from grpo_lab.rollout.collect import g", ["rollout"]),
        ("rollout/x.py", "from grpo_lab import learner", ["learner"]),
        ("rollout/collect.py", "import vllm.sampling_params", ["vllm"]),
        ("train.py", "from accelerate import Accelerator", ["accelerate"]),
        ("evaluation/x.py", "import grpo_lab.train", ["train"]),
        ("objective/x.py", "import numpy, torch", ["numpy"]),
        ("thermo/x.py", "from grpo_lab.types import Problem", ["types"]),
        ("tasks/x.py", "import torch", ["torch"]),
        ("learner/x.py", "import torch\nfrom grpo_lab.objective.loss import loss", []),
    ],
)
def test_the_rules_catch(place: str, source: str, wrong: list[str]) -> None:
    assert violations(Path(place), source) == wrong


@pytest.mark.parametrize("module", ["grpo_lab.cli", "grpo_lab.config", "grpo_lab.methods", "grpo_lab.console"])
def test_loads_no_torch(module: str) -> None:
    code = f"import sys, {module}; print(sorted({{'torch', 'transformers', 'vllm'}} & set(sys.modules)))"
    result = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert result.stdout.strip() == "[]"
