"""`grpo-lab config show|diff|explain` and what the shell completes, against the configuration itself."""

import os
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest
import yaml

from grpo_lab.cli import completion, main
from grpo_lab.config import Config, check_batch_algebra
from grpo_lab.config.explain import explain, kind_of
from grpo_lab.config.file import FREE_ON_RESUME, build_config, changed_keys, changes, dump_yaml, load_config
from grpo_lab.config.names import _FOREIGN, fields, section_of, unknown_key
from grpo_lab.errors import ConfigError
from grpo_lab.methods import METHODS
from grpo_lab.objective.axes import resolve

Command = Callable[..., str]
KEYS = [key for key, field in fields().items() if not section_of(field)]


@pytest.fixture
def command(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> Command:
    """`grpo-lab` in this process: what it prints."""

    def run(*arguments: object) -> str:
        monkeypatch.setattr(sys, "argv", ["grpo-lab", *map(str, arguments)])
        with pytest.raises(SystemExit) as ended:
            main()
        assert ended.value.code == 0
        return capsys.readouterr().out

    return run


@pytest.fixture
def run(tmp_path: Path) -> Path:
    """The folder of a run, as far as a configuration goes."""
    (tmp_path / "runs/r/checkpoints").mkdir(parents=True)
    config = load_config(None, ["beta=0.2", "run_name=r"], {"method": "dapo"})
    (tmp_path / "runs/r/config.yaml").write_text(dump_yaml(config))
    return tmp_path / "runs/r"


@pytest.mark.parametrize("key", fields())
def test_every_key_has_a_description(key: str) -> None:
    text = fields()[key].description or ""
    assert text.endswith(".") and text[0] != " " and "\n" not in text, f"{key}: write a docstring below the field"


@pytest.mark.parametrize("key", [k for k in KEYS if "None" in str(fields()[k].annotation)])
def test_null_is_explained(key: str) -> None:
    assert "null =" in (fields()[key].description or "")


def test_show_prints_a_config_that_reads_back_equal(command: Command, tmp_path: Path) -> None:
    file = tmp_path / "c.yaml"
    file.write_text("group_size: 16\ntotal_rollouts: 1024\ncheckpoint_every: 512\n")
    text = command("config", "show", "--config", file, "--method", "dapo", "--set", "learner.passes=2")
    expected = load_config(file, ["learner.passes=2"], {"method": "dapo"})
    assert build_config(yaml.safe_load(text), "shown") == expected
    said = " ".join(text.split())
    for part in (f"group_size: 16 # {file}", "method: dapo # --method", "passes: 2 # --set", "seed: 0 # default"):
        assert part in said
    assert "gate_options: {} # -> clip_low 0.2, clip_high 0.28 (method dapo" in said


def test_show_of_a_run(command: Command, run: Path) -> None:
    text = command("config", "show", run)
    assert build_config(yaml.safe_load(text), "shown") == load_config(run / "config.yaml")
    said = " ".join(text.split())
    assert f"beta: 0.2 # {run}" in said and "seed: 0 # default" in said


def test_diff(command: Command, run: Path, tmp_path: Path) -> None:
    file = tmp_path / "c.yaml"
    file.write_text("method: dapo\nbeta: 0.1\nkeep_last: 3\nobjective: {gate_options: {clip_low: 0.1}}\n")
    lines = command("config", "diff", run, file).splitlines()
    assert lines == [
        "beta: 0.2 -> 0.1", "keep_last: 0 -> 3", "objective.gate_options.clip_low: not set -> 0.1", "run_name: 'r' -> null",
    ]  # fmt: skip
    other = tmp_path / "other.yaml"
    other.write_text("method: sao\nobjective: {kl: none}\n")
    following = command("config", "diff", file, other).splitlines()
    assert "method: 'dapo' -> 'sao'" in following and "objective.kl: null -> 'none'" in following
    assert [line for line in following if "follows" in line] == [
        "objective.gate: 'clip' -> 'double_sided' (follows from these)",
        "objective.old: 'learner' -> 'rollout' (follows from these)",
    ]
    marked = command("config", "diff", run, file, "--resume-relevant").splitlines()
    assert [line[0] for line in marked] == ["!", " ", "!", " ", "!"] and "2 of 4" in marked[-1]
    assert command("config", "diff", run, run / "config.yaml") == "no difference\n"
    assert command("config", "diff", file).splitlines()[0] == "beta: 0.05 -> 0.1", "alone: against the defaults"


def test_diff_marks_what_resume_refuses() -> None:
    old = Config()
    for schedule in ("constant", "linear"):
        tree = {"total_rollouts": 524_288, "beta": 0.1, "seed": 3, "learner": {"schedule": schedule}}
        new = build_config(tree, "test")
        marked = [str(change) for change in changes(old, new) if change.is_trajectory]
        assert marked == changed_keys(old, new)
        assert any(line.startswith("total_rollouts") for line in marked) == (schedule == "linear")


def test_explain_without_a_key_lists_all_of_them(command: Command) -> None:
    lines = command("config", "explain").splitlines()
    assert [line.split(" = ")[0].split(":")[0] for line in lines] == list(fields())
    assert len(explain("learner")) == 1 + sum(key.startswith("learner.") for key in fields())


@pytest.mark.parametrize("key", KEYS)
def test_explain_says_the_default_and_what_resume_allows(key: str) -> None:
    lines = explain(key)
    name, *parents = reversed(key.split("."))
    tree = Config().model_dump(mode="json")
    for parent in reversed(parents):
        tree = tree[parent]
    [default] = [line.split(None, 1)[1] for line in lines if line.startswith("  default ")]
    assert yaml.safe_load(default) in (tree[name], str(tree[name]))
    [resume] = [line for line in lines if line.startswith("  resume ")]
    free = any(key == each or key.startswith(f"{each}.") for each in FREE_ON_RESUME)
    assert ("may not" not in resume) == free


@pytest.mark.parametrize("key, kind", [
    ("beta", "number above 0"),
    ("rollout.top_p", "number above 0 and at most 1"),
    ("data.train_problems", "whole number at least 1, or null"),
    ("rollout.urls", "list of text"),
    ("model.dtype", "one of float32, bfloat16, float16"),
    ("objective.old", "one of learner, rollout, or null"),
    ("objective.dynamic_sampling", "true or false, or null"),
    ("data.options", "names with values"),
    ("rollout.engine", "one of hf, scripted, vllm, vllm_server, or module:Class"),
])  # fmt: skip
def test_kinds(key: str, kind: str) -> None:
    assert kind_of(key, fields()[key]) == kind


def test_explain_says_what_methods_make_of_an_axis() -> None:
    lines = explain("objective.kl")
    for recipe in ("free_energy", "paper"):
        block = lines[lines.index(f"  recipe {recipe}") + 1 :]
        found = {}
        for line in block:
            if not line.startswith("    "):
                break
            value, methods = line.strip().split(": ")
            found |= dict.fromkeys(METHODS if methods == "every method" else methods.split(", "), value)
        expected = {m: resolve(build_config({"method": m, "recipe": recipe}, "test")).kl for m in METHODS}
        assert found == expected


def test_explaining_loads_no_torch() -> None:
    code = (
        "import sys; from grpo_lab.config.explain import explain, fields\nfor key in [None, *fields()]: explain(key)\n"
    )
    done = subprocess.run(
        [sys.executable, "-c", f"{code}print('torch' in sys.modules)"], capture_output=True, text=True
    )
    assert done.stdout.strip() == "False", done.stderr


@pytest.mark.parametrize("given, meant", [
    ("lr", "learner.learning_rate"), ("learner.lr", "learner.learning_rate"), ("num_generations", "group_size"),
    ("learning_rate", "learner.learning_rate"), ("learner.beta", "beta"), ("bta", "beta"), ("n_samples", "group_size"),
    ("lerning_rate", "learner.learning_rate"), ("rollout.temprature", "rollout.temperature"), ("lora_r", "model.lora_rank"),
])  # fmt: skip
def test_what_an_unknown_key_may_mean(given: str, meant: str) -> None:
    section = given.rpartition(".")[0]
    beside = [key for key in fields() if key.rpartition(".")[0] == section]
    assert f"did you mean '{meant}'" in str(unknown_key(given, beside))


def test_other_trainers_names_mean_one_key_and_are_not_ours() -> None:
    every = [name for names in _FOREIGN.values() for name in names.split()]
    assert {name for name in every if every.count(name) > 1} == {"algorithm"}, "a key here, a section there"
    assert set(_FOREIGN) <= set(fields()), "each names a key that exists"
    assert not set(every) & {key.rpartition(".")[2] for key in KEYS} - {"name"}


def test_completion() -> None:
    assert completion.methods("da") == ["dapo"] and completion.recipes("") == ["free_energy", "paper"]
    assert [key for key, _ in completion.keys("learner.adam")] == ["learner.adam_beta1", "learner.adam_beta2"]
    assert [key for key, _ in completion.assignments("learner.s")] == [
        "learner.schedule=",
        "learner.shard=",
        "learner.share_prompt=",
    ]
    assert all(text for _, text in completion.keys(""))


def test_completion_in_bash_loads_no_torch() -> None:
    """As bash asks: words so far in the environment, the answers on standard output."""
    code = "import sys; sys.argv = ['grpo-lab']\nfrom grpo_lab.cli import app\ntry: app(prog_name='grpo-lab')\n"
    code += "finally: print('torch' in sys.modules)"
    for words, answers in (
        ("grpo-lab train --method d", ["dapo", "dr_grpo", "dual_clip", "dppo_tv"]),
        ("grpo-lab config explain learner.p", ["learner.passes"]),
    ):
        variables = {
            "COMP_WORDS": words,
            "COMP_CWORD": str(len(words.split()) - 1),
            "_GRPO_LAB_COMPLETE": "complete_bash",
        }
        done = subprocess.run(
            [sys.executable, "-c", code], capture_output=True, text=True, env={**os.environ, **variables}
        )
        assert done.stdout.split() == [*answers, "False"], done.stderr


@pytest.mark.parametrize("tree, message", [
    ({"keep_every": 32_768}, "without keep_last"),
    ({"keep_last": 2, "keep_every": 1_000}, "use for example keep_every=32768"),
    ({"keep_last": 2, "keep_every": 100_000}, "use for example keep_every=98304"),
    ({"total_rollouts": 1024 * 200_001, "checkpoint_every": 1024}, "200,001 checkpoints"),
])  # fmt: skip
def test_checkpoints_that_nobody_wants(tree: dict[str, int], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        build_config(tree, "test")
    check_batch_algebra(Config(keep_last=2, keep_every=65_536))
