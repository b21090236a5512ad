"""Model names -> local folders, and the tokenizer. The one place that talks to the model hub."""

import hashlib
import json
from collections.abc import Container
from pathlib import Path
from typing import Any

from grpo_lab.config import ModelConfig, cache_folder
from grpo_lab.errors import ConfigError

_FILES = ["*.json", "*.safetensors", "*.model", "*.txt", "*.jinja"]
TOKENIZERS = ("tokenizer.json", "tokenizer.model", "vocab.json", "tokenizer_config.json")  # one of them is there
_PICKLES = ("*.bin", "*.pt", "*.pth", "*.ckpt", "*.pkl")


def resolve_model(model: ModelConfig) -> Path:
    """The folder of a model: a local one as given, else the hub's snapshot (downloaded once, offline from the cache).

    Raises ConfigError in one line when the folder holds no model or the hub cannot serve it.
    """
    local = check_local_model(model)
    if local:
        if not list(local.glob("*.safetensors")):
            raise ConfigError(
                f"model.name={model.name!r}: the folder has no weights (*.safetensors); give a whole model folder"
            )
        return local
    name = model.place
    from huggingface_hub import snapshot_download

    files = [*_FILES, "*.py"] if model.trust_remote_code else _FILES
    try:
        folder = Path(snapshot_download(name, revision=model.revision, allow_patterns=files))
    except Exception as error:
        reason = str(error).strip().split("\n")[0][:200]
        raise ConfigError(
            f"model.name={model.name!r}: the hub did not serve it ({type(error).__name__}: {reason}); check the name and "
            "the network, or give a local folder"
        ) from None
    _refuse_code(folder, model)
    return folder


def weights_signature(folder: Path) -> dict[str, str]:
    """A quick fingerprint of a model folder's weight files: size, first and last megabyte of each."""
    signature = {}
    for file in sorted(folder.glob("*.safetensors")):
        with file.open("rb") as opened:
            size = opened.seek(0, 2)
            digest = hashlib.sha256(str(size).encode())
            for start in (0, max(0, size - 2**20)):
                opened.seek(start)
                digest.update(opened.read(2**20))
        signature[file.name] = digest.hexdigest()
    return signature


def check_local_model(model: ModelConfig) -> Path | None:
    """The folder of a local model, None for a hub id. ConfigError for a path without a model, or one that would run code."""
    name = model.place
    if Path(name).is_dir():
        if not (Path(name) / "config.json").is_file():
            raise ConfigError(
                f"model.name={model.name!r}: the folder has no config.json; give a transformers model folder"
            )
        _refuse_code(Path(name), model)
        return Path(name).resolve()
    if name.startswith(("/", ".", "~")) or name.count("/") != 1:
        hint = (
            "run `make demo-model`" if name.startswith(str(cache_folder())) else "give a folder or a hub id owner/name"
        )
        raise ConfigError(f"model.name={model.name!r}: no such folder; {hint}")
    return None


def _refuse_code(folder: Path, model: ModelConfig) -> None:
    """ConfigError for weights that are pickles alone, and for a model that needs its own code, unless that is trusted."""
    pickles = sorted(file.name for pattern in _PICKLES for file in folder.glob(pattern))
    if pickles and not list(folder.glob("*.safetensors")):
        raise ConfigError(
            f"model.name={model.name!r}: its weights are a pickle, {pickles[0]}, which can run code when it is opened; only "
            "safetensors are loaded: convert them, or take a revision that has them"
        )
    try:
        config = json.loads((folder / "config.json").read_text(encoding="utf-8"))
        needs_code = "auto_map" in config and config.get("model_type") not in _known_kinds()
    except (OSError, ValueError, TypeError):
        return  # whoever loads it says what is wrong
    if needs_code and not model.trust_remote_code:
        raise ConfigError(
            f"model.name={model.name!r}: this model needs Python code that comes with it, which is not run: read it, then set "
            "model.trust_remote_code=true, or choose a model that transformers knows"
        )


def _known_kinds() -> Container[str]:
    from transformers.models.auto.configuration_auto import CONFIG_MAPPING_NAMES

    kinds: Container[str] = CONFIG_MAPPING_NAMES
    return kinds


def load_tokenizer(folder: Path, trust_remote_code: bool = False) -> Any:
    """The tokenizer of a model folder. ConfigError when it cannot be loaded."""
    from transformers import AutoTokenizer

    if not any((folder / name).is_file() for name in TOKENIZERS):
        raise ConfigError(f"no tokenizer in {folder}: it has none of {', '.join(TOKENIZERS)}; copy them from the model")
    try:
        return AutoTokenizer.from_pretrained(folder, trust_remote_code=trust_remote_code)
    except (OSError, ValueError) as error:
        raise ConfigError(f"no tokenizer in {folder}: {' '.join(str(error).split())[:200]}") from None


def stop_token_ids(folder: Path, tokenizer: Any) -> tuple[int, ...]:
    """Every id that ends a completion: the tokenizer's eos and those of the model's generation_config, sorted."""
    from transformers import GenerationConfig

    ids: set[int] = set() if tokenizer.eos_token_id is None else {int(tokenizer.eos_token_id)}
    if (folder / "generation_config.json").is_file():
        eos = GenerationConfig.from_pretrained(folder).eos_token_id
        ids |= set(eos if isinstance(eos, list) else [] if eos is None else [eos])
    if not ids:
        raise ConfigError(
            f"the model in {folder} declares no end-of-sequence token: set eos_token_id in generation_config.json"
        )
    return tuple(sorted(ids))
