"""Shared fixtures: the real demo model, tiny random models, and the command line as a user runs it."""

import importlib.util
import json
import os
import shutil
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

pytest_plugins = ["pool_cases"]
os.environ["HF_HUB_OFFLINE"] = "1"
os.environ["TOKENIZERS_PARALLELISM"] = "false"

REPOSITORY = Path(__file__).parent.parent
os.environ["PYTHONPATH"] = str(REPOSITORY / "tests")  # child processes find parity_task too


@pytest.fixture(scope="module")
def module_path(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Path]:
    """A folder for what the tests of a module share; it goes with them, unless one has failed."""
    folder, failed = tmp_path_factory.mktemp("module"), request.session.testsfailed
    yield folder
    if request.session.testsfailed == failed:
        shutil.rmtree(folder)


@pytest.fixture(scope="session")
def demo_model() -> Path:
    """SmolLM2-135M-Instruct as scripts/fetch_demo_model.py writes it."""
    spec = importlib.util.spec_from_file_location("fetch_demo_model", REPOSITORY / "scripts/fetch_demo_model.py")
    assert spec and spec.loader
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module.demo_model()


def write_tiny_model(folder: Path, demo_model: Path, tied: bool = True, seed: int = 0) -> Path:
    """A random two-layer Llama in float32 with the demo model's tokenizer."""
    import torch
    from transformers import AutoTokenizer, LlamaConfig, LlamaForCausalLM

    tokenizer = AutoTokenizer.from_pretrained(demo_model)
    config = LlamaConfig(
        vocab_size=len(tokenizer),
        hidden_size=128,
        intermediate_size=256,
        num_hidden_layers=2,
        num_attention_heads=2,
        num_key_value_heads=1,
        max_position_embeddings=512,
        tie_word_embeddings=tied,
        bos_token_id=1,
        eos_token_id=2,
        pad_token_id=2,
    )
    with torch.random.fork_rng():
        torch.manual_seed(seed)
        model = LlamaForCausalLM(config)
    model.save_pretrained(folder)
    tokenizer.save_pretrained(folder)
    return folder


@pytest.fixture(scope="session")
def tiny_model(tmp_path_factory: pytest.TempPathFactory, demo_model: Path) -> Path:
    return write_tiny_model(tmp_path_factory.mktemp("tiny") / "model", demo_model)


@pytest.fixture(scope="session")
def untied_model(tmp_path_factory: pytest.TempPathFactory, demo_model: Path) -> Path:
    return write_tiny_model(tmp_path_factory.mktemp("untied") / "model", demo_model, tied=False)


def write_tiny_config(path: Path, model: Path, output_dir: Path) -> Path:
    """A config of two steps that any engine runs in seconds: 2 prompts x 4 siblings of at most 8 tokens."""
    path.write_text(
        f"""
prompts_per_step: 2
group_size: 4
total_rollouts: 16
checkpoint_every: 8
output_dir: {output_dir}
run_name: run
model: {{name: {model}, dtype: float32}}
data: {{task: "parity_task:Task", train_problems: null, heldout_problems: 8}}
rollout: {{engine: hf, max_new_tokens: 8, max_prompt_tokens: 64}}
learner: {{learning_rate: 1.0e-3, mini_batches: 2}}
evaluation: {{problems: 4, samples: 4}}
"""
    )
    return path


def comparable_metrics(run: Path) -> list[dict[str, Any]]:
    """Every metric of a run's steps but the clock's."""
    rows = [json.loads(line) for line in (run / "metrics.jsonl").read_text().splitlines()]
    return [{k: v for k, v in row.items() if not k.startswith(("time/", "perf/"))} for row in rows]


@pytest.fixture
def tiny_config(tmp_path: Path, tiny_model: Path) -> Path:
    return write_tiny_config(tmp_path / "tiny.yaml", tiny_model, tmp_path / "runs")


@pytest.fixture
def grpo_lab() -> Callable[..., subprocess.CompletedProcess[str]]:
    """Run the command line in a process of its own."""

    def run(*arguments: str, timeout: float = 400) -> subprocess.CompletedProcess[str]:
        command = [sys.executable, "-m", "grpo_lab", *map(str, arguments)]
        return subprocess.run(command, capture_output=True, text=True, timeout=timeout, cwd=REPOSITORY)

    return run


@pytest.fixture
def command(monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]) -> Callable[..., tuple[int, str]]:
    """`grpo-lab` in this process: its exit code, and all it said."""
    from grpo_lab.cli import main

    def run(*arguments: object) -> tuple[int, str]:
        monkeypatch.setattr(sys, "argv", ["grpo-lab", *map(str, arguments)])
        with pytest.raises(SystemExit) as ended:
            main()
        return int(ended.value.code or 0), "".join(capfd.readouterr())

    return run
