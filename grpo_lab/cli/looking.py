"""The commands that look and change nothing: completions of a run, completions of a model, runs side by side."""

from __future__ import annotations

import json
import shutil
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from grpo_lab.cli.options import ConfigFile, Overrides, quiet_libraries
from grpo_lab.cli.sweeping import runs_below
from grpo_lab.config.file import load_config
from grpo_lab.errors import ConfigError

if TYPE_CHECKING:
    from grpo_lab.readable import Decode
    from grpo_lab.reading import Seen

Width = Annotated[int | None, typer.Option(min=40, help="Columns; default: the terminal's, 120 at most.")]
Full = Annotated[bool, typer.Option("--full", help="Show long texts whole.")]
Json = Annotated[bool, typer.Option("--json", help="Print one JSON object instead, with whole texts.")]


def rollouts(
    run: Annotated[Path, typer.Argument(help="A run's folder.")],
    step: Annotated[int | None, typer.Option(help="Default: the newest recorded step.")] = None,
    right: Annotated[bool, typer.Option("--right", help="Only correct ones; these five can be combined.")] = False,
    partial: Annotated[bool, typer.Option("--partial", help="Only those with a reward between 0 and 1.")] = False,
    wrong: Annotated[bool, typer.Option("--wrong", help="Only wrong ones.")] = False,
    unparsable: Annotated[bool, typer.Option("--unparsable", help="Only those without an answer.")] = False,
    truncated: Annotated[bool, typer.Option("--truncated", help="Only those that met the length limit.")] = False,
    problem: Annotated[str | None, typer.Option(help="Only those of this problem.")] = None,
    num: Annotated[int, typer.Option(min=1, help="How many completions at most.")] = 5,
    width: Width = None,
    full: Full = False,
    as_json: Json = False,
) -> None:
    """Show a run's completions, grades and advantages."""
    from grpo_lab import readable, reading
    from grpo_lab.run_dir import RunDir

    opened = RunDir.open(run)
    number, every = reading.read_seen(opened, step)
    flags = {"correct": right, "partial": partial, "wrong": wrong, "unparsable": unparsable, "truncated": truncated}
    asked = [outcome for outcome, chosen in flags.items() if chosen]
    chosen = reading.choose(every, asked, problem, num)
    decode = readable.decoder(opened.config, list(opened.checkpoint_folders().values()))
    if as_json:
        _print_json({"run": str(opened.path), "step": number}, every, chosen, decode)
        return
    typer.echo(f"run        {readable.visible(str(opened.path))}")
    typer.echo(f"step {number:<5} {readable.summary(every)}")
    of = f" of problem {problem}" if problem else ""
    typer.echo(f"shown      {len(chosen)} {' or '.join(asked)}{' ' if asked else ''}completions{of}")
    _print_seen(every, chosen, decode, width, full)


def rollout(
    config: ConfigFile = None,
    num: Annotated[int, typer.Option(min=1, help="Problems.")] = 4,
    samples: Annotated[int, typer.Option(min=1, help="Completions of each.")] = 2,
    heldout: Annotated[bool, typer.Option("--heldout", help="Held-out problems instead of training problems.")] = False,
    seed: Annotated[int | None, typer.Option(help="Run seed; another one gives other problems and samples.")] = None,
    set_: Overrides = None,
    output: Annotated[Path | None, typer.Option("--output", "-o", help="Also write them as a .parquet record.")] = None,
    width: Width = None,
    full: Full = False,
    as_json: Json = False,
) -> None:
    """Sample and score a few completions, without training. Is the task graded as it should be?"""
    loaded = load_config(config, set_ or [], {"seed": seed})
    if output is not None and (output.suffix != ".parquet" or output.exists()):
        reason = "exists" if output.exists() else "is no .parquet file"
        raise ConfigError(f"--output {output} {reason}: give a new file that ends in .parquet")
    quiet_libraries()
    from grpo_lab import readable, reading
    from grpo_lab.sampling import sample_few
    from grpo_lab.storage.records import write_groups

    sampled = sample_few(loaded, num, samples, heldout, (lambda line: None) if as_json else typer.echo)
    if output is not None:
        write_groups(output, sampled.groups)
    every = reading.of_groups(sampled.groups)
    decode: Decode = lambda ids: str(sampled.tokenizer.decode(list(ids)))  # noqa: E731
    if as_json:
        _print_json({"model": loaded.model.place, "seconds": sampled.seconds}, every, every, decode)
        return
    tokens = sum(one.tokens for one in every)
    typer.echo(f"sampled    {readable.summary(every)}")
    typer.echo(f"took       {sampled.seconds:.1f} s after loading, {tokens / max(sampled.seconds, 1e-9):.3g} tokens/s")
    if output is not None:
        typer.echo(f"record     {output}")
    _print_seen(every, every, decode, width, full)


def _print_json(about: dict[str, Any], every: Sequence[Seen], chosen: Sequence[Seen], decode: Decode) -> None:
    from grpo_lab.reading import to_json

    prompts = [decode(one.prompt_ids) for one in chosen]
    typer.echo(json.dumps({**about, **to_json(every, chosen, prompts)}, indent=1))


def _print_seen(every: Sequence[Seen], chosen: Sequence[Seen], decode: Decode, width: int | None, full: bool) -> None:
    from grpo_lab import readable

    layout = readable.Layout(width or max(40, min(120, shutil.get_terminal_size().columns)), full)
    for line in readable.lines(every, chosen, decode, layout):
        typer.echo(line)


def compare(
    runs: Annotated[list[Path], typer.Argument(help="Run folders, or folders of runs such as a sweep's.")],
    beta: Annotated[
        list[float] | None, typer.Option(help="Compare F at these; repeat for more. Default: the runs' own.")
    ] = None,
    output: Annotated[
        Path | None,
        typer.Option(
            "--output", "-o", help="Folder for the figures. Default: comparison/ in the one folder given, else here."
        ),
    ] = None,
    as_json: Annotated[
        bool, typer.Option("--json", help="Print one JSON object instead; figures with --output only.")
    ] = False,
) -> None:
    """Compare runs, paired by problem. At equal rollouts and at equal KL; those that differ in the seed alone are averaged."""
    if beta and min(beta) <= 0:
        raise ConfigError(f"--beta {min(beta):g}: a temperature is greater than 0")
    from grpo_lab.console import Console
    from grpo_lab.evaluation.arms import arms
    from grpo_lab.evaluation.contrast_figures import draw_comparison
    from grpo_lab.evaluation.contrast_table import compare as compare_arms
    from grpo_lab.evaluation.contrast_table import lines, to_json

    found, left_out = arms([run for path in runs for run in runs_below(path)])
    made = compare_arms(found, beta or [], left_out)
    folder = output or (None if as_json else (runs[0] if len(runs) == 1 else Path()) / "comparison")
    drawn = draw_comparison(made, folder) if folder else []
    if as_json:
        typer.echo(json.dumps(to_json(made), indent=1))
        return
    console = Console()
    for line in [*lines(made), "", *(f"figure     {path}" for path in drawn)]:
        console.say(line)
