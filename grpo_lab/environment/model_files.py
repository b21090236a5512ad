"""A model folder's weights by the headers of its files: how many parameters, whether all is there, what a run makes of them."""

from __future__ import annotations

import json
import math
from dataclasses import dataclass
from pathlib import Path


@dataclass(frozen=True)
class Size:
    """Parameters: of the model, the trained ones (LoRA: the adapter's), and of a tied head, which pushes carry twice."""

    parameters: int
    trained: int
    head: int = 0

    def push(self, dtype: str) -> int:
        """Bytes of one push of weights."""
        return (self.trained + self.head) * _width(dtype)

    def checkpoint(self, dtype: str) -> int:
        """Bytes of one checkpoint: weights, two moments in fp32, below fp32 the masters too."""
        return self.trained * (_width(dtype) + 8 + _masters(dtype))

    def learner(self, dtype: str) -> int:
        """Bytes that the learner holds: policy and reference, then gradients, moments and masters of what is trained."""
        copies = 2 if self.trained == self.parameters else 1
        return copies * self.parameters * _width(dtype) + self.trained * (4 + 8 + _masters(dtype))

    def weights(self, dtype: str) -> int:
        """Bytes of the model once, as a sampler holds it."""
        return self.parameters * _width(dtype)


def _width(dtype: str) -> int:
    return 4 if dtype == "float32" else 2


def _masters(dtype: str) -> int:
    return 0 if dtype == "float32" else 4


def measure(folder: Path, lora_rank: int) -> Size | None:
    """The size of the model in `folder` from the headers of its safetensors; None when there are none or one is damaged."""
    files = sorted(folder.glob("*.safetensors"))
    if not files or lost_files(folder):
        return None
    shapes = {name: shape for file in files for name, shape in _shapes(file).items()}
    tied = json.loads((folder / "config.json").read_text()).get("tie_word_embeddings", False)
    head, embeddings = 0, [name for name in shapes if "embed_tokens" in name or "wte" in name]
    if tied and embeddings:
        shapes.pop("lm_head.weight", None)
        head = math.prod(shapes[embeddings[0]])
    parameters = sum(map(math.prod, shapes.values()))
    if not lora_rank:
        return Size(parameters, parameters, head)
    linear = [
        shape for name, shape in shapes.items() if len(shape) == 2 and name not in (*embeddings, "lm_head.weight")
    ]
    return Size(parameters, sum(lora_rank * (rows + columns) for rows, columns in linear))


def lost_files(folder: Path) -> list[str]:
    """Weight files that the index names and the folder lacks, and those whose header does not fit their length."""
    index = folder / "model.safetensors.index.json"
    named = set(json.loads(index.read_text())["weight_map"].values()) if index.is_file() else set()
    present = {file.name for file in folder.glob("*.safetensors")}
    return sorted((named - present) | {name for name in present if not _is_readable(folder / name)})


def _is_readable(file: Path) -> bool:
    try:
        _shapes(file)
    except Exception:  # safetensors has an error class of its own
        return False
    return True


def _shapes(file: Path) -> dict[str, list[int]]:
    from safetensors import safe_open

    with safe_open(file, framework="np") as tensors:
        return {name: tensors.get_slice(name).get_shape() for name in tensors.keys()}  # noqa: SIM118
