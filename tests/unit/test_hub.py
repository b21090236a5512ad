"""A model's folder without weights or tokenizer is named as what it is."""

import shutil
from pathlib import Path

import pytest

from grpo_lab.config import ModelConfig
from grpo_lab.errors import ConfigError
from grpo_lab.hub import load_tokenizer, resolve_model


def test_a_folder_without_weights_or_tokenizer_is_one_line(tiny_model: Path, tmp_path: Path) -> None:
    assert resolve_model(ModelConfig(name=str(tiny_model))) == tiny_model.resolve()
    assert load_tokenizer(tiny_model).eos_token_id is not None
    shutil.copy(tiny_model / "config.json", tmp_path)
    with pytest.raises(ConfigError, match=r"no weights \(\*\.safetensors\)"):
        resolve_model(ModelConfig(name=str(tmp_path)))
    with pytest.raises(ConfigError, match=r"no tokenizer in .*tokenizer\.json"):
        load_tokenizer(tmp_path)
