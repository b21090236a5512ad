"""The command line: parse, load the config, call one function. Imports no torch; errors a user caused are one line."""

from __future__ import annotations

import re
import sys
from collections.abc import Sequence
from itertools import pairwise
from typing import Annotated, Any

import typer

from grpo_lab.cli import (
    cluster,
    configuring,
    evaluating,
    exporting,
    guide,
    laboratory,
    looking,
    sweeping,
    training,
    verifying,
    workers,
)
from grpo_lab.errors import UserError, shown
from grpo_lab.signals import leaving_on_signals

app = typer.Typer(
    no_args_is_help=True,
    rich_markup_mode=None,
    pretty_exceptions_enable=False,
    help="Train GRPO-family policies and measure how far they are from the Gibbs floor F* = -beta log Z.",
)


@app.callback(invoke_without_command=True)
def _version(
    version: Annotated[bool, typer.Option("--version", is_eager=True, help="Print the version and stop.")] = False,
) -> None:
    if version:
        from importlib.metadata import version as installed

        typer.echo(f"grpo-lab {installed('grpo-lab')}")
        raise typer.Exit


app.command()(training.train)
app.command("list")(guide.list_names)
app.command()(workers.worker)
app.command()(workers.doctor)
app.command()(verifying.verify_resume)
app.command()(sweeping.sweep)
app.command()(sweeping.report)
app.command()(looking.compare)
app.command()(looking.rollouts)
app.command()(looking.rollout)
app.command()(guide.metrics)
app.command()(cluster.slurm)
app.command()(exporting.export)
app.command()(laboratory.replay)
app.add_typer(evaluating.evaluate, name="eval")
app.add_typer(configuring.config, name="config")
app.add_typer(laboratory.lab, name="lab")
app.add_typer(laboratory.plot, name="plot")

_UsageError: Any = typer.BadParameter.__mro__[2]  # click's ClickException, in whichever package typer keeps it


def _in_our_words(text: str, words: Sequence[str], context: Any) -> str:
    """A complaint about an option's value with the value, which typer leaves out; about a stray word with what is meant.

    `context` is click's of the command that complains, None where it has none.
    """
    takes_config = context is not None and any("--config" in option.opts for option in context.command.params)
    if "unexpected extra argument" in text and takes_config:
        return f"{text}: a config file is given as --config FILE, a value as --set key=value"
    if not (found := re.match(r"Invalid value for '(--[\w-]+)'", text)):
        return text
    option, given = found[1], [word.partition("=")[2] for word in words if word.startswith(f"{found[1]}=")]
    given += [value for word, value in pairwise(words) if word == option]
    return text.replace(f"'{option}'", f"'{option}': {given[0]!r}", 1) if given else text


def main() -> None:
    """Entry point: a UserError becomes one line on standard error and its exit code."""
    try:
        with leaving_on_signals():
            code = app(standalone_mode=False, prog_name="grpo-lab")
        sys.exit(code if isinstance(code, int) else 0)
    except UserError as error:
        sys.stderr.write(f"grpo-lab: {' '.join(shown(str(error)).split())}\n")
        sys.exit(error.exit_code)
    except OSError as error:
        where = f" {str(error.filename)!r}" if error.filename else ""
        sys.stderr.write(
            f"grpo-lab: cannot read or write{where}: {error.strerror or error}; check the path and its rights\n"
        )
        sys.exit(1)
    except typer.Exit as stop:
        sys.exit(stop.exit_code)
    except _UsageError as error:
        context = getattr(error, "ctx", None)
        text = _in_our_words(error.format_message(), sys.argv, context)
        is_help = text.startswith("Usage:")  # a command without its arguments
        line = f"grpo-lab: {' '.join(shown(text).split()).rstrip('.')}; see"
        sys.stderr.write(
            f"{text}\n" if is_help else f"{line} {context.command_path if context else 'grpo-lab'} --help\n"
        )
        sys.exit(2)
    except (KeyboardInterrupt, typer.Abort):
        sys.stderr.write("grpo-lab: interrupted\n")
        sys.exit(130)
