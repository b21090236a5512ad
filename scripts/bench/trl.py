"""Rollouts a second of whole training steps: grpo_lab against TRL's GRPOTrainer, run after run in turn.

Both train the same model on the same prompts in the same order, with the same group size, length limit, sampling, beta,
learning rate, AdamW, clip and number of updates. A step is sampling, scoring, log-probs of the reference (and, in grpo_lab,
of the policy) and the update; grpo_lab's push of the weights counts. Its seconds are the sum of time/* in metrics.jsonl
(`step`), and the time between two of its lines (`wall`), which also holds what is written; TRL's are its callbacks'. The
first steps of a run are left out (--skip). grpo_lab samples with the config's engine; TRL with transformers, since its vLLM
mode has no way to load weights into a CPU engine. In bf16 grpo_lab keeps fp32 master weights, TRL trains the bf16 weights.

TRL is not a dependency: --trl-python is an interpreter that has it. With the torch and transformers of this environment:
    .venv/bin/python -m venv /tmp/trl && /tmp/trl/bin/pip install --no-deps trl==1.16.0
    .venv/bin/python -c 'import site; print(site.getsitepackages()[0])' > $(echo /tmp/trl/lib/*/site-packages)/base.pth
or with its own: python3 -m venv /tmp/trl && /tmp/trl/bin/pip install trl==1.16.0
"""

from __future__ import annotations

import json
import os
import statistics
import subprocess
import sys
import tempfile
import time
from argparse import Namespace
from itertools import pairwise
from pathlib import Path
from typing import Any

import _common as common
import _models as models

from grpo_lab.config import Config
from grpo_lab.config.file import dump_yaml, load_config
from grpo_lab.tasks import load_task, problems_for_step

PARTS = ("time/generate", "time/annotate", "time/update", "time/sync")


def main(arguments: list[str] | None = None) -> None:
    parser = common.parser(__doc__.partition("\n")[0])
    parser.add_argument("--config", type=Path, default=common.REPOSITORY / "configs/quickstart_cpu.yaml")
    parser.add_argument("--set", action="append", default=[], metavar="KEY=VALUE", help="as of grpo-lab train")
    parser.add_argument("--dtype", default="bfloat16", choices=["float32", "bfloat16"], help="of both")
    parser.add_argument("--steps", type=int, default=4, help="steps of one run")
    parser.add_argument("--skip", type=int, default=1, help="first steps of a run that do not count, at least 1")
    parser.add_argument("--trl-python", type=Path, help="an interpreter that has trl; without it only grpo_lab runs")
    parser.add_argument("--trl-rows", type=int, help="TRL's per_device_train_batch_size; default: one group")
    parser.add_argument("--trl-beta", type=float, help="TRL's beta; default: the same; 0 spares it the reference")
    parser.add_argument("--trl-continuous-batching", action="store_true", help="TRL samples with generate_batch")
    options = parser.parse_args(arguments)
    with tempfile.TemporaryDirectory() as folder:
        if options.tiny:
            model = models.random_model(Path(folder) / "model", 49152, tokenizer=models.DEMO_MODEL)
            options.steps, options.rounds, options.dtype = 2, 1, "float32"
            options.set += [f"model.name={model}", "rollout.engine=hf", "rollout.max_new_tokens=4"]
            options.set += ["group_size=2", "prompts_per_step=2", "learner.mini_batches=1"]
        measure(options, Path(folder))


def measure(options: Namespace, scratch: Path) -> None:
    """The runs in turn; then rollouts a second, each round's medians and their ratio."""
    config = configuration(options)
    runs = {"grpo_lab": lambda number: run_grpo_lab(config, scratch / f"ours{number}")}
    if options.trl_python:
        runs["TRL"] = lambda number: run_trl(config, options, scratch / f"trl{number}")
    else:
        print(
            "TRL is left out: python3 -m venv /tmp/trl && /tmp/trl/bin/pip install trl==1.16.0 makes an interpreter that has "
            "it, for --trl-python /tmp/trl/bin/python"
        )
    samples: dict[str, list[list[dict[str, float]]]] = {name: [] for name in runs}
    for number in range(options.rounds):
        for name, run in runs.items():
            samples[name].append(run(number)[max(options.skip, 1) :])
    kinds = [("grpo_lab", "step"), ("grpo_lab", "wall"), *([("TRL", "step")] if options.trl_python else [])]
    speed = {kind: [rollouts_per_second(config, run, kind[1]) for run in samples[kind[0]]] for kind in kinds}
    rows = []
    for (name, what), values in speed.items():
        steps = [step for run in samples[name] for step in run]
        length = statistics.mean(step["length"] for step in steps)
        against = f"{common.ratio(values, speed['TRL', 'step']):.2f}x" if options.trl_python else ""
        middle = statistics.median(step[what] for step in steps)
        generate = statistics.median(step["generate"] for step in steps) if name == "grpo_lab" else ""
        rows.append([name, what, middle, generate, statistics.median(values), max(values), against, length])
    print(
        f"{config.rollouts_per_step} rollouts a step of at most {config.rollout.max_new_tokens} tokens, {options.dtype}"
    )
    header = ["trainer", "clock", "s/step", "sampling", "rollouts/s", "best run", "vs TRL", "tokens/rollout"]
    common.report(header, rows, options, {"config": config.model_dump(mode="json"), "samples": samples})


def rollouts_per_second(config: Config, run: list[dict[str, float]], clock: str) -> float:
    return config.rollouts_per_step / statistics.median(step[clock] for step in run)


def configuration(options: Namespace) -> Config:
    """The config with `steps` steps, no evaluation, and one checkpoint at the end, which no clock sees."""
    asked = load_config(options.config, [f"model.dtype={options.dtype}", "method=dapo", *options.set])
    rollouts = asked.rollouts_per_step * options.steps
    sizes = [f"total_rollouts={rollouts}", f"checkpoint_every={rollouts}", "evaluation.enabled=false"]
    return load_config(options.config, [f"model.dtype={options.dtype}", "method=dapo", *options.set, *sizes])


def run_grpo_lab(config: Config, folder: Path) -> list[dict[str, float]]:
    """One training in a process of its own; the lines of its metrics.jsonl are watched as they come."""
    folder.mkdir()
    (folder / "config.yaml").write_text(
        dump_yaml(config.model_copy(update={"output_dir": str(folder), "run_name": "run"}))
    )
    command = [sys.executable, "-m", "grpo_lab", "train", "--config", str(folder / "config.yaml")]
    file, arrivals = folder / "run/metrics.jsonl", list[float]()
    with (folder / "log").open("w") as log:
        process = subprocess.Popen(command, cwd=common.REPOSITORY, stdout=log, stderr=log)
        while process.poll() is None:
            lines = file.read_text().count("\n") if file.exists() else 0
            arrivals += [time.perf_counter()] * (lines - len(arrivals))
            time.sleep(0.05)
    if process.returncode:
        sys.exit(f"grpo_lab ended with {process.returncode}:\n{(folder / 'log').read_text()[-2000:]}")
    metrics = [json.loads(line) for line in file.read_text().splitlines()]
    arrivals += [arrivals[-1]] * (len(metrics) - len(arrivals))
    walls = [float("nan"), *(after - before for before, after in pairwise(arrivals))]
    return [
        {"step": sum(m[part] for part in PARTS), "wall": wall, "length": m["completion/length_mean"],
         "reward": m["reward/mean"], **{part.removeprefix("time/"): m[part] for part in PARTS}}
        for m, wall in zip(metrics, walls, strict=True)
    ]  # fmt: skip


def run_trl(config: Config, options: Namespace, folder: Path) -> list[dict[str, Any]]:
    """One GRPOTrainer run in the other environment."""
    folder.mkdir()
    job = folder / "job.json"
    job.write_text(json.dumps(trl_job(config, options) | {"output_dir": str(folder)}))
    command = [
        str(options.trl_python),
        "-P",  # the scripts beside the driver are not modules: one is called trl.py
        str(Path(__file__).with_name("_trl_driver.py")),
        str(job),
        str(folder / "result"),
    ]
    result = subprocess.run(
        command, cwd=folder, capture_output=True, text=True, env={**os.environ, "HF_HUB_OFFLINE": "1"}
    )
    if result.returncode:
        sys.exit(f"TRL ended with {result.returncode}:\n{result.stderr[-2000:]}")
    updates = json.loads((folder / "result").read_text())["steps"]
    per_step = config.learner.passes * config.learner.mini_batches
    steps = [updates[first : first + per_step] for first in range(0, len(updates), per_step)]
    return [
        {"step": sum(part["seconds"] for part in step), "length": step[0]["length"], "reward": step[0]["reward"]}
        for step in steps
    ]


def trl_job(config: Config, options: Namespace) -> dict[str, Any]:
    """The same training for TRL: the prompts of every step in order, and the numbers both have."""
    from grpo_lab.hub import resolve_model

    task, count = load_task(config.data), config.prompts_per_step
    problems = [p for step in range(options.steps) for p in problems_for_step(task.train, config.seed, step, count)]
    return {
        "model": str(resolve_model(config.model)), "dtype": config.model.dtype, "seed": config.seed,
        "problems": [{"prompt": list(problem.messages), "answer": problem.answer} for problem in problems],
        "prompts_per_step": count, "group_size": config.group_size, "steps": options.steps,
        "passes": config.learner.passes, "mini_batches": config.learner.mini_batches,
        "rows": options.trl_rows or config.group_size,
        "max_new_tokens": config.rollout.max_new_tokens, "temperature": config.rollout.temperature,
        "top_p": config.rollout.top_p, "beta": config.beta if options.trl_beta is None else options.trl_beta,
        "continuous_batching": options.trl_continuous_batching, "learning_rate": config.learner.learning_rate,
        "weight_decay": config.learner.weight_decay, "max_grad_norm": config.learner.max_grad_norm,
    }  # fmt: skip


if __name__ == "__main__":
    main()
