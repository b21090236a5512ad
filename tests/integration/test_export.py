"""Exports of real checkpoints: the same policy in transformers, an honest card, and nothing written where something fails."""

import json
import resource
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
import torch
import yaml
from conftest import write_tiny_config
from learner_cases import make_groups
from transformers import AutoModelForCausalLM, AutoTokenizer, GenerationConfig

from grpo_lab.assemble import build_learner
from grpo_lab.config.file import load_config
from grpo_lab.errors import ConfigError, RunError
from grpo_lab.evaluation.bank import ReferenceBank
from grpo_lab.evaluation.evaluate import measure
from grpo_lab.export import export_checkpoint
from grpo_lab.hub import load_tokenizer
from grpo_lab.learner.checkpoint import Progress, save_checkpoint
from grpo_lab.learner.learner import Learner
from grpo_lab.run_dir import RunDir

PROMPT, COMPLETION = tuple(range(30, 50)), tuple(range(400, 440, 3))


def make_run(folder: Path, model: Path, *sets: str, base: Path | None = None) -> tuple[Path, Learner]:
    """A run with one checkpoint of a moved policy, evaluated; `base` where the model's name is a hub id."""
    config = load_config(write_tiny_config(folder / "tiny.yaml", model, folder / "runs"), sets)
    run = RunDir.create(config)
    learner = build_learner(config, base=base or model)
    with torch.no_grad():
        for index, parameter in enumerate(learner.policy.trainable().values()):
            noise = torch.randn(parameter.shape, generator=torch.Generator().manual_seed(index))
            parameter.add_(noise.to(parameter.dtype) * 0.02)
    checkpoint = save_checkpoint(run.checkpoints, learner, load_tokenizer(base or model), Progress(2, 16, 90))
    groups = make_groups()
    evaluation = measure(learner, groups, ReferenceBank(tuple(make_groups(1)), ""), config.beta, 16)
    run.evaluations.mkdir()
    (run.evaluations / "rollouts_00000016.json").write_text(json.dumps(evaluation.to_json()))
    return checkpoint.folder, learner


def export(path: Path, output: Path, merge: bool = False) -> list[str]:
    """The lines an export says."""
    lines: list[str] = []
    assert export_checkpoint(path, output, merge, lines.append) == output
    return lines


def logits(folder: Path) -> torch.Tensor:
    model: Any = AutoModelForCausalLM.from_pretrained(folder)
    with torch.no_grad():
        return torch.as_tensor(model(torch.tensor([PROMPT + COMPLETION])).logits[0])


def logprobs(folder: Path) -> torch.Tensor:
    """Of the completion's tokens after the prompt, by transformers alone."""
    rows = logits(folder).log_softmax(-1)[len(PROMPT) - 1 : -1]
    return rows.gather(1, torch.tensor(COMPLETION)[:, None])[:, 0]


def card(folder: Path) -> tuple[dict[str, Any], str]:
    """The front matter and the text of a model card."""
    _, front, text = (folder / "README.md").read_text().split("---\n", 2)
    return yaml.safe_load(front), text


def texts(folder: Path) -> str:
    """Everything a reader could see in a folder, weights and vocabulary aside."""
    files = [path for path in folder.rglob("*") if path.suffix in (".json", ".md", ".jinja")]
    return "".join(path.read_text() for path in files if path.name != "tokenizer.json")


@pytest.mark.parametrize("model", ["tiny_model", "untied_model"])
def test_a_full_checkpoint_is_the_same_policy(request: pytest.FixtureRequest, tmp_path: Path, model: str) -> None:
    base: Path = request.getfixturevalue(model)
    checkpoint, learner = make_run(tmp_path, base)
    said = export(checkpoint, tmp_path / "out", merge=True)

    assert torch.equal(logits(tmp_path / "out"), logits(checkpoint))
    assert not torch.allclose(logprobs(tmp_path / "out"), logprobs(base), atol=0.01)
    torch.testing.assert_close(
        logprobs(tmp_path / "out"), torch.tensor(learner.score(PROMPT, COMPLETION)), atol=1e-5, rtol=0
    )
    left = {"training", "manifest.json"}
    assert {p.name for p in (tmp_path / "out").iterdir()} == {p.name for p in checkpoint.iterdir()} - left | {
        "README.md"
    }
    prompt = [{"role": "user", "content": "1 + 1?"}]
    tokenizers: list[Any] = [AutoTokenizer.from_pretrained(path) for path in (tmp_path / "out", base)]
    ids = [tokenizer.apply_chat_template(prompt)["input_ids"] for tokenizer in tokenizers]
    assert ids[0] == ids[1] and len(ids[0]) > 5
    assert GenerationConfig.from_pretrained(tmp_path / "out").eos_token_id == 2
    assert any("nothing to merge" in line for line in said)
    assert said[-1] == f"next       vllm serve {tmp_path / 'out'} --dtype float32"


def test_a_merged_adapter_is_the_adapted_model(tmp_path: Path, tiny_model: Path) -> None:
    checkpoint, learner = make_run(tmp_path, tiny_model, "model.lora_rank=4")
    export(checkpoint, tmp_path / "merged", merge=True)
    said = export(checkpoint, tmp_path / "adapter")

    adapted = logits(tmp_path / "adapter")
    assert torch.equal(adapted, logits(checkpoint))
    assert not torch.allclose(adapted, logits(tiny_model), atol=0.01)
    torch.testing.assert_close(logits(tmp_path / "merged"), adapted, atol=1e-5, rtol=0)
    torch.testing.assert_close(
        logprobs(tmp_path / "merged"), torch.tensor(learner.score(PROMPT, COMPLETION)), atol=1e-5, rtol=0
    )
    assert not list((tmp_path / "merged").glob("adapter*"))
    assert (tmp_path / "merged/generation_config.json").is_file() and (
        tmp_path / "merged/chat_template.jinja"
    ).is_file()
    assert str(tiny_model) not in texts(tmp_path / "merged")
    assert json.loads((tmp_path / "adapter/adapter_config.json").read_text())["base_model_name_or_path"] == str(
        tiny_model
    )
    assert any("local folder" in line and str(tiny_model) in line for line in said)
    adapter = f"--enable-lora --max-lora-rank 8 --lora-modules adapter={tmp_path / 'adapter'} --dtype float32"
    assert said[-1] == f"next       vllm serve {tiny_model} {adapter}"
    assert card(tmp_path / "adapter")[0]["base_model_relation"] == "adapter"


def test_a_merged_model_has_the_runs_dtype(tmp_path: Path, tiny_model: Path) -> None:
    checkpoint, _ = make_run(tmp_path, tiny_model, "model.lora_rank=4", "model.dtype=bfloat16")
    said = export(checkpoint, tmp_path / "out", merge=True)
    assert any("rounds to bfloat16" in line for line in said)
    assert said[-1] == f"next       vllm serve {tmp_path / 'out'}"
    model: Any = AutoModelForCausalLM.from_pretrained(tmp_path / "out")
    assert {parameter.dtype for parameter in model.parameters()} == {torch.bfloat16}


def test_an_adapter_names_its_base_on_the_hub(tmp_path: Path, tiny_model: Path) -> None:
    snapshot = tmp_path / "hub/models--owner--tiny/snapshots/0"
    snapshot.parent.mkdir(parents=True)
    snapshot.symlink_to(tiny_model)
    sets = ("model.name=owner/tiny", "model.revision=v1", "model.lora_rank=4")
    checkpoint, _ = make_run(tmp_path, tiny_model, *sets, base=snapshot)
    assert str(snapshot) in (checkpoint / "adapter_config.json").read_text()
    said = export(checkpoint, tmp_path / "out")

    adapter = json.loads((tmp_path / "out/adapter_config.json").read_text())
    assert (adapter["base_model_name_or_path"], adapter["revision"]) == ("owner/tiny", "v1")
    assert str(tmp_path) not in texts(tmp_path / "out")
    assert card(tmp_path / "out")[0]["base_model"] == "owner/tiny"
    assert "vllm serve owner/tiny --enable-lora" in said[-1] and not any("local folder" in line for line in said)


def test_the_card_tells_the_run(tmp_path: Path, tiny_model: Path) -> None:
    checkpoint, _ = make_run(tmp_path, tiny_model, "method=sao", "recipe=paper", "beta=0.2")
    export(checkpoint, tmp_path / "my model")
    front, text = card(tmp_path / "my model")
    assert front == {
        "base_model": tiny_model.name,
        "base_model_relation": "finetune",
        "library_name": "transformers",
        "pipeline_tag": "text-generation",
        "tags": ["grpo_lab", "reinforcement-learning", "sao"],
    }
    row = json.loads((checkpoint.parents[1] / "evaluations/rollouts_00000016.json").read_text())
    for key in ("reward", "kl", "free_energy"):
        assert f"| {row[key]['mean']:.3f} +- {row[key]['se']:.3f} |" in text
    assert f"[{row['floor']['lower']['mean']:+.3f}, {row['floor']['upper']['mean']:+.3f}] | 0.2 |" in text
    for fact in ("recipe paper, beta 0.2", "gate double_sided", "16 rollouts, 2 steps, 90 completion tokens"):
        assert fact in text
    assert 'from_pretrained("my model")' in text and "vllm serve 'my model' --dtype float32" in text
    assert str(tiny_model.parent) not in texts(tmp_path / "my model") and str(tmp_path) not in texts(
        tmp_path / "my model"
    )


def test_the_card_of_gsm8k_names_its_data_and_says_when_nothing_was_measured(tmp_path: Path, tiny_model: Path) -> None:
    checkpoint, _ = make_run(tmp_path, tiny_model, "data.task=gsm8k")
    (checkpoint.parents[1] / "evaluations/rollouts_00000016.json").unlink()
    export(checkpoint, tmp_path / "out")
    front, text = card(tmp_path / "out")
    assert front["datasets"] == ["openai/gsm8k"]
    assert "not evaluated" in text and "E[r] |" not in text


def test_damaged_checkpoints_are_refused_and_a_run_gives_its_newest_whole_one(tmp_path: Path, tiny_model: Path) -> None:
    older, learner = make_run(tmp_path, tiny_model)
    run, output = older.parents[1], tmp_path / "exports/out"
    newer = save_checkpoint(older.parent, learner, load_tokenizer(tiny_model), Progress(3, 24, 120)).folder
    damage(newer / "model.safetensors")
    with pytest.raises(RunError, match=r"model\.safetensors is damaged"):
        export(newer, output)
    assert not output.parent.exists()
    warning, chosen = export(run, output)[:2]
    assert f"{newer.name}: model.safetensors is damaged" in warning and chosen == f"checkpoint {older}"
    damage(older / "tokenizer.json")
    with pytest.raises(RunError, match=r"no checkpoint in .* is whole"):
        export(run, tmp_path / "other")
    with pytest.raises(ConfigError, match="not a run folder"):
        export(tmp_path, tmp_path / "other")
    with pytest.raises(RunError, match=r"no checkpoint at .*00000999; there are: rollouts_00000016, rollouts_00000024"):
        export(older.parent / "rollouts_00000999", tmp_path / "other")
    assert not list(tmp_path.glob("*other*"))


def damage(file: Path) -> None:
    with file.open("r+b") as opened:
        opened.seek(5000)
        byte = opened.read(1)
        opened.seek(5000)
        opened.write(bytes([byte[0] ^ 1]))


def test_an_output_in_use_is_refused_and_an_empty_one_taken(tmp_path: Path, tiny_model: Path) -> None:
    checkpoint, _ = make_run(tmp_path, tiny_model)
    output = tmp_path / "out"
    output.mkdir()
    export(checkpoint, output)
    before = {path: path.stat().st_mtime_ns for path in output.iterdir()}
    for taken in (output, tmp_path / "tiny.yaml"):
        with pytest.raises(ConfigError, match="exists"):
            export(checkpoint, taken)
    assert {path: path.stat().st_mtime_ns for path in output.iterdir()} == before
    assert output.stat().st_mode & 0o777 == checkpoint.stat().st_mode & 0o777


@contextmanager
def files_of_at_most(size: int) -> Iterator[None]:
    """The system refuses to write beyond `size` bytes of a file, as a full disk would."""
    soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (size, hard))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))


@pytest.mark.parametrize("rank", [0, 4])
def test_a_failed_write_leaves_nothing(tmp_path: Path, tiny_model: Path, rank: int) -> None:
    checkpoint, _ = make_run(tmp_path, tiny_model, f"model.lora_rank={rank}")
    before = sorted(tmp_path.iterdir())
    with files_of_at_most(10_000_000), pytest.raises(RunError, match=r"cannot write .*out.*: .*File too large"):
        export(checkpoint, tmp_path / "out", merge=True)
    assert sorted(tmp_path.iterdir()) == before
