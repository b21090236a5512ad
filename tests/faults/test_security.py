"""What comes from outside (models, checkpoints, configs, completions) runs no code here."""

import ast
import hashlib
import json
import pickle
import re
import sys
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
import yaml
from conftest import write_tiny_config

from grpo_lab.config import DataConfig, ModelConfig, RolloutConfig
from grpo_lab.config.file import load_config
from grpo_lab.errors import ConfigError, RunError, UserError
from grpo_lab.hub import check_local_model, load_tokenizer
from grpo_lab.learner.checkpoint import load_checkpoint
from grpo_lab.learner.model import PolicyModel
from grpo_lab.rollout.engines import EngineSpec, build_engine
from grpo_lab.run_dir import RunDir
from grpo_lab.tasks._answers import grade_number
from grpo_lab.tasks.reasoning_gym import Task as ReasoningGym

REPOSITORY = Path(__file__).parents[2]
SOURCES = sorted([*REPOSITORY.glob("grpo_lab/**/*.py"), *REPOSITORY.glob("scripts/**/*.py")])
Command = Callable[..., tuple[int, str]]


# -- nothing that is read runs ---------------------------------------------------------------------------------------


def dangers(source: str) -> list[str]:
    """The calls of a source that may run what they are given."""
    found = []
    for node in ast.walk(ast.parse(source)):
        if isinstance(node, ast.Import | ast.ImportFrom) and re.search(
            r"\b(pickle|cloudpickle|dill|joblib|shelve|marshal)\b", ast.unparse(node)
        ):
            found.append(ast.unparse(node))
        if not isinstance(node, ast.Call):
            continue
        name, given = ast.unparse(node.func), {word.arg: ast.unparse(word.value) for word in node.keywords}
        unsafe = name in ("eval", "exec", "os.system", "os.popen", "yaml.unsafe_load", "yaml.full_load")
        unsafe |= name == "torch.load" and given.get("weights_only") != "True"
        unsafe |= name == "yaml.load" and given.get("Loader") not in ("yaml.SafeLoader", "_UniqueKeyLoader")
        unsafe |= given.get("shell") == "True" or given.get("allow_pickle") == "True"
        found += [ast.unparse(node)] if unsafe else []
    return found


def test_nothing_here_runs_what_it_reads() -> None:
    found = {path: dangers(path.read_text(encoding="utf-8")) for path in SOURCES}
    assert len(found) > 100 and {path: calls for path, calls in found.items() if calls} == {}


@pytest.mark.parametrize("source", [
    "import pickle", "from pickle import loads", "eval(text)", "exec(text)", "os.system('ls')", "torch.load(f)",
    "torch.load(f, weights_only=False)", "yaml.load(t, Loader=yaml.Loader)", "yaml.load(t)", "run('ls', shell=True)",
    "np.load(f, allow_pickle=True)",
])  # fmt: skip
def test_the_search_finds_what_it_looks_for(source: str) -> None:
    assert dangers(source)
    assert not dangers("model.eval(); yaml.safe_load(t); torch.load(f, weights_only=True); re.compile('eval(')")


class Payload:
    """Unpickled, it makes a file."""

    def __init__(self, marker: Path) -> None:
        self._marker = marker

    def __reduce__(self) -> tuple[object, tuple[str, str]]:
        return open, (str(self._marker), "w")


def bomb(file: Path, marker: Path) -> None:
    """A pickle in `file` that leaves `marker` when it is opened, as this proves."""
    file.write_bytes(pickle.dumps(Payload(marker)))
    pickle.loads(file.read_bytes()).close()
    marker.unlink()


def test_a_model_of_pickles_is_refused_unopened(tiny_model: Path, tmp_path: Path, command: Command) -> None:
    folder, marker = tmp_path / "model", tmp_path / "marker"
    folder.mkdir()
    for name in ("config.json", "tokenizer.json", "tokenizer_config.json", "generation_config.json"):
        (folder / name).write_bytes((tiny_model / name).read_bytes())
    bomb(folder / "pytorch_model.bin", marker)
    config = write_tiny_config(tmp_path / "c.yaml", folder, tmp_path)
    code, said = command("train", "--config", config)
    assert code == 2 and "pytorch_model.bin" in said and "only safetensors are loaded" in said and said.count("\n") == 1
    model = ModelConfig(name=str(folder), dtype="float32")
    with pytest.raises(ConfigError):
        PolicyModel(folder, folder, model, torch.device("cpu"))
    with pytest.raises((OSError, ConfigError)):
        build_engine(EngineSpec(folder, model, RolloutConfig(engine="hf")))
    assert not marker.exists() and not (tmp_path / "run").exists()


def sealed(folder: Path, **files: bytes) -> Path:
    """A checkpoint of somebody who knows how to write a manifest."""
    (folder / "training").mkdir(parents=True)
    progress = {"progress": {"step": 1, "rollouts": 8, "tokens": 9}, "learner": {}}
    (folder / "training/state.json").write_text(json.dumps(progress))
    for name, data in files.items():
        (folder / name.replace("__", "/").replace("_safe", ".safe").replace("_bin", ".bin")).write_bytes(data)
    entry = lambda data: {"bytes": len(data), "sha256": hashlib.sha256(data).hexdigest()}  # noqa: E731
    listed = {str(file.relative_to(folder)): entry(file.read_bytes()) for file in folder.rglob("*") if file.is_file()}
    (folder / "manifest.json").write_text(json.dumps({"files": listed}))
    return folder


def test_a_checkpoint_with_pickles_is_refused_unopened(tmp_path: Path) -> None:
    marker = tmp_path / "marker"
    bomb(tmp_path / "pickle", marker)
    data = (tmp_path / "pickle").read_bytes()
    disguised = load_checkpoint(sealed(tmp_path / "disguised", training__state_safetensors=data))
    with pytest.raises(RunError, match="no readable training state"):
        _ = disguised.training_state
    with pytest.raises(RunError, match="is a pickle"):
        load_checkpoint(sealed(tmp_path / "adapter", adapter_model_bin=data))
    with pytest.raises(RunError, match="outside of the folder"):
        folder = sealed(tmp_path / "escaping")
        listed = json.loads((folder / "manifest.json").read_text())
        listed["files"]["../pickle"] = {"bytes": len(data), "sha256": hashlib.sha256(data).hexdigest()}
        (folder / "manifest.json").write_text(json.dumps(listed))
        load_checkpoint(folder)
    assert not marker.exists()


def test_code_that_comes_with_a_model_is_not_run(
    tiny_model: Path, tmp_path: Path, command: Command, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("transformers.dynamic_module_utils.HF_MODULES_CACHE", str(tmp_path / "modules"))
    folder, marker = tmp_path / "model", tmp_path / "marker"
    folder.mkdir()
    for file in tiny_model.iterdir():
        (folder / file.name).symlink_to(file)
    code = f"open({str(marker)!r}, 'w')\nfrom transformers import LlamaConfig\nclass Foreign(LlamaConfig):\n    pass\n"
    (folder / "foreign.py").write_text(code)
    for name, classes in (
        ("config.json", ("AutoConfig", "AutoModelForCausalLM")),
        ("tokenizer_config.json", ("AutoTokenizer",)),
    ):
        value = ["foreign.Foreign", "foreign.Foreign"] if "AutoTokenizer" in classes else "foreign.Foreign"
        changed = json.loads((tiny_model / name).read_text()) | {"auto_map": dict.fromkeys(classes, value)}
        (folder / name).unlink()
        (folder / name).write_text(json.dumps(changed))
    model = ModelConfig(name=str(folder), dtype="float32")
    assert not model.trust_remote_code
    check_local_model(model)  # transformers knows a Llama without that code
    load_tokenizer(folder)
    PolicyModel(folder, folder, model, torch.device("cpu"))
    config = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps({**config, "model_type": "foreign", "architectures": ["Foreign"]}))
    status, said = command("train", "--config", write_tiny_config(tmp_path / "c.yaml", folder, tmp_path))
    assert status == 2 and "model.trust_remote_code=true" in said and "Traceback" not in said
    assert not marker.exists()
    from transformers import AutoConfig

    AutoConfig.from_pretrained(folder, trust_remote_code=True)
    assert marker.exists()


def test_yaml_makes_no_objects(tmp_path: Path) -> None:
    file, marker = tmp_path / "c.yaml", tmp_path / "marker"
    bad = f'!!python/object/apply:os.system ["touch {marker}"]'
    file.write_text(f"method: {bad}\n")
    with pytest.raises(ConfigError, match="not valid YAML"):
        load_config(file)
    with pytest.raises(ConfigError, match="not valid YAML"):
        load_config(None, [f"method={bad}"])
    (tmp_path / "run/checkpoints").mkdir(parents=True)
    (tmp_path / "run/config.yaml").write_text(file.read_text())
    with pytest.raises((UserError, yaml.YAMLError)):
        _ = RunDir.open(tmp_path / "run").config
    yaml.unsafe_load(bad)
    assert marker.exists()
    marker.unlink()


HOSTILE = "__import__('pathlib').Path({marker!r}).touch()"


def test_no_answer_is_evaluated(tmp_path: Path) -> None:
    marker = str(tmp_path / "marker")
    text = HOSTILE.format(marker=marker)
    for answer in (
        f"#### {text}",
        f"\\boxed{{{text}}}",
        f"4\n{text}",
        "#### 9**9**9**9",
        "#### 1e999999999",
        "#### 1/0",
    ):
        for protocol in ("strict", "flexible"):
            assert grade_number("4", answer, False, protocol).outcome in ("wrong", "unparsable", "correct")
    assert not Path(marker).exists()


def test_no_native_scorer_evaluates_an_answer(tmp_path: Path) -> None:
    """Those of reasoning_gym whose files could: refused, or the answer has no effect."""
    from reasoning_gym.factory import DATASETS

    marker = str(tmp_path / "marker")
    refused, tried = set(), set()
    for name, (dataset, _) in sorted(DATASETS.items()):
        if not re.search(
            r"\b(eval|exec|parse_expr|sympify)\(", Path(sys.modules[dataset.__module__].__file__ or "").read_text()
        ):
            continue
        options = {"generator": name, "grading": "native", "pool": 4}
        try:
            task = ReasoningGym(
                DataConfig(task="reasoning_gym", train_problems=None, heldout_problems=1, options=options)
            )
        except ConfigError as error:
            refused |= {name} if "evaluates the model's text" in str(error) else set()
            continue
        for text in (HOSTILE.format(marker=marker), f"[{HOSTILE.format(marker=marker)}]"):
            task.grade(task.train[0], f"<answer>{text}</answer>", False)
        tried.add(name)
    assert {"countdown", "simple_integration", "polynomial_multiplication"} <= refused and tried
    assert not Path(marker).exists()
