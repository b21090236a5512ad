"""What each role of a run executes: the learner's command, every worker's command line with its share of the machine."""

from __future__ import annotations

import os
import shlex
import sys
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import torch

from grpo_lab.config import Config
from grpo_lab.planning.model_shape import local_folder
from grpo_lab.rollout.engines import EngineSpec
from grpo_lab.rollout.engines.vllm_server import server_options
from grpo_lab.rollout.server import machine_shares, server_command, server_environment
from grpo_lab.rollout.vllm_options import command_line, in_process_options


@dataclass(frozen=True)
class Launch:
    """How the run is started: the words after `grpo-lab`, and the learner's processes on each of `nodes` machines.

    `gpu_memory` is what each of their GPUs has, in GiB, where it is not this machine that the run is planned for.
    """

    arguments: tuple[str, ...]
    processes: int = 1
    nodes: int = 1
    gpu_memory: int | None = None

    @property
    def learners(self) -> int:
        """The learner's processes on all machines."""
        return self.processes * self.nodes

    @property
    def on_gpus(self) -> bool:
        """Whether the planned machine has GPUs."""
        return self.gpu_memory is not None or torch.cuda.is_available()


def role_lines(config: Config, launch: Launch) -> list[str]:
    """The commands, one line each; nothing is started. Of the environment only what a role changes is shown.

    ConfigError when the workers need more GPUs than are visible.
    """
    words = _without_planning(launch.arguments)
    lines = [f"command    {shlex.join(['grpo-lab', *words])}"]
    if launch.learners > 1:
        rank = shlex.join([sys.executable, "-m", "grpo_lab", *words])
        where = f" on each of {launch.nodes} machines" if launch.nodes > 1 else ""
        count = f"{launch.processes} processes{where}, LOCAL_RANK=0..{launch.processes - 1}"
        lines.append(f"learner    {count}: {_learner_share(launch)} {rank}")
    spec = EngineSpec(local_folder(config.model) or Path(config.model.place), config.model, config.rollout)
    if config.rollout.has_workers:
        return lines + _worker_lines(spec, launch)
    if config.rollout.engine_name == "vllm":
        options = in_process_options(spec, launch.on_gpus)
        lines.append(f"engine     vLLM in the learner's process with {shlex.join(command_line(options))}")
    return lines


def _without_planning(words: Sequence[str]) -> list[str]:
    """The words that train, without those that ask for a plan only."""
    plain = [word for word in words if word not in ("--dry-run", "--probe") and not word.startswith("--gpu-memory=")]
    if "--gpu-memory" in plain:
        place = plain.index("--gpu-memory")
        del plain[place : place + 2]
    return plain


def _learner_share(launch: Launch) -> str:
    threads = max(1, len(os.sched_getaffinity(0)) // launch.processes)
    return f"WORLD_SIZE={launch.learners} OMP_NUM_THREADS={os.environ.get('OMP_NUM_THREADS', threads)}"


def _worker_lines(spec: EngineSpec, launch: Launch) -> list[str]:
    settings, planned = spec.rollout, launch.gpu_memory is not None
    count = settings.started_workers
    command = shlex.join(server_command(command_line(server_options(spec, launch.on_gpus)), ["--uds", "SOCKET"]))
    lines = []
    shares = [] if planned or not count else machine_shares(count, settings.worker_gpus, launch.processes)
    if planned and count:
        lines.append(f"workers    {count}, each on {settings.worker_gpus} GPU(s) of its own: {command}")
    own = [[f"{k}={v}" for k, v in sorted(share.items())] for share in shares]
    common = [word for word in own[0] if all(word in words for words in own)] if own else []
    if own:
        changed = server_environment(spec.model.lora_rank > 0, {})
        common += [f"{k}={v}" for k, v in sorted(changed.items()) if os.environ.get(k) != v]
        lines.append(f"workers    {count}, each under a SOCKET of its own: {shlex.join(common)} {command}")
    for index, words in enumerate(own):
        rest = shlex.join(word for word in words if word not in common)
        lines += [f"worker {index:<4}{rest}"] if rest else []
    if own and not torch.cuda.is_available():
        lines.append("           as on this machine, which has no GPU; with GPUs each worker gets CUDA_VISIBLE_DEVICES")
    return lines + [
        f"attached   {url}: not started here; `grpo-lab worker` with this config there" for url in settings.urls
    ]
