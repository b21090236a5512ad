"""Wrong configs and command lines: each ends with one line that names what was given and what to do, and writes nothing."""

import json
import os
import shlex
import socket
import subprocess
import sys
from collections.abc import Callable
from hashlib import sha256
from pathlib import Path

import pytest

from grpo_lab.cli import main
from grpo_lab.config.file import dump_yaml, load_config

REPOSITORY = Path(__file__).parents[2]
Refused = Callable[..., str]
TINY = """
prompts_per_step: 2
group_size: 4
total_rollouts: 16
checkpoint_every: 8
run_name: new
model: {name: ./model, dtype: float32}
data: {task: jsonl, path: rows.jsonl, train_problems: null, heldout_problems: 8}
rollout: {engine: hf, max_new_tokens: 8, max_prompt_tokens: 64}
learner: {mini_batches: 2}
evaluation: {problems: 4, samples: 4}
"""


@pytest.fixture
def place(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """The current folder: a config, a model folder without weights, data, a run with one checkpoint, and odd things."""
    (tmp_path / "tiny.yaml").write_text(TINY)
    (tmp_path / "model").mkdir()
    (tmp_path / "model/config.json").write_text("{}")
    (tmp_path / "empty").mkdir()
    (tmp_path / "file").write_text("not a folder")
    rows = [{"prompt": f"What is {n} times 3?", "answer": str(3 * n)} for n in range(12)]
    (tmp_path / "rows.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    monkeypatch.chdir(tmp_path)
    checkpoint = tmp_path / "runs/old/checkpoints/rollouts_00000008"
    (checkpoint / "training").mkdir(parents=True)
    progress = {"progress": {"step": 1, "rollouts": 8, "tokens": 60}}
    (checkpoint / "training/state.json").write_text(json.dumps(progress))
    file = checkpoint / "training/state.json"
    listed = {"training/state.json": {"bytes": file.stat().st_size, "sha256": sha256(file.read_bytes()).hexdigest()}}
    (checkpoint / "manifest.json").write_text(json.dumps({"files": listed}))
    (tmp_path / "runs/old/config.yaml").write_text(dump_yaml(load_config(tmp_path / "tiny.yaml", ["run_name=old"])))
    for variable in ("COLUMNS", "WORLD_SIZE"):
        monkeypatch.delenv(variable, raising=False)
    return tmp_path


@pytest.fixture
def refused(place: Path, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]) -> Refused:
    """Run a command line that must be refused, in this process: its one line on standard error."""

    def run(*arguments: str, code: int = 2) -> str:
        before = listing(place)
        monkeypatch.setattr(sys, "argv", ["grpo-lab", *arguments])
        with pytest.raises(SystemExit) as stopped:
            main()
        error = capfd.readouterr().err
        assert stopped.value.code == code, error
        assert is_one_line(error), error
        assert listing(place) == before, "nothing half-written"
        return error

    return run


def listing(folder: Path) -> dict[str, bytes | None]:
    """Everything below a folder, with the contents of files."""
    files = (path for path in folder.rglob("*") if "__pycache__" not in path.parts)
    return {str(path): path.read_bytes() if path.is_file() else None for path in files}


def is_one_line(error: str) -> bool:
    return error.startswith("grpo-lab: ") and error.endswith("\n") and error.count("\n") == 1 and len(error) < 1500


FILES = {  # name: text, and what the line must contain besides the file's name
    "nothing in it": ("", "is empty"),
    "comments only": ("# beta: 0.1\n", "is empty"),
    "a list": ("- beta: 0.1\n- seed: 3\n", "must be a mapping"),
    "a text": ("just words\n", "must be a mapping"),
    "a number": ("3\n", "must be a mapping"),
    "an open bracket": ("beta: [1\n", "line 2"),
    "a tab": ("learner:\n\tpasses: 2\n", "indent with spaces"),
    "two documents": ("beta: 0.1\n---\nbeta: 0.2\n", "not valid YAML"),
    "a key twice": ("beta: 0.1\nbeta: 0.2\n", "the key 'beta' stands twice"),
    "a key twice below": ("learner: {passes: 1, passes: 2}\n", "the key 'passes' stands twice"),
    "a python object": ("beta: !!python/object/apply:os.mkdir [made]\n", "plain values only"),
    "a python name": ("model: !!python/name:os.system\n", "plain values only"),
    "an unknown tag": ("beta: !mine 3\n", "plain values only"),
    "an unknown anchor": ("beta: *nowhere\n", "not valid YAML"),
    "a list as key": ("? [1, 2]\n: 3\n", "not valid YAML"),
    "a number as key": ("3: 4\n", "3"),
    "a null as key": ("~: 4\n", "text"),
    "a thousand brackets": ("beta: " + "[" * 5000 + "\n", "nested too deeply"),
    "a loop": ("data: {options: &a {x: *a}}\n", "cyclic"),
    "an empty section": ("learner:\n", "learner=null: this is a section"),
    "a number as section": ("learner: 3\n", "learner=3: this is a section"),
    "a list as section": ("model: [a]\n", "this is a section"),
    "null for a number": ("beta: null\n", "beta=null: a number is needed"),
    "null for a count": ("group_size: ~\n", "group_size=null: a whole number is needed"),
    "null for a text": ("model: {name: null}\n", "model.name=null: text is needed"),
    "null for a switch": ("tracking: {rollouts: null}\n", "true or false is needed"),
    "null for a choice": ("recipe: null\n", "'free_energy' or 'paper'"),
    "a number for a text": ("run_name: 2024\n", "put it in quotes"),
    "a date for a text": ("run_name: 2024-01-01\n", "put it in quotes"),
    "a list for a text": ("model: {name: [a, b]}\n", "text is needed"),
    "a text for a list": ("rollout: {urls: 'http://a:1'}\n", "a list is needed"),
    "an off for a choice": ("tracking: {wandb: off}\n", "'disabled', 'offline' or 'online'"),
    "a yes for a count": ("model: {lora_rank: yes}\n", "model.lora_rank=true: a number is needed"),
    "a yes for a number": ("beta: yes\n", "beta=true: a number is needed"),
    "a yes in options": ("objective: {gate_options: {clip_low: on}}\n", "a number is needed"),
    "a text in options": ("objective: {gate_options: {clip_low: wide}}\n", "objective.gate_options.clip_low='wide'"),
    "an unknown key": ("lr: 1.0e-5\n", "did you mean 'learner.learning_rate'"),
    "an unknown key below": ("learner: {lr: 1.0e-5}\n", "did you mean 'learner.learning_rate'"),
    "another trainer's section": ("trainer: {total_epochs: 3}\n", "did you mean 'learner'"),
    "a bad split of counts": ("group_size: 24\n", "total_rollouts=262144 is not a multiple"),
}  # fmt: skip


@pytest.mark.parametrize("name", FILES)
def test_files(refused: Refused, place: Path, name: str) -> None:
    text, message = FILES[name]
    (place / "bad.yaml").write_text(text)
    error = refused("train", "--config", "bad.yaml")
    assert message in error
    assert "bad.yaml" in error or "is not a multiple" in error


def test_python_in_a_config_is_not_run(refused: Refused, place: Path) -> None:
    """Neither in a file nor behind --set; `refused` has seen that no folder was made."""
    refused("train", "--set", "beta=!!python/object/apply:os.mkdir [made]")
    refused("train", "--set", "data.options=!!python/object/new:os.mkdir [made]")
    assert not (place / "made").exists()


def test_binary_files_and_folders_are_no_configs(refused: Refused, place: Path) -> None:
    (place / "weights").write_bytes(bytes(range(256)) * 10)
    assert "UTF-8" in refused("train", "--config", "weights")
    (place / "nulls").write_bytes(b"beta: 0.1\0")
    assert "not valid YAML" in refused("train", "--config", "nulls")
    assert "Is a directory" in refused("train", "--config", "empty")
    assert "No such file" in refused("train", "--config", "absent.yaml")
    assert "No such file" in refused("train", "--config", "tiny.yml")


SETS = [  # --set, and what the line must contain besides the key
    ("learner.learnin_rate=1", "did you mean 'learner.learning_rate'"),
    ("learner.lr=1e-5", "did you mean 'learner.learning_rate'"),
    ("learning_rate=1e-5", "did you mean 'learner.learning_rate'"),
    ("lr_scheduler_type=cosine", "did you mean 'learner.schedule'"),
    ("learner.warmup=10", "did you mean 'learner.warmup_updates'"),
    ("epochs=3", "did you mean 'total_rollouts'"),
    ("num_generations=8", "did you mean 'group_size'"),
    ("batch_size=8", "did you mean 'prompts_per_step'"),
    ("max_length=100", "did you mean 'rollout.max_new_tokens'"),
    ("kl_coef=0.1", "did you mean 'beta'"),
    ("clip_eps=0.2", "did you mean 'objective.gate_options'"),
    ("objective.epsilon=0.2", "did you mean 'objective.gate_options'"),
    ("temperature=0.8", "did you mean 'rollout.temperature'"),
    ("model.torch_dtype=float32", "did you mean 'model.dtype'"),
    ("save_steps=10", "did you mean 'checkpoint_every'"),
    ("modle.name=x", "did you mean 'model'"),
    ("rollout.max_new_token=8", "did you mean 'rollout.max_new_tokens'"),
    ("zzz=1", "allowed: beta"),
    ("a..b=1", "unknown key 'a'"),
    (".beta=1", "unknown key ''"),
    ("beta.=1", "it has no keys below it"),
    ("beta.x=1", "it has no keys below it"),
    ("beta", "expected key.path=value"),
    ("=1", "expected key.path=value"),
    ("", "expected key.path=value"),
    ("beta=[1", "not valid YAML"),
    ("learner={passes: 1, passes: 2}", "not valid YAML"),
    ("beta=", "beta=null: a number is needed"),
    ("beta=0", "greater than 0"),
    ("beta=-1", "greater than 0"),
    ("beta=.nan", "finite"),
    ("beta=.inf", "finite"),
    ("beta=-.inf", "finite"),
    ("beta=NaN", "finite"),
    ("beta=high", "a number is needed"),
    ("beta=true", "a number is needed"),
    ("seed=true", "a number is needed"),
    ("seed=-1", "greater than or equal to 0"),
    ("seed=1.5", "a whole number is needed"),
    ("seed=1e400", "a whole number is needed"),
    ("seed=99999999999999999999", "at most 9,007,199,254,740,992"),
    ("group_size=1", "greater than or equal to 2"),
    ("group_size=7", "not a multiple"),
    ("group_size=-4", "greater than or equal to 2"),
    ("prompts_per_step=3", "not a multiple"),
    ("total_rollouts=0", "greater than or equal to 1"),
    ("total_rollouts=20", "use for example total_rollouts=16"),
    ("total_rollouts=1e3", "a whole number is needed"),
    ("total_rollouts=8000000000000", "checkpoints, more than 100,000"),
    ("checkpoint_every=12", "use for example checkpoint_every="),
    ("keep_every=16", "without keep_last"),
    ("keep_last=-1", "greater than or equal to 0"),
    ("learner.mini_batches=3", "does not divide"),
    ("learner.passes=0", "greater than or equal to 1"),
    ("learner.learning_rate=0", "greater than 0"),
    ("learner.learning_rate=fast", "a number is needed"),
    ("learner.schedule=cosin", "'constant', 'linear' or 'cosine'"),
    ("learner.adam_beta1=1", "less than 1"),
    ("learner.shard=maybe", "true or false is needed"),
    ("learner=3", "this is a section"),
    ("evaluation.problems=9", "held out"),
    ("evaluation.samples=1", "greater than or equal to 2"),
    ("rollout.top_p=1.5", "less than or equal to 1"),
    ("rollout.temperature=0", "greater than 0"),
    ("rollout.in_flight=stop", "'wait', 'keep' or 'abort'"),
    ("rollout.urls=[node1]", "write http://host:port"),
    ("rollout.urls=[http://a:1,http://a:1]", "stands twice"),
    ("rollout.urls=[http://a:1]", "rollout.engine=hf"),
    ("rollout.workers=2", "rollout.engine=hf"),
    ("rollout.max_staleness=1", "rollout.workers=1"),
    ("rollout.in_flight=keep", "leave it at wait"),
    ("rollout.engine=vlm", "allowed: hf"),
    ("rollout.engine=no_such.engine:Engine", "cannot import engine"),
    ("data.task=gsm9k", "did you mean 'gsm8k'"),
    ("data.path=absent.jsonl", "no file"),
    ("data.path=empty", "train.jsonl"),
    ("data.heldout_problems=13", "12 distinct problems"),
    ("data.train_problems=5", "lower them"),
    ("data.options.gradin=strict", "did you mean 'data.options.grading'"),
    ("data.options.grading=kind", "'strict', 'flexible' or 'exact'"),
    ("data.options.reward=length", "data.options.reward='length'"),
    ("data.options.reward=absent_module:f", "absent_module"),
    ("data.options.reward=math:pi", "name a class or a function"),
    ("model.name=./absent", "no such folder"),
    ("model.name=./empty", "no config.json"),
    ("model.name=file", "no such folder"),
    ("model.name=a/b/c", "hub id owner/name"),
    ("model.dtype=float8", "'float32', 'bfloat16' or 'float16'"),
    ("model.lora_rank=-1", "greater than or equal to 0"),
    ("method=dap", "did you mean 'dapo'"),
    ("recipe=cake", "'free_energy' or 'paper'"),
    ("objective.kl=k3", "'loss_k3'"),
    ("objective.gate=clipp", "did you mean 'clip'"),
    ("objective.gate_options.clip_hi=0.2", "it has: clip_low, clip_high"),
    ("objective.gate_options.clip_low=.nan", "finite"),
    ("objective.gate_options=0.2", "names with values are needed"),
    ("objective.correction_options.cap=1", "no parameters"),
    ("objective.dynamic_sampling=true", "drops the KL force"),
    ("objective.overlong_cache=600", "rollout.max_new_tokens=8"),
    ("run_name=../escape", "plain folder name"),
    ("run_name=old", "'runs/old' exists: continue it with --resume runs/old"),
    ("output_dir=file", "not a folder"),
    ("output_dir=file/below", "not a folder"),
]  # fmt: skip


@pytest.mark.parametrize("override, message", SETS, ids=[override for override, _ in SETS])
def test_settings(refused: Refused, override: str, message: str) -> None:
    error = refused("train", "--dry-run", "--config", "tiny.yaml", "--set", override)
    key, _, value = override.partition("=")
    assert message in error
    assert key.rpartition(".")[2] in error or value in error


COMMANDS = [  # a command line, what its line must contain, and the exit code
    ("trian", "'trian'. Did you mean 'train'", 2),
    ("evaluate", "'evaluate'", 2),
    ("eval checkpont runs/old", "Did you mean 'checkpoint'", 2),
    ("config shwo", "Did you mean 'show'", 2),
    ("train extra", "extra", 2),
    ("train --bta 0.1", "--beta", 2),
    ("train --beta", "requires an argument", 2),
    ("train --beta x", "'--beta': 'x': Input should be a valid number", 2),
    ("train --beta nan", "finite", 2),
    ("train --beta -1", "greater than 0", 2),
    ("train --seed=1.5", "'--seed': '1.5': Input should be a valid integer", 2),
    ("train --config", "requires an argument", 2),
    ("train --method dap -c tiny.yaml", "did you mean 'dapo'", 2),
    ("train --recipe cake -c tiny.yaml", "'free_energy' or 'paper'", 2),
    ("train --processes 0", "'0': Input should be greater than or equal to 1", 2),
    ("train --probe -c tiny.yaml", "--dry-run", 2),
    ("train --gpu-memory 80 -c tiny.yaml", "--dry-run", 2),
    ("train --dry-run --gpu-memory 0 -c tiny.yaml", "--gpu-memory", 2),
    ("train --dry-run --quiet -c tiny.yaml", "--quiet", 2),
    ("train --dry-run --json -c tiny.yaml", "--json", 2),
    ("train --nodes 2 -c tiny.yaml", "--rendezvous", 2),
    ("train --nodes 2 --rendezvous here -c tiny.yaml", "host:port", 2),
    ("train --processes 2 -c tiny.yaml --set rollout.engine=vllm", "rollout.workers=1", 2),
    ("train --name a/b -c tiny.yaml", "plain folder name", 2),
    ("train --name old -c tiny.yaml", "--resume", 2),
    ("train --resume absent", "not a run folder", 2),
    ("train --resume model", "not a run folder", 2),
    ("train --resume empty", "'empty'", 2),
    ("train --resume file", "not a run folder", 2),
    ("train --resume tiny.yaml", "not a run folder", 2),
    ("train --resume runs/old --name other", "keeps its name", 2),
    ("train --resume runs/old/checkpoints/rollouts_00000008", "--resume runs/old", 2),
    ("train --resume runs/old --beta 0.5", "beta: 0.05 -> 0.5", 2),
    ("train --resume runs/old --dry-run --set learner.passes=3", "learner.passes: 1 -> 3", 2),
    ("train --resume runs/old --set group_size=3", "not a multiple", 2),
    ("train -c tiny.yaml", "no weights", 2),
    ("train -c tiny.yaml --set model.name=nobody/no-such-model", "the hub did not serve it", 2),
    ("eval", "Usage", 2),
    ("eval checkpoint", "Missing argument", 2),
    ("eval checkpoint absent", "no checkpoint", 2),
    ("eval checkpoint runs/old", "rollouts_00000008", 2),
    ("eval checkpoint model", "not a run folder", 2),
    ("eval checkpoint runs/old/checkpoints/rollouts_00000016", "rollouts_00000008", 2),
    ("eval checkpoint empty -c tiny.yaml", "no manifest.json", 1),
    ("eval checkpoint runs/old/checkpoints/rollouts_00000008 --beta 0", "greater than 0", 2),
    ("eval checkpoint runs/old/checkpoints/rollouts_00000008 --problems 99", "held out", 2),
    ("eval checkpoint runs/old/checkpoints/rollouts_00000008 --json empty", "empty", 2),
    ("eval checkpoint runs/old/checkpoints/rollouts_00000008 --json file/e.json", "file", 2),
    ("eval floor -c tiny.yaml --prompts 1", "--prompts", 2),
    ("eval floor -c tiny.yaml --prompts 9", "ask for fewer", 2),
    ("eval floor -c tiny.yaml --prompts 4 --beta 0", "greater than 0 is needed", 2),
    ("eval floor -c tiny.yaml --prompts 4 --beta nan", "--beta nan: a finite number", 2),
    ("eval floor -c tiny.yaml --prompts 4 --temperature nan", "--temperature", 2),
    ("eval floor -c tiny.yaml --prompts 4 --output file", "file", 2),
    ("eval floor -c tiny.yaml --prompts 4", "no weights", 2),
    ("sweep -c tiny.yaml --method dap", "did you mean 'dapo'", 2),
    ("sweep -c tiny.yaml --recipe cake", "'free_energy' or 'paper'", 2),
    ("sweep -c tiny.yaml --beta 0", "greater than 0", 2),
    ("sweep -c tiny.yaml --beta nan", "finite", 2),
    ("sweep -c tiny.yaml --name a/b", "plain folder name", 2),
    ("sweep -c tiny.yaml --set rollout.engine=vlm", "allowed: hf", 2),
    ("sweep -c tiny.yaml --set model.name=./empty", "no config.json", 2),
    ("sweep -c absent.yaml", "absent.yaml", 2),
    ("report", "Missing argument", 2),
    ("report absent", "not a run folder", 2),
    ("report empty", "holds no run", 2),
    ("report runs/old -o empty", "empty", 2),
    ("train tiny.yaml", "--config FILE", 2),
    ("train -c tiny.yaml --set learner.passes 2", "--set key=value", 2),
    ("compare absent", "not a run folder", 2),
    ("compare runs/old --beta 0", "greater than 0", 2),
    ("rollouts model", "not a run folder", 2),
    ("rollouts runs/old", "no rollout records", 2),
    ("rollout -c tiny.yaml -o record.txt", ".parquet", 2),
    ("metrics policy/klref", "policy/kl_ref", 2),
    ("verify-resume -c tiny.yaml --steps 1", "--steps", 2),
    ("slurm", "Missing argument", 2),
    ("slurm absent.yaml", "No such file", 2),
    ("slurm tiny.yaml --nodes 0", "write L or L+R", 2),
    ("slurm tiny.yaml --nodes 1+x", "write L or L+R", 2),
    ("slurm tiny.yaml --gpus 1 --processes 2", "--gpus 1", 2),
    ("slurm tiny.yaml --gpus 1 --time soon", "HH:MM:SS", 2),
    ("slurm tiny.yaml --gpus 1 --time 5", "--grace 300", 2),
    ("slurm tiny.yaml --gpus 1 --sbatch account", "--sbatch=--account=mine", 2),
    ("slurm tiny.yaml --gpus 1 --method dapo --method sao", "--name", 2),
    ("slurm tiny.yaml --gpus 1 -o empty", "empty", 2),
    ("export absent out", "not a run folder", 2),
    ("export runs/old empty/../runs", "not empty", 2),
    ("export runs/old/checkpoints/absent out", "absent", 1),
    ("export runs/old", "Missing argument", 2),
    ("replay absent", "not a run folder", 2),
    ("replay runs/old", "no rollout records", 2),
    ("replay runs/old --methods dap", "did you mean 'dapo'", 2),
    ("replay runs/old --methods dapo:cake", "allowed: free_energy, paper", 2),
    ("replay runs/old --methods dapo,dapo", "every name once", 2),
    ("replay runs/old --step x", "'x': Input should be a valid integer", 2),
    ("plot gates --method clipp", "did you mean 'clip'", 2),
    ("plot gates --step 3", "--run", 2),
    ("plot gates --run absent", "not a run folder", 2),
    ("plot gates --run runs/old --method dapo --method sao", "one --method", 2),
    ("plot gates --method clip --output file", "file", 2),
    ("lab equilibrium --method dap", "did you mean 'dapo'", 2),
    ("lab equilibrium --recipe cake", "free_energy", 2),
    ("lab equilibrium --beta 0", "greater than 0", 2),
    ("lab equilibrium --beta inf", "beta=inf: input should be a finite number", 2),
    ("lab equilibrium --gate absent_gate:Gate", "absent_gate", 2),
    ("lab equilibrium --json empty", "--json empty: is a folder", 2),
    ("lab equilibrium --output file", "not a folder", 2),
    ("worker -c tiny.yaml --port 70000", "--port", 2),
    ("worker -c tiny.yaml --set rollout.engine=vllm --port 65535 --count 2", "65535", 2),
    ("worker -c tiny.yaml --host 192.0.2.1 --set rollout.engine=vllm", "cannot listen there", 2),
    ("worker -c tiny.yaml", "rollout.engine=hf", 2),
    ("worker -c absent.yaml", "absent.yaml", 2),
    ("doctor --dtype float7 -c tiny.yaml", "float7", 2),
    ("doctor --environment-only -c absent.yaml", "absent.yaml", 2),
    ("list extra", "extra", 2),
    ("config show absent", "absent", 2),
    ("config show model", "not a run folder", 2),
    ("config show runs/old --method dapo", "leave out", 2),
    ("config show --method dap", "did you mean 'dapo'", 2),
    ("config diff tiny.yaml absent.yaml", "absent.yaml", 2),
    ("config diff", "Missing argument", 2),
    ("config explain lr", "did you mean 'learner.learning_rate'", 2),
    ("config explain learner.rate", "learner.learning_rate", 2),
]  # fmt: skip


@pytest.mark.parametrize("command, message, code", COMMANDS, ids=[command for command, *_ in COMMANDS])
def test_commands(refused: Refused, place: Path, command: str, message: str, code: int) -> None:
    if message == "Usage":  # a help page in place of a line
        with pytest.raises(AssertionError, match=r"Usage:"):
            refused(*shlex.split(command))
        return
    assert message in refused(*shlex.split(command), code=code)


ROWS = [
    ("{}", "no key"),
    ('{"prompt": "x"}', "no key 'answer'"),
    ('{"prompt": "", "answer": "1"}', "non-empty"),
    ('{"prompt": "x", "answer": "one"}', "one"),
    ('{"prompt": [{"role": "robot", "content": "x"}], "answer": "1"}', "system|user|assistant"),
    ('["prompt"]', "a list where a JSON object is expected"),
    ("not json", "not valid JSON"),
    ('{"prompt": "x", "answer": "1"', "not valid JSON"),
]


@pytest.mark.parametrize("row, message", ROWS, ids=[row for row, _ in ROWS])
def test_rows(refused: Refused, place: Path, row: str, message: str) -> None:
    with (place / "rows.jsonl").open("a") as file:
        file.write(row + "\n")
    error = refused("train", "--dry-run", "--config", "tiny.yaml")
    assert message in error and "rows.jsonl, line 13" in error


def test_rows_with_one_id_or_no_text(refused: Refused, place: Path) -> None:
    row = '{"prompt": "x%d", "answer": "1", "id": "same"}\n'
    (place / "rows.jsonl").write_text(row % 1 + row % 2)
    assert "id 'same' stands at" in refused("train", "--dry-run", "--config", "tiny.yaml")
    (place / "rows.jsonl").write_bytes(b'{"prompt": "\xff"}')
    assert "not UTF-8" in refused("train", "--dry-run", "--config", "tiny.yaml")
    (place / "rows.jsonl").write_text("")
    assert "0 distinct problems" in refused("train", "--dry-run", "--config", "tiny.yaml")


MODULES = {
    "absent": ("", "absent"),
    "syntax": ("class Task(:", "SyntaxError"),
    "breaks": ("1 / 0", "ZeroDivisionError"),
    "imports": ("import no_such_package", "no_such_package"),
    "nothing": ("x = 1", "defines no"),
    "number": ("Task = Gate = EngineImpl = 3", "is a int, which cannot be called"),
}


@pytest.mark.parametrize(
    "kind, key", [("Task", "data.task"), ("Gate", "objective.gate"), ("EngineImpl", "rollout.engine")]
)
@pytest.mark.parametrize("name", MODULES)
def test_dotted_paths(
    refused: Refused, place: Path, monkeypatch: pytest.MonkeyPatch, name: str, kind: str, key: str
) -> None:
    source, message = MODULES[name]
    module = f"wrong_{name}_{kind.lower()}"
    if name != "absent":
        (place / f"{module}.py").write_text(source + "\n")
    monkeypatch.syspath_prepend(place)
    error = refused("train", "--dry-run", "--config", "tiny.yaml", "--set", f"{key}={module}:{kind}")
    assert message in error and module in error


@pytest.mark.parametrize("words, message", [
    ("--set objective.gate=wrong_kinds:func", "is a function; a gate is a class with f and df"),
    ("--set objective.gate=wrong_kinds.Plain", "write wrong_kinds:Plain"),
    ("--set objective.gate=wrong_kinds.py:Plain", "write wrong_kinds:Plain"),
    ("--set objective.gate=wrong_kinds:Plain --set objective.gate_options.k=5", "the fields of a dataclass"),
    ("--set objective.gate=wrong_kinds:Needy", "cannot be made with {}"),
    ("--method wrong_kinds:Plain", "--set objective.gate=wrong_kinds:Plain"),
])  # fmt: skip
def test_a_gate_that_is_named_or_made_another_way(
    refused: Refused, place: Path, monkeypatch: pytest.MonkeyPatch, words: str, message: str
) -> None:
    (place / "wrong_kinds.py").write_text(
        "def func(ratio, advantages, old_probs): return ratio\n"
        "class Plain:\n    def __init__(self, k=3.0): pass\n"
        "class Needy:\n    def __init__(self, k): pass\n"
    )
    monkeypatch.syspath_prepend(place)
    assert message in refused("train", "--dry-run", "--config", "tiny.yaml", *words.split())


@pytest.mark.parametrize("source, message", [
    ("def __init__(self, data): self.train = data.nothing", "nothing"),
    ("def __init__(self): pass", "TypeError"),
    ("def __init__(self, data): self.train = self.heldout = ()", "grade"),
    ("def __init__(self, data): pass\n    def grade(self, *a): pass", "train"),
])  # fmt: skip
def test_a_task_that_cannot_be_made(
    refused: Refused, place: Path, monkeypatch: pytest.MonkeyPatch, source: str, message: str
) -> None:
    module = f"odd_task_{abs(hash(source))}"
    (place / f"{module}.py").write_text(f"class Task:\n    {source}\n")
    monkeypatch.syspath_prepend(place)
    error = refused("train", "--dry-run", "--config", "tiny.yaml", "--set", f"data.task={module}:Task")
    assert message in error and module in error


def test_a_broken_run_is_told(refused: Refused, place: Path) -> None:
    file = place / "runs/old/config.yaml"
    for text, message in (
        ("", "is empty"),
        ("a: [", "not valid YAML"),
        ("beta: -1\n", "beta=-1"),
        ("old_key: 1\n", "old_key"),
    ):
        file.write_text(text)
        for command in ("train --resume runs/old", "replay runs/old", "report runs/old", "config show runs/old"):
            assert message in refused(*command.split()), command


def test_a_folder_for_weights_that_is_not_there(refused: Refused, tiny_model: Path) -> None:
    sets = ("--set", f"model.name={tiny_model}", "--set", "rollout.weights_dir=absent")
    assert "rollout.weights_dir='absent': no such folder" in refused("train", "-c", "tiny.yaml", *sets)


def test_a_port_in_use(refused: Refused) -> None:
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        taken.listen()
        port = str(taken.getsockname()[1])
        error = refused("worker", "-c", "tiny.yaml", "--set", "rollout.engine=vllm", "--port", port)
    assert f"--port {port}: cannot listen there" in error


@pytest.mark.parametrize("package, settings", [
    ("wandb", "tracking.wandb=offline"),
    ("tensorboard", "tracking.tensorboard=true"),
    ("vllm", "rollout.engine=vllm rollout.workers=1"),
    ("vllm", "rollout.engine=vllm"),
    ("reasoning_gym", "data.task=reasoning_gym data.path=null"),
])  # fmt: skip
def test_missing_packages(
    refused: Refused, tiny_model: Path, monkeypatch: pytest.MonkeyPatch, package: str, settings: str
) -> None:
    for name in [name for name in sys.modules if name.split(".")[0] == package]:
        monkeypatch.delitem(sys.modules, name)
    monkeypatch.setitem(sys.modules, package, None)  # what Python keeps of a module that is not to be found
    sets = [word for setting in settings.split() for word in ("--set", setting)]
    error = refused("train", "-c", "tiny.yaml", "--set", f"model.name={tiny_model}", *sets)
    assert package in error.lower() and ("install" in error)


@pytest.mark.parametrize("arguments, message", [
    (["train", "--config", "tiny.yaml", "--set", "learner.lr=1"], "did you mean 'learner.learning_rate'"),
    (["config", "explain", "betta"], "did you mean 'beta'"),
    (["trian"], "Did you mean 'train'"),
])  # fmt: skip
def test_as_a_user_sees_it(place: Path, arguments: list[str], message: str) -> None:
    before = listing(place)
    done = subprocess.run(
        [sys.executable, "-m", "grpo_lab", *arguments],
        capture_output=True,
        text=True,
        env={**os.environ, "PYTHONPATH": str(REPOSITORY)},
    )
    assert (done.returncode, done.stdout) == (2, "") and is_one_line(done.stderr) and message in done.stderr
    assert listing(place) == before


def test_a_number_as_people_write_it_is_no_mistake(place: Path) -> None:
    """YAML 1.1 reads 1e-6, without a point, as text."""
    (place / "small.yaml").write_text("beta: 1e-2\nlearner: {learning_rate: 1e-6, weight_decay: 1E-3}\n")
    config = load_config(place / "small.yaml", ["learner.max_grad_norm=5e-1"])
    found = (config.beta, config.learner.learning_rate, config.learner.weight_decay, config.learner.max_grad_norm)
    assert found == (1e-2, 1e-6, 1e-3, 0.5)
