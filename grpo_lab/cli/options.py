"""Options that several commands have, and what they do before a library is imported."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Annotated

import typer

from grpo_lab.cli import completion

ConfigFile = Annotated[
    Path | None, typer.Option("--config", "-c", help="YAML file; without it the GSM8K experiment's defaults.")
]
Overrides = Annotated[
    list[str] | None,
    typer.Option(
        "--set", help="Override one key: --set learner.learning_rate=1e-5", autocompletion=completion.assignments
    ),
]


def quiet_libraries(to_log: bool = False) -> None:
    """Third parties' progress bars stay off the terminal; their advice too, unless all they print goes `to_log`."""
    os.environ.setdefault("TOKENIZERS_PARALLELISM", "false")
    os.environ.setdefault("HF_HUB_DISABLE_PROGRESS_BARS", "1")
    os.environ.setdefault("TRANSFORMERS_VERBOSITY", "warning" if to_log else "error")
    os.environ.setdefault("VLLM_LOGGING_LEVEL", "INFO" if to_log else "ERROR")
