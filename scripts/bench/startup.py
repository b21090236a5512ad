"""Seconds a user waits: for --help, for a dry run, and for a run's first sampled tokens; whole processes, interleaved.

The run samples one completion token of two siblings of one prompt, without evaluation, and is ended when its console says
that sampling is over; the times of the lines on the way there are reported too. Files are in the page cache after the
uncounted first round.
"""

from __future__ import annotations

import statistics
import subprocess
import sys
import tempfile
import time
from argparse import Namespace
from functools import partial
from pathlib import Path

import _common as common
import _models as models

COMMANDS = ("--help", "train --dry-run", "train")
MARKS = {
    "configuration checked": "loading ",
    "model and engine up": "run ",
    "first sampled token": "step 1: log-probs",
}
"""What a run has reached when its console prints a line with this text at its start (spaces in front left out)."""


def main(arguments: list[str] | None = None) -> None:
    parser = common.parser(__doc__.partition("\n")[0])
    parser.add_argument("--config", type=Path, default=common.REPOSITORY / "configs/quickstart_cpu.yaml")
    parser.add_argument("--set", action="append", default=[], metavar="KEY=VALUE", help="as of grpo-lab train")
    parser.add_argument("--cold", action="store_true", help="count the first round too")
    parser.add_argument("--only", nargs="+", default=list(COMMANDS), choices=COMMANDS)
    options = parser.parse_args(arguments)
    with tempfile.TemporaryDirectory() as folder:
        if options.tiny:
            model = models.random_model(Path(folder) / "model", 49152, tokenizer=models.DEMO_MODEL)
            options.set += [f"model.name={model}", "rollout.engine=hf"]
            options.rounds, options.cold, options.only = 1, True, ["--help", "train"]
        measure(options, Path(folder))


def measure(options: Namespace, scratch: Path) -> None:
    """Start every command in turn, round by round."""
    train = ["train", "--config", str(options.config.resolve())]
    for change in options.set:
        train += ["--set", change]
    commands = {
        "--help": partial(whole, ["--help"]),
        "train --dry-run": partial(whole, [*train, "--dry-run"]),
        "train": partial(until_first_token, train, scratch),
    }
    samples = common.interleave(
        {name: commands[name] for name in options.only}, options.rounds, warm=0 if options.cold else 1
    )
    rows = [
        [f"grpo-lab {command}", what, round(min(times), 2), round(statistics.median(times), 2)]
        for command, measured in samples.items()
        for what, times in measured.items()
    ]
    common.report(["command", "until", "s min", "s median"], rows, options, samples)


def grpo_lab(arguments: list[str]) -> list[str]:
    """The installed command where there is one, as users start it."""
    script = Path(sys.executable).with_name("grpo-lab")
    return [str(script), *arguments] if script.exists() else [sys.executable, "-m", "grpo_lab", *arguments]


def whole(arguments: list[str]) -> dict[str, float]:
    """A command from start to end."""
    command = grpo_lab(arguments)
    run = lambda: subprocess.run(command, cwd=common.REPOSITORY, capture_output=True, check=True)  # noqa: E731
    return {"its end": common.seconds(run)}


def until_first_token(train: list[str], scratch: Path) -> dict[str, float]:
    """A training run up to the line that follows sampling; then its process is killed, and its folders go."""
    changes = {
        "method": "dapo", "group_size": 2, "prompts_per_step": 1, "total_rollouts": 2, "checkpoint_every": 2,
        "rollout.max_new_tokens": 1, "learner.mini_batches": 1, "evaluation.enabled": "false",
    }  # fmt: skip
    with tempfile.TemporaryDirectory(dir=scratch) as folder:
        changes |= {"output_dir": folder, "run_name": "run", "rollout.weights_dir": folder}
        sets = [word for key, value in changes.items() for word in ("--set", f"{key}={value}")]
        start, reached, said = time.perf_counter(), dict[str, float](), []
        with subprocess.Popen(
            grpo_lab([*train, *sets]),
            cwd=common.REPOSITORY,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
        ) as process:
            assert process.stdout
            try:
                for line in process.stdout:
                    said.append(line)
                    at = time.perf_counter() - start
                    reached |= {
                        what: at
                        for what, text in MARKS.items()
                        if line.strip().startswith(text) and what not in reached
                    }
                    if len(reached) == len(MARKS):
                        break
            finally:
                process.kill()
    if len(reached) < len(MARKS):
        sys.exit(f"the run ended before its first token; it said:\n{''.join(said[-20:])}")
    return reached


if __name__ == "__main__":
    main()
