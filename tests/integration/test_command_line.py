"""The command line as a user runs it: every method, evaluation, transformers loading, and mistakes in one line."""

import json
import math
import os
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path

import pytest

from grpo_lab.cli import main
from grpo_lab.config.file import load_config
from grpo_lab.console import Console
from grpo_lab.methods import METHODS
from grpo_lab.storage.records import read_groups
from grpo_lab.train import train

Run = Callable[..., subprocess.CompletedProcess[str]]
REPOSITORY = Path(__file__).parents[2]


@pytest.fixture(scope="module")
def finished(request: pytest.FixtureRequest, module_path: Path, tiny_model: Path) -> Path:
    """A finished run of two steps with the hf engine."""
    sets = {
        "prompts_per_step": 2, "group_size": 4, "total_rollouts": 16, "checkpoint_every": 8, "output_dir": module_path,
        "model.name": tiny_model, "model.dtype": "float32", "data.task": "parity_task:Task",
        "data.train_problems": "null", "data.heldout_problems": 8, "rollout.engine": "hf",
        "rollout.max_new_tokens": 8, "rollout.max_prompt_tokens": 64, "learner.mini_batches": 2, "evaluation.problems": 4,
        "evaluation.samples": 4,
    }  # fmt: skip
    arguments = [x for key, value in sets.items() for x in ("--set", f"{key}={value}")]
    command = [sys.executable, "-m", "grpo_lab", "train", "--method", "dapo", "--name", "run", *arguments]
    done = subprocess.run(command, capture_output=True, text=True, cwd=REPOSITORY)
    assert done.returncode == 0, done.stderr
    assert "beta_eff = 0.05" in done.stdout and "floor F*" in done.stdout and "free_energy.png" in done.stdout
    return module_path / "run"


@pytest.mark.parametrize(
    "method, recipe", [*((m, "paper") for m in METHODS), ("dapo", "free_energy"), ("sao", "free_energy")]
)
def test_every_method_trains(tiny_config: Path, method: str, recipe: str) -> None:
    config = load_config(tiny_config, ["evaluation.enabled=false"], {"method": method, "recipe": recipe})
    rows = train(config, Console()).read_metrics()
    assert [row["step"] for row in rows] == [1, 2]
    for name in ("policy/grad_norm", "gate/open_fraction", "gate/mean", "gate/ess", "ratio/max", "policy/beta_eff_p50"):
        assert all(math.isfinite(row[name]) for row in rows), name
    assert rows[0]["policy/grad_norm"] > 0


def test_a_run_leaves_everything_behind(finished: Path) -> None:
    rows = [json.loads(line) for line in (finished / "metrics.jsonl").read_text().splitlines()]
    assert [row["rollouts/total"] for row in rows] == [8, 16]
    assert max(row["rollout/mismatch_max"] for row in rows) < 1e-4
    groups, _ = read_groups(finished / "rollouts/step_000002.parquet")
    assert len(groups) == 2 and all(len(group.completions) == 4 for group in groups)
    assert {c.weight_version for group in groups for c in group.completions} == {1}
    assert sum(sum(group.rewards) for group in groups) / 8 == rows[1]["reward/mean"]
    assert len(list((finished / "evaluations").glob("rollouts_*.json"))) == 3
    start = json.loads((finished / "evaluations/rollouts_00000000.json").read_text())
    assert start["kl"] == {"mean": 0, "se": 0} and start["against_reference"]["mean"] == 0
    assert start["free_energy"]["mean"] == -start["reward"]["mean"]
    assert sorted(p.suffix for p in (finished / "figures").iterdir()) == [".png"] * 5 + [".svg"] * 5


def test_checkpoint_loads_with_plain_transformers(finished: Path) -> None:
    from transformers import AutoModelForCausalLM, AutoTokenizer

    folder = finished / "checkpoints/rollouts_00000016"
    model, tokenizer = AutoModelForCausalLM.from_pretrained(folder), AutoTokenizer.from_pretrained(folder)
    ids = tokenizer.apply_chat_template(
        [{"role": "user", "content": "1 + 1 ="}], add_generation_prompt=True, return_tensors="pt"
    )
    assert model.generate(**ids, max_new_tokens=3).shape[1] > ids["input_ids"].shape[1]


def test_eval_checkpoint_repeats_the_run_s_own_numbers(grpo_lab: Run, finished: Path, tmp_path: Path) -> None:
    """The same seeds, weights and bank: the same numbers, from another process."""
    done = grpo_lab("eval", "checkpoint", finished / "checkpoints/rollouts_00000016", "--json", tmp_path / "e.json")
    assert done.returncode == 0, done.stderr
    for word in ("E[r]", "KL", "F ", "floor F*", "gap F-F*"):
        assert word in done.stdout
    kept = json.loads((finished / "evaluations/rollouts_00000016.json").read_text())
    again = json.loads((tmp_path / "e.json").read_text())
    for name in ("reward", "kl", "kl_rao_blackwell", "free_energy", "floor"):
        assert again[name] == kept[name], name


def test_lora_trains_and_resumes(grpo_lab: Run, tiny_config: Path, tmp_path: Path) -> None:
    done = grpo_lab(
        "train", "--config", tiny_config, "--set", "model.lora_rank=4", "--set", "learner.learning_rate=0.01"
    )
    assert done.returncode == 0, done.stderr
    checkpoint = tmp_path / "runs/run/checkpoints/rollouts_00000016"
    assert (checkpoint / "adapter_model.safetensors").is_file() and not (checkpoint / "model.safetensors").exists()
    rows = [json.loads(line) for line in (tmp_path / "runs/run/metrics.jsonl").read_text().splitlines()]
    assert max(row["rollout/mismatch_max"] for row in rows) < 1e-4 and rows[1]["policy/kl_ref"] != 0
    more = grpo_lab("train", "--resume", tmp_path / "runs/run", "--set", "total_rollouts=24")
    assert more.returncode == 0, more.stderr
    assert grpo_lab("eval", "checkpoint", checkpoint).returncode == 0


@pytest.mark.vllm
def test_demo_model_trains_with_vllm(grpo_lab: Run, tmp_path: Path, demo_model: Path) -> None:
    """One real step of the demo: SmolLM2, vLLM, chain_sum. The sampler is the learner to rounding, before and after a push."""
    sets = (
        f"output_dir={tmp_path}",
        f"model.name={demo_model}",
        "group_size=16",
        "prompts_per_step=2",
        "total_rollouts=64",
        "checkpoint_every=64",
        "evaluation.problems=2",
        "evaluation.samples=8",
    )
    arguments = [x for s in sets for x in ("--set", s)]
    done = grpo_lab(
        "train",
        "--config",
        "configs/quickstart_cpu.yaml",
        "--method",
        "dapo",
        "--beta",
        "0.05",
        "--name",
        "r",
        *arguments,
    )
    assert done.returncode == 0, done.stderr
    rows = [json.loads(line) for line in (tmp_path / "r/metrics.jsonl").read_text().splitlines()]
    assert len(rows) == 2
    assert max(row["rollout/mismatch_max"] for row in rows) < 1e-3
    assert rows[0]["policy/kl_ref"] == 0 and rows[1]["policy/kl_ref"] > 0
    assert not list(Path("/dev/shm").glob(f"grpo_lab-weights-{os.getpid()}-*"))


@pytest.mark.parametrize("arguments, code, message", [
    (["train", "--method", "dap"], 2, "did you mean 'dapo'"),
    (["train", "--beta", "-1"], 2, "greater than 0"),
    (["train", "--beta", "x"], 2, "valid number"),
    (["train", "--set", "modle.name=x"], 2, "did you mean 'model'"),
    (["train", "--config", "nowhere.yaml"], 2, "No such file"),
    (["train", "--resume", "nowhere"], 2, "not a run folder"),
    (["train", "--set", "model.name=./nowhere"], 2, "no such folder"),
    (["train", "--set", "data.task=gsm9k"], 2, "did you mean 'gsm8k'"),
    (["train", "--set", "rollout.engine=vlm"], 2, "vllm"),
    (["train", "--set", "objective.gate=clipp"], 2, "did you mean 'clip'"),
    (["train", "--name", "../escape", "--set", "rollout.engine=scripted"], 2, "plain folder name"),
    (["eval", "checkpoint", "nowhere"], 2, "no checkpoint"),
    (["train", "--recipe", "cake"], 2, "'free_energy' or 'paper'"),
])  # fmt: skip
def test_mistakes_are_one_line(
    tiny_config: Path,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capfd: pytest.CaptureFixture[str],
    arguments: list[str],
    code: int,
    message: str,
) -> None:
    if arguments[0] == "train" and "--config" not in arguments and "--resume" not in arguments:
        arguments = [*arguments, "--config", str(tiny_config)]
    monkeypatch.setattr(sys, "argv", ["grpo-lab", *arguments])
    with pytest.raises(SystemExit) as stopped:
        main()
    error = capfd.readouterr().err
    assert stopped.value.code == code, error
    assert message in error and "Traceback" not in error
    assert not (tmp_path / "runs").exists(), "nothing half-written"


def test_existing_run_is_not_overwritten(grpo_lab: Run, finished: Path, tiny_config: Path) -> None:
    done = grpo_lab("train", "--config", tiny_config, "--set", f"output_dir={finished.parent}", "--name", "run")
    assert done.returncode == 2 and "--resume" in done.stderr


def test_dry_run_writes_nothing_and_counts_right(grpo_lab: Run, tmp_path: Path) -> None:
    done = grpo_lab("train", "--dry-run", "--method", "dapo", "--set", f"output_dir={tmp_path / 'out'}")
    assert done.returncode == 0 and not (tmp_path / "out").exists()
    counts = ("8,192 groups", "256 steps", "1.2603 epochs", "8 checkpoints", "after steps 32, 64, 96, ..., 256")
    said = " ".join(done.stdout.split())
    for text in (*counts, "method: dapo # --method", "seed: 0 # default", "command grpo-lab train --method dapo"):
        assert text in said


def test_list_names_everything(grpo_lab: Run) -> None:
    done = grpo_lab("list")
    for name in (*METHODS, "clip", "gsm8k", "vllm", "scripted"):
        assert name in done.stdout


def test_help_is_quick(grpo_lab: Run) -> None:
    """No heavy import on the way to --help; the bound is generous, a torch import alone takes longer."""
    start = time.monotonic()
    assert grpo_lab("--help").returncode == 0
    assert time.monotonic() - start < 2
