"""What a dry run says: every value's origin, the counts of the batches, the commands; against what the code does."""

import os
import re
import shlex
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import pytest
import yaml

from grpo_lab.config import Config
from grpo_lab.config.file import dump_yaml, load_config
from grpo_lab.console import Console
from grpo_lab.methods import METHODS
from grpo_lab.objective.axes import resolve
from grpo_lab.planning.origins import annotated_yaml, origins
from grpo_lab.planning.plan import batch_lines, checkpoint_steps, print_plan
from grpo_lab.planning.roles import Launch, role_lines

CONFIGS = Path(__file__).parents[2] / "configs"


def annotate(
    path: Path | None, overrides: Sequence[str] = (), flags: Mapping[str, Any] | None = None
) -> dict[str, str]:
    """The comment of every line by `key` or `section.key`; checks that the YAML is the config's."""
    config = load_config(path, overrides, flags)
    text = annotated_yaml(config, resolve(config), origins(path, overrides, flags or {}))
    assert yaml.safe_load(text) == yaml.safe_load(dump_yaml(config))
    found, section = {}, ""
    for line in text.splitlines():
        body, _, comment = line.partition("  # ")
        key = body.strip().partition(":")[0]
        if not line.startswith((" ", "-")):
            section = key if body.endswith(":") else ""
        found[f"{section}.{key}" if line.startswith(" ") else key] = comment
    return found


def test_every_origin_is_told(tmp_path: Path) -> None:
    file = tmp_path / "my.yaml"
    file.write_text(
        "beta: 0.1\nseed: 3\nlearner: {passes: 2, learning_rate: 1.0e-5}\nobjective: {gate_options: {clip_low: 0.1}}\n"
    )
    flags = {"method": "dapo", "beta": 0.02, "recipe": None, "seed": None, "run_name": "x"}
    found = annotate(file, ["learner.passes=3", "rollout.urls=[http://a:1,http://b:2]"], flags)
    expected = {
        "beta": "--beta", "method": "--method", "run_name": "--name", "seed": str(file), "recipe": "default",
        "learner.learning_rate": str(file), "learner.passes": "--set", "learner.shard": "default",
        "rollout.- http": "--set", "objective.clip_low": str(file), "objective.zscore_ddof": "default",
        "objective.gate": f"-> clip (method dapo, {METHODS['dapo'].source})",
        "objective.gate_options": f"-> clip_low 0.1, clip_high 0.28 (method dapo, {METHODS['dapo'].source})",
        "objective.advantage": "-> leave_one_out (recipe free_energy)",
        "objective.dynamic_sampling": "-> false (recipe free_energy)",
    }  # fmt: skip
    assert {key: found[key] for key in expected} == expected
    headings = {"model", "data", "rollout", "objective", "learner", "evaluation", "tracking", "rollout.urls"}
    assert {key for key, comment in found.items() if not comment} == headings


def test_a_whole_section_given_replaces_what_the_file_said(tmp_path: Path) -> None:
    file = tmp_path / "my.yaml"
    file.write_text("learner: {passes: 2}\n")
    found = annotate(file, ["learner={mini_batches: 8}"])
    assert (found["learner.passes"], found["learner.mini_batches"]) == ("default", "--set")


def test_axes_under_the_papers_recipe_and_staleness() -> None:
    source = METHODS["dapo"].source
    found = annotate(
        None,
        ["rollout.workers=1", "rollout.max_staleness=2", "objective.kl=loss_k3"],
        {"method": "dapo", "recipe": "paper"},
    )
    assert found["objective.advantage"] == f"-> zscore (recipe paper, {source})"
    assert found["objective.overlong_cache"] == f"-> 102 (recipe paper, {source})"
    assert found["objective.dynamic_sampling"] == f"-> true (recipe paper, {source})"
    assert found["objective.correction"] == "-> tis (rollout.max_staleness 2)"
    assert found["objective.correction_options"] == "-> cap 2 (correction tis)"
    assert found["objective.kl"] == "--set"


@pytest.mark.parametrize("path", sorted(CONFIGS.glob("*.yaml")), ids=lambda p: p.name)
def test_shipped_configs_load_back(path: Path) -> None:
    assert annotate(path)["method"] == str(path)


def test_long_and_odd_values_load_back() -> None:
    text = "a long instruction, " * 20 + "# not a comment: 'quoted'\nand a second line"
    assert annotate(None, ["data.options=" + yaml.safe_dump({"instruction": text, "list": [{"a": 1}, []], "none": {}})])


def lines_of(config: Config, processes: int = 1) -> str:
    return "\n".join(batch_lines(config, resolve(config), None, processes))


def test_the_seed_experiment_in_numbers() -> None:
    """1,024 rollouts a step of at most 1,024 tokens; 4 mini-batches of 8 groups; 31 siblings of 511 tokens beside a prompt."""
    text = lines_of(Config())
    for part in (
        "1,024 rollouts = 32 groups of 32, each at most 512 + 512 = 1,024 tokens: 1,048,576 a step, 268,435,456 in all",
        "mini-batch 8 groups = 256 sequences",
        "16,384 tokens fit in a micro-batch: 31 full-length siblings with their prompt shared, 16 without",
        "constant to the end (update 1,024)",
        "after steps 32, 64, 96, ..., 256",
        "500 problems x 8 samples = 4,000 completions, 36,000 in all",
        "at most 256 run at once",
    ):
        assert part in text


def test_schedule_processes_and_workers() -> None:
    overrides = [
        "learner.warmup_updates=10",
        "learner.schedule=cosine",
        "rollout.workers=2",
        "rollout.urls=[http://a:1]",
    ]
    text = lines_of(load_config(None, overrides), processes=16)
    assert "full from update 11, in step 3), then cosine to 0 after update 1,024 (the end of step 256)" in text
    assert "over 3 workers, 342 each" in text
    assert "warning    8 of 16 learner processes have no group of a mini-batch" in text


def test_a_sequence_over_the_budget_is_warned_of() -> None:
    assert "warning    a full-length sequence is 1,023 tokens" in lines_of(
        load_config(None, ["learner.microbatch_tokens=1000"])
    )


@pytest.mark.parametrize(("total", "every", "steps"), [(8, 2, [1, 2, 3, 4]), (6, 4, [2, 3]), (2, 8, [1])])
def test_checkpoint_steps(total: int, every: int, steps: list[int]) -> None:
    """As the loop saves: at every multiple, and at the end."""
    config = Config(group_size=2, prompts_per_step=1, total_rollouts=total, checkpoint_every=every)
    assert checkpoint_steps(config) == steps


def test_commands_of_every_role(tiny_model: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "")
    monkeypatch.setenv("HF_TOKEN", "hf_secret")
    monkeypatch.setenv("VLLM_API_KEY", "another_secret")
    config = load_config(
        None, [f"model.name={tiny_model}", "rollout.workers=1", "rollout.urls=[http://a:1]", "model.lora_rank=4"]
    )
    lines = role_lines(config, Launch(("train", "--dry-run", "--name", "a b"), 2))
    command, learner, worker, *_, attached = lines
    assert command == "command    grpo-lab train --name 'a b'"
    assert "WORLD_SIZE=2" in learner and shlex.join([sys.executable, "-m", "grpo_lab", "train"]) in learner
    words = shlex.split(worker)
    assert words[words.index("--model") + 1] == str(tiny_model) and words[words.index("--max-model-len") + 1] == "1024"
    assert "VLLM_ALLOW_RUNTIME_LORA_UPDATING=1" in words and "--enable-lora" in words
    assert "http://a:1" in attached and "secret" not in worker + learner


def test_a_plan_for_other_gpus(tiny_model: Path, capsys: pytest.CaptureFixture[str]) -> None:
    config = load_config(None, [f"model.name={tiny_model}"])
    words = ("train", "--dry-run", "--gpu-memory", "80", "--seed", "3", "--gpu-memory=80")
    print_plan(Console(), config, resolve(config), origins(None, [], {}), Launch(words, gpu_memory=80))
    said = capsys.readouterr().out
    assert re.search(r"^memory     learner GPU: .* GiB of 80\.0$", said, re.MULTILINE)
    assert re.search(r"^memory     vLLM GPU: .* = 32\.0 GiB of 80\.0$", said, re.MULTILINE)
    assert "--gpu-memory-utilization 0.4" in said and "RAM" not in said
    assert "\ncommand    grpo-lab train --seed 3\n" in said


def test_what_workers_share_is_said_once(monkeypatch: pytest.MonkeyPatch, tiny_model: Path) -> None:
    monkeypatch.setattr(os, "sched_getaffinity", lambda _: {3, 5}, raising=False)
    config = load_config(None, [f"model.name={tiny_model}", "rollout.workers=2"])
    lines = role_lines(config, Launch(("train",)))
    assert sum("api_server" in line for line in lines) == 1
    assert [line for line in lines if line.startswith("worker ")] == [
        "worker 0   VLLM_CPU_OMP_THREADS_BIND=3",
        "worker 1   VLLM_CPU_OMP_THREADS_BIND=5",
    ]


def test_the_whole_plan_loads_back(tiny_config: Path, capsys: pytest.CaptureFixture[str]) -> None:
    before = sorted(os.listdir(tiny_config.parent))
    config = load_config(tiny_config)
    print_plan(Console(), config, resolve(config), origins(tiny_config, [], {}), Launch(("train",)))
    head, _, tail = capsys.readouterr().out.partition("\n---\n")
    assert yaml.safe_load(head) == yaml.safe_load(dump_yaml(config))
    for label in (
        "method",
        "batches",
        "step",
        "mini-batch",
        "forward",
        "rate",
        "saved",
        "evaluated",
        "memory",
        "command",
    ):
        assert f"\n{label} " in f"\n{tail}"
    assert sorted(os.listdir(tiny_config.parent)) == before
