"""The command that hands a checkpoint to other programs: export."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from grpo_lab.cli.options import quiet_libraries


def export(
    checkpoint: Annotated[
        Path, typer.Argument(help="A checkpoint folder, or a run folder for its newest complete checkpoint.")
    ],
    output: Annotated[Path, typer.Argument(help="The folder to write; it must not exist, or be empty.")],
    merge: Annotated[
        bool, typer.Option("--merge", help="Write a LoRA as a whole model instead of an adapter.")
    ] = False,
) -> None:
    """Write a checkpoint as a model folder. For transformers, vLLM and lm-eval, with a model card."""
    quiet_libraries()
    from grpo_lab.console import Console
    from grpo_lab.export import export_checkpoint

    export_checkpoint(checkpoint, output, merge, Console().say)
