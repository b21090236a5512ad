"""The image as far as a machine without Docker can tell: what it copies installs and runs, and its user is not root."""

import os
import re
import shlex
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
from conftest import REPOSITORY

LINES = re.sub(r"\\\n", " ", (REPOSITORY / "Dockerfile").read_text()).splitlines()


def instructions(name: str) -> list[str]:
    return [line.partition(" ")[2] for line in LINES if line.startswith(f"{name} ")]


@pytest.fixture(scope="module")
def home(module_path: Path) -> Path:
    """What the COPY lines bring into the image's home."""
    for line in instructions("COPY"):
        *sources, target = [word for word in shlex.split(line) if not word.startswith("--")]
        for source in sources:
            place = module_path / target / source if target.endswith("/") else module_path / target
            if (REPOSITORY / source).is_dir():
                shutil.copytree(REPOSITORY / source, place, ignore=shutil.ignore_patterns("__pycache__"))
            else:
                place.parent.mkdir(parents=True, exist_ok=True)
                shutil.copy(REPOSITORY / source, place)
    return module_path


def test_what_is_copied_installs_and_runs(home: Path) -> None:
    """In a clean virtual environment, whose dependencies are borrowed from this one."""
    subprocess.run([sys.executable, "-m", "venv", home / "venv"], check=True)
    python = home / "venv/bin/python"
    package = next(word for line in instructions("RUN") for word in shlex.split(line) if word.startswith("./src"))
    install = [python, "-m", "pip", "install", "--quiet", "--no-deps", package]
    subprocess.run(install, cwd=home, check=True, capture_output=True)
    borrowed = next(path for path in sys.path if path.endswith("site-packages"))
    environment = {**{k: v for k, v in os.environ.items() if k != "PYTHONPATH"}, "PYTHONSAFEPATH": "1"}
    places = subprocess.run(
        [python, "-c", "import sysconfig; print(sysconfig.get_path('purelib'))"], capture_output=True
    )
    (Path(places.stdout.decode().strip()) / "borrowed.pth").write_text(borrowed)
    job = ["slurm", "configs/gsm8k_qwen0.5b.yaml", "--nodes", "1+1", "--output", "job.sbatch"]
    done = subprocess.run([home / "venv/bin/grpo-lab", *job], cwd=home, env=environment, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    assert "grpo-lab worker" in (home / "job.sbatch").read_text(), "templates are part of the package"


def test_versions_are_pinned_and_allowed() -> None:
    from importlib.metadata import requires

    from packaging.requirements import Requirement

    asked = {r.name: r.specifier for r in map(Requirement, requires("grpo-lab") or [])}
    pins = dict(word.split("==") for line in instructions("RUN") for word in shlex.split(line) if "==" in word)
    assert {"vllm", "transformers", "accelerate", "peft", "datasets"} <= pins.keys()
    assert all(pinned in asked[name] for name, pinned in pins.items())
    assert all(":" in image and not image.endswith(":latest") for image in instructions("FROM"))


def test_the_user_is_not_root_and_caches_are_a_volume() -> None:
    assert instructions("USER")[-1] != "root"
    assert instructions("VOLUME") == ["/cache"] and instructions("ENTRYPOINT") == ['["grpo-lab"]']
    assert all(
        "/cache" in part for part in re.findall(r"(?:HF_HOME|GRPO_LAB_CACHE)=(\S+)", "\n".join(instructions("ENV")))
    )
