"""A checkpoint -> a folder that transformers, vLLM and lm-eval load: weights, config, tokenizer and a model card.

The training state stays behind. A LoRA checkpoint becomes an adapter, or with `merge` a whole model.
"""

from __future__ import annotations

import json
import os
import shlex
import shutil
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from importlib.metadata import version
from pathlib import Path
from typing import Any

import torch
from huggingface_hub import ModelCardData
from rich.filesize import decimal

from grpo_lab.config import Config, ModelConfig, expand_path
from grpo_lab.console import describe_config
from grpo_lab.errors import ConfigError, RunError
from grpo_lab.hub import check_local_model, resolve_model
from grpo_lab.learner.checkpoint import Checkpoint, load_checkpoint, newest_checkpoint
from grpo_lab.learner.model import PolicyModel
from grpo_lab.objective.axes import resolve
from grpo_lab.rollout.engines import EngineSpec
from grpo_lab.rollout.vllm_options import engine_options
from grpo_lab.run_dir import RunDir
from grpo_lab.storage.scratch import PARTIAL, disk_errors
from grpo_lab.thermo.statistics import Estimate

_ADAPTER_FILES = ("adapter_config.json", "adapter_model.safetensors")
_DATASETS = {"gsm8k": "openai/gsm8k"}  # tasks whose data has a name on the hub


@dataclass(frozen=True)
class Export:
    """A verified checkpoint, the run it is of, and whether its adapter goes into the base model."""

    run: RunDir
    config: Config
    checkpoint: Checkpoint
    merge: bool

    @property
    def files(self) -> list[str]:
        """The names of the checkpoint's files that are copied as they are."""
        listed = json.loads((self.checkpoint.folder / "manifest.json").read_text())["files"]
        left = ("README.md", *(_ADAPTER_FILES if self.merge else ()))
        return [name for name in listed if name not in left and not name.startswith("training/")]

    @property
    def is_adapter(self) -> bool:
        """Whether what is written needs the base model beside it."""
        return self.config.model.lora_rank > 0 and not self.merge

    @property
    def adapter_base(self) -> str:
        """What the exported adapter names as its base: the hub id where the run took it from there, else the local folder."""
        recorded = str(json.loads((self.checkpoint.folder / _ADAPTER_FILES[0]).read_text())["base_model_name_or_path"])
        name = expand_path(self.config.model.name)
        return name if f"models--{name.replace('/', '--')}" in Path(recorded).parts else recorded  # the hub's cache

    @property
    def evaluation(self) -> dict[str, Any] | None:
        """The run's evaluation of this very checkpoint."""
        file = self.run.evaluations / f"{self.checkpoint.folder.name}.json"
        return json.loads(file.read_text()) if file.is_file() else None

    @property
    def kind(self) -> str:
        """What the weights are, in words."""
        rank = self.config.model.lora_rank
        if not rank:
            return "a full fine-tune"
        return f"a LoRA of rank {rank}, " + ("as an adapter" if self.is_adapter else "merged into its base model")


def export_checkpoint(path: Path, output: Path, merge: bool, say: Callable[[str], None]) -> Path:
    """Write the checkpoint `path` (or the newest of the run `path`) to `output`, whole or not at all; returns the folder.

    ConfigError when `output` exists with something in it or `path` is of no run, RunError for a damaged checkpoint and when the
    disk refuses the files.
    """
    output = output.resolve()
    if output.exists() and not (output.is_dir() and not any(output.iterdir())):
        raise ConfigError(f"{str(output)!r} exists and is not empty: nothing is overwritten; choose a new folder")
    export = _find(Path(os.path.abspath(path)), merge, say)
    merged = _merged(export) if merge and export.config.model.lora_rank else None
    with whole_folder(output) as folder:
        for name in export.files:
            (folder / name).parent.mkdir(parents=True, exist_ok=True)
            shutil.copyfile(export.checkpoint.folder / name, folder / name)
        if merged is not None:
            merged.save_pretrained(folder)
        if export.is_adapter:
            _name_base(export, folder / _ADAPTER_FILES[0])
        (folder / "README.md").write_text(model_card(export, output.name), encoding="utf-8")
    for line in _report(export, output):
        say(line)
    return output


@contextmanager
def whole_folder(output: Path) -> Iterator[Path]:
    """A folder beside `output` to fill; it becomes `output` (absent or empty) when the block ends well, else nothing stays."""
    partial = output.parent / f"{PARTIAL}{output.name}"
    shutil.rmtree(partial, ignore_errors=True)
    with disk_errors(output):
        try:
            partial.mkdir(parents=True)
            yield partial
            os.replace(partial, output)
        finally:
            shutil.rmtree(partial, ignore_errors=True)


def model_card(export: Export, name: str) -> str:
    """The README.md of the exported folder `name`: front matter for the hub, and the run's facts without a machine's paths."""
    config, progress, base = export.config, export.checkpoint.progress, base_name(export.config.model)
    datasets = [_DATASETS[config.data.task]] if config.data.task in _DATASETS else None
    front = ModelCardData(
        base_model=base,
        base_model_relation="adapter" if export.is_adapter else "finetune",
        datasets=datasets,
        library_name="transformers",
        pipeline_tag="text-generation",
        tags=["grpo_lab", "reinforcement-learning", config.method],
    )
    described = dict(line.split(maxsplit=1) for line in describe_config(config, resolve(config)))
    facts = [f"- {key}: {described[key]}" for key in ("method", "axes", "objective")]
    facts.append(
        f"- seen: {progress.rollouts:,} rollouts, {progress.step:,} steps, {progress.tokens:,} completion tokens"
    )
    facts.append(f"- weights: {export.kind}, {config.model.dtype}")
    remote = ", trust_remote_code=True" if config.model.trust_remote_code else ""
    needs = " with peft installed" if export.is_adapter else ""
    lines = [
        f"---\n{front.to_yaml()}\n---\n",
        f"# {name}\n",
        f"{base}, trained on {config.data.task} with grpo_lab {version('grpo-lab')}.\n",
        *facts,
        *_evaluation_lines(export.evaluation),
        "\n## Use\n",
        f'- transformers: `AutoModelForCausalLM.from_pretrained("{name}"{remote})`{needs}',
        f"- vLLM: `{serve_command(export, name, base)}`",
    ]  # fmt: skip
    return "\n".join(lines) + "\n"


def base_name(model: ModelConfig) -> str:
    """The base model's hub id, or the last component of its local folder, which may be gone."""
    name = model.place
    try:
        is_local = check_local_model(model) is not None
    except ConfigError:
        is_local = True
    return Path(os.path.abspath(name)).name if is_local else name


def serve_command(export: Export, folder: str, base: str) -> str:
    """How vLLM serves the exported `folder` in the run's dtype (its own choice for float32 files would be half precision)."""
    model = export.config.model
    words = ["vllm", "serve", base if export.is_adapter else folder]
    if export.is_adapter:
        options = engine_options(EngineSpec(Path(base), model, export.config.rollout), on_gpu=True)
        words += ["--enable-lora", "--max-lora-rank", str(options["max_lora_rank"])]
        words += ["--lora-modules", f"{Path(folder).name}={folder}"]
    if export.is_adapter or model.dtype == "float32":
        words += ["--dtype", model.dtype]
    return shlex.join([*words, *(["--trust-remote-code"] if model.trust_remote_code else [])])


def _find(path: Path, merge: bool, say: Callable[[str], None]) -> Export:
    """What `path` means, its checkpoint verified."""
    run = RunDir.open(path)
    checkpoint = newest_checkpoint(run.checkpoints, say) if run.path == path else load_checkpoint(path)
    if checkpoint is None:
        raise RunError(f"run {path} has no complete checkpoint to export; train until it has saved one")
    return Export(run, run.config, checkpoint, merge)


def _merged(export: Export) -> Any:
    """The base model with the adapter added to its weights, in the run's dtype."""
    model = export.config.model.model_copy(update={"gradient_checkpointing": False})
    policy = PolicyModel(resolve_model(model), export.checkpoint.folder, model, torch.device("cpu"))
    return policy.model.merge_and_unload()


def _name_base(export: Export, file: Path) -> None:
    """Have the adapter name its base by hub id instead of by this machine's cache of it."""
    adapter, model = json.loads(file.read_text()), export.config.model
    if adapter["base_model_name_or_path"] != export.adapter_base:
        adapter |= {"base_model_name_or_path": export.adapter_base, "revision": model.revision}
        file.write_text(json.dumps(adapter, indent=2))


def _evaluation_lines(row: dict[str, Any] | None) -> list[str]:
    if row is None:
        return ["\nThis checkpoint was not evaluated."]
    reward, kl, free_energy = (Estimate(**row[key]) for key in ("reward", "kl", "free_energy"))
    floor = f"[{row['floor']['lower']['mean']:+.3f}, {row['floor']['upper']['mean']:+.3f}]"
    return [
        f"\n## Evaluation\n\n{row['problems']} held-out problems x {row['samples']} samples at temperature 1, top-p 1; "
        "+- is one standard error, clustered by problem.\n",
        "| E[r] | KL to the base, nats a sequence | F = -E[r] + beta KL | floor F\\* | beta |",
        "|---|---|---|---|---|",
        f"| {reward} | {kl} | {free_energy} | {floor} | {row['beta']:g} |",
    ]


def _report(export: Export, output: Path) -> list[str]:
    """The closing lines on the terminal."""
    size = sum(file.stat().st_size for file in output.rglob("*") if file.is_file())
    lines = [f"checkpoint {export.checkpoint.folder}", f"exported   {output}, {export.kind}, {decimal(size)}"]
    base = export.adapter_base if export.is_adapter else ""
    if export.merge and not export.config.model.lora_rank:
        lines.append("note       nothing to merge: the checkpoint is a whole model")
    elif export.merge and export.config.model.dtype != "float32":
        lines.append(
            f"note       merging rounds to {export.config.model.dtype}; without --merge the adapter is written as trained"
        )
    elif Path(base).is_absolute():
        lines.append(f"note       the adapter's base is a local folder, {base}; --merge writes a model without it")
    return [*lines, f"next       {serve_command(export, str(output), base)}"]
