"""The repository as a whole: small files, and nothing that holds on one machine only."""

import re
import subprocess
from pathlib import Path

import pytest

REPOSITORY = Path(__file__).parents[2]
MACHINE_PATH = re.compile(rf"(?<![\w.~$}}-])/({'|'.join(['work', 'root'])})(?![\w-])")


def tracked_files() -> list[Path]:
    listed = subprocess.run(["git", "ls-files", "-z"], cwd=REPOSITORY, capture_output=True, text=True)
    if listed.returncode:
        pytest.skip("not a git checkout")
    return [path for name in listed.stdout.split("\0") if name and (path := REPOSITORY / name).is_file()]


def test_no_tracked_file_names_a_path_of_one_machine() -> None:
    found = [
        f"{path.relative_to(REPOSITORY)}:{number}: {line.strip()[:100]}"
        for path in tracked_files()
        for number, line in enumerate(path.read_text(encoding="utf-8", errors="replace").splitlines(), 1)
        if MACHINE_PATH.search(line)
    ]
    assert found == []


def test_files_stay_small() -> None:
    sizes = {
        str(path.relative_to(REPOSITORY)): len(path.read_text(encoding="utf-8").splitlines())
        for path in (REPOSITORY / "grpo_lab").rglob("*.py")
    }
    assert {name: size for name, size in sizes.items() if size > 300} == {}
