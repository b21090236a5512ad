"""One Slurm script for a whole training: rollout nodes serve, learner nodes train, and the job outlives its time limit."""

from __future__ import annotations

import re
import shlex
import shutil
import subprocess
import sys
from collections.abc import Sequence
from dataclasses import dataclass, field
from importlib import resources
from pathlib import Path
from typing import Any

import jinja2

from grpo_lab.config import expand_path
from grpo_lab.errors import ConfigError, RunError, counted
from grpo_lab.storage.scratch import whole_file
from grpo_lab.sweep import Member

_TEMPLATE = "slurm.sbatch.j2"
_PATIENCE_S = 3600  # for all workers to be up
_PORT = "$((20000 + SLURM_JOB_ID % 20000))"  # where the learner nodes meet: jobs that share a node do not share it


@dataclass(frozen=True)
class Layout:
    """Nodes and what runs on each: `processes` learners on a learner node, `workers` vLLM servers on a rollout node."""

    learners: int = 1
    samplers: int = 0
    gpus: int = 8
    processes: int = 1
    workers: int = 1

    @classmethod
    def of(
        cls, nodes: str, gpus: int, processes: int | None, workers: int | None, rollout_workers: int, worker_gpus: int
    ) -> Layout:
        """From `nodes`, L or L+R, and the GPUs of one; what is not given uses all of them. ConfigError for what cannot be."""
        learners, plus, samplers = nodes.partition("+")
        if not learners.isdecimal() or int(learners) < 1 or (plus and not samplers.isdecimal()):
            raise ConfigError(f"--nodes {nodes!r}: write L or L+R, learner and rollout nodes, for example 1+2")
        if processes is None and gpus > 1 and not (int(samplers or 0) or rollout_workers):
            raise ConfigError(
                f"--nodes {nodes} has nobody to sample beside the learner: add rollout nodes (--nodes {learners}+1), workers "
                "on its own GPUs (--set rollout.workers=4), or let one process do both (--processes 1 --gpus 1)"
            )
        own = rollout_workers * worker_gpus  # GPUs of a learner node that its own workers take
        if processes is None:
            processes = max(1, gpus - own)
        if workers is None:
            workers = max(1, gpus // worker_gpus)
        layout = cls(int(learners), int(samplers or 0), gpus, processes, workers)
        layout._refuse(own, worker_gpus)
        return layout

    def _refuse(self, own: int, worker_gpus: int) -> None:
        if self.gpus and self.processes + own > self.gpus:
            raise ConfigError(
                f"--processes {self.processes} and the {own} GPUs of rollout.workers need more than --gpus {self.gpus} of a "
                "learner node: lower one of them"
            )
        if self.gpus and self.samplers and self.workers * worker_gpus > self.gpus:
            raise ConfigError(
                f"--workers {self.workers} of rollout.worker_gpus={worker_gpus} need more than --gpus {self.gpus} of a "
                "rollout node: lower one of them"
            )

    def __str__(self) -> str:
        own = f"{counted(self.learners, 'learner node')} x {self.processes} processes"
        return f"{own}, {self.samplers} rollout nodes x {self.workers} workers" if self.samplers else own

    @property
    def ranks(self) -> int:
        return self.learners * self.processes

    @property
    def servers(self) -> int:
        return self.samplers * self.workers


@dataclass(frozen=True)
class Request:
    """What Slurm is asked for. `grace` is the seconds before the end in which the learner saves."""

    name: str
    time: str = "24:00:00"
    grace: int = 300
    options: Sequence[str] = field(default_factory=tuple)
    setup: str = ""

    def __post_init__(self) -> None:
        """ConfigError for a name, time or option that Slurm, or the script, would trip over."""
        if not re.fullmatch(r"[\w.+-]*\w[\w.+-]*", self.name):
            raise ConfigError(f"--name {self.name!r}: letters, digits and . + - _ are allowed")
        limit = _seconds(self.time)
        if limit is None:
            raise ConfigError(f"--time {self.time!r}: write minutes, HH:MM:SS or days-HH:MM:SS")
        if 2 * self.grace > limit:
            raise ConfigError(
                f"--grace {self.grace} (seconds) is more than half of --time {self.time}: nothing would be left to train in"
            )
        for option in self.options:
            if not option.startswith("-") or "\n" in option:
                raise ConfigError(
                    f"--sbatch {option!r}: write an option of sbatch, for example --sbatch=--account=mine"
                )


def _seconds(time: str) -> int | None:
    """Of a time as sbatch takes it: minutes, MM:SS, HH:MM:SS, D-HH, D-HH:MM or D-HH:MM:SS; None for anything else."""
    if not re.fullmatch(r"\d+(-\d+(:\d+){0,2}|(:\d+){0,2})", time):
        return None
    days, dash, rest = time.rpartition("-")
    parts = [int(part) for part in rest.split(":")]
    units = (3600, 60, 1) if dash or len(parts) == 3 else (60, 1)
    return int(days or 0) * 86400 + sum(part * unit for part, unit in zip(parts, units, strict=False))


def script(members: Sequence[Member], layout: Layout, request: Request) -> str:
    """The text of the job, an array where there are several runs. Their arguments are taken by `train` and `worker` alike."""
    first = members[0].config
    what = f"{len(members)} runs" if len(members) > 1 else f"{first.method}, beta {first.beta:g}"
    return _template().render(
        title=f"{request.name}: {what}; {layout}",
        name=request.name,
        learners=layout.learners,
        samplers=layout.samplers,
        gpus=layout.gpus,
        processes=layout.processes,
        workers=layout.workers,
        meeting=f' --nodes {layout.learners} --rendezvous "${{NODES[0]}}:{_PORT}"' if layout.learners > 1 else "",
        time=request.time,
        patience=_PATIENCE_S,
        grace=request.grace,
        options=request.options,
        setup=request.setup or f'export PATH={shlex.quote(str(Path(sys.executable).parent))}:"$PATH"',
        logs=shlex.quote(str(Path(expand_path(first.output_dir)) / "slurm")),
        members=[_words(member) for member in members],
    )


def _finished(member: Member) -> Path:
    """The file that is there when the run is over."""
    total = f"rollouts_{member.config.total_rollouts:08d}"
    if member.config.evaluation.enabled:
        return member.path / "evaluations" / f"{total}.json"
    return member.path / "checkpoints" / total / "manifest.json"


def _words(member: Member) -> dict[str, str]:
    return {
        "run": shlex.quote(str(member.path)),
        "finished": shlex.quote(str(_finished(member))),
        "arguments": shlex.join(member.arguments),
    }


def _template() -> jinja2.Template:
    text = resources.files("grpo_lab.cluster").joinpath(_TEMPLATE).read_text()
    spaces: dict[str, Any] = {"trim_blocks": True, "lstrip_blocks": True, "keep_trailing_newline": True}
    return jinja2.Environment(undefined=jinja2.StrictUndefined, **spaces).from_string(text)


def write(text: str, file: Path) -> None:
    """Write the script whole, executable."""
    with whole_file(file) as partial:
        partial.write_text(text)
        partial.chmod(0o755)


def submit(file: Path) -> str:
    """What sbatch answers. RunError when it refuses, ConfigError when it is not here."""
    if shutil.which("sbatch") is None:
        raise ConfigError(f"--submit: there is no sbatch on this machine; run `sbatch {file}` where there is one")
    answer = subprocess.run(["sbatch", str(file)], capture_output=True, text=True)
    if answer.returncode:
        raise RunError(f"sbatch refused {file}: {' '.join((answer.stderr or answer.stdout).split())[:300]}")
    return answer.stdout.strip()
