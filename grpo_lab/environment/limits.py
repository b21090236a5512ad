"""What the system lends: cores, memory, disk, shared memory, files, processes, folders to write to; against the run's need."""

from __future__ import annotations

import math
import os
import resource
import shutil
import tempfile
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

from grpo_lab.config import Config, cache_folder, expand_path
from grpo_lab.environment.cgroups import cpu_quota, memory_limit, process_limit
from grpo_lab.environment.facts import Fact, reason, size
from grpo_lab.environment.model_files import Size
from grpo_lab.storage.rotation import most_at_once

_CONTAINER_DEFAULT = 64 << 20  # bytes of /dev/shm in a container that was given none
_FILES_ALONE, _FILES_A_SERVER = 1024, 640  # 512 connections to each server, and room
_THREADS = 400  # of a process that runs torch or vLLM, roughly
_UNKNOWN = "the model's size is unknown"


@dataclass(frozen=True)
class Space:
    """A file system by a folder on it; bytes."""

    folder: Path
    free: int
    total: int


def space(folder: Path) -> Space:
    """The file system that `folder` is on, or will be."""
    existing = _existing(folder)
    usage = shutil.disk_usage(existing)
    return Space(existing, usage.free, usage.total)


def _existing(folder: Path) -> Path:
    return next(parent for parent in (folder.absolute(), *folder.absolute().parents) if parent.is_dir())


# -- cores and memory ------------------------------------------------------------------------------------------------


def cores_fact(config: Config) -> Iterator[Fact]:
    """The cores this process may use, and a container's quota of their time."""
    yield judge_cores(len(os.sched_getaffinity(0)), os.cpu_count() or 1, cpu_quota(), config.rollout.workers)


def judge_cores(usable: int, total: int, quota: float, workers: int) -> Fact:
    """`quota`: cores' worth of time a control group grants, inf without one. More threads than that wait for each other."""
    text = f"{usable} of {total} cores"
    if quota < usable:
        threads = max(1, math.floor(quota))
        text += f", but time for {quota:g} of them (a container's limit): threads beyond that slow everything"
        return Fact("cores", "warn", f"{text}; `export OMP_NUM_THREADS={threads}`, or give the container more")
    if workers > usable:
        return Fact("cores", "warn", f"{text} for {workers} workers: on a CPU they share cores; lower rollout.workers")
    return Fact("cores", "pass", text)


def memory_fact(config: Config, measured: Size | None, on_gpu: bool) -> Iterator[Fact]:
    """Main memory against what the run holds there."""
    import psutil  # type: ignore[import-untyped]  # accelerate brings it, so it may be missing

    memory, limit = psutil.virtual_memory(), memory_limit()
    total = min(memory.total, limit)
    yield judge_memory(int(total), int(min(memory.available, total)), memory_need(config, measured, on_gpu))


def memory_need(config: Config, measured: Size | None, on_gpu: bool) -> int | None:
    """Bytes of main memory, before activations: learner and engines on a CPU; with a GPU the copies made while loading."""
    if measured is None:
        return None
    dtype, rollout = config.model.dtype, config.rollout
    if on_gpu:
        return 2 * measured.weights("float32")
    engines = rollout.started_workers
    cache = rollout.cpu_kv_cache_gb << 30 if rollout.engine_name.startswith("vllm") else 0
    return measured.learner(dtype) + engines * (measured.weights(dtype) + cache)


def judge_memory(total: int, available: int, need: int | None) -> Fact:
    """FAIL when `need` cannot fit, a warning when it does not fit beside what runs now. Bytes."""
    text = f"{size(available)} of {size(total)} available"
    if need is None:
        return Fact("memory", "pass", f"{text}; {_UNKNOWN}")
    text += f", about {size(need)} needed before activations"
    fix = "choose a smaller model, model.dtype=bfloat16, model.lora_rank=16 or fewer workers"
    if need > total:
        return Fact("memory", "FAIL", f"{text}: prevents this training; {fix}")
    if need > available:
        return Fact("memory", "warn", f"{text}: the system may end the run; end other programs, or {fix}")
    return Fact("memory", "pass", text)


# -- disk and shared memory ------------------------------------------------------------------------------------------


def disk_fact(config: Config, measured: Size | None) -> Iterator[Fact]:
    """The disk of output_dir against the run's checkpoints."""
    each = measured.checkpoint(config.model.dtype) if measured else None
    yield judge_disk(space(Path(expand_path(config.output_dir))), each, most_at_once(config))


def judge_disk(here: Space, each: int | None, count: int) -> Fact:
    """Room for `count` checkpoints of `each` bytes, the most that are kept at once."""
    text = f"{size(here.free)} free at {here.folder}"
    if each is None:
        return Fact("disk", "pass" if here.free > 20e9 else "warn", f"{text}; {_UNKNOWN}, so the checkpoints' is too")
    text += f", {count} checkpoints of {size(each)} need {size(count * each)}"
    if count * each > here.free:
        room = here.free // each
        fix = "--set output_dir=FOLDER on a larger disk, keep_last=2, or a larger checkpoint_every"
        return Fact("disk", "FAIL", f"{text}: the run would stop at checkpoint {room + 1}; {fix}")
    return Fact("disk", "pass", text)


def push_fact(config: Config, measured: Size | None) -> Iterator[Fact]:
    """The room for weight pushes: rollout.weights_dir, else shared memory, else the temporary directory."""
    need = push_need(config, measured) if measured else None
    chosen, shared = config.rollout.weights_dir, Path("/dev/shm")
    if chosen:
        folder = Path(expand_path(chosen))
        if folder.is_dir():  # see folder_facts
            yield judge_weights_dir(space(folder), need)
    else:
        yield judge_shared_memory(space(shared) if shared.is_dir() else None, need, space(Path(tempfile.gettempdir())))


def push_need(config: Config, measured: Size) -> int:
    """Bytes of the pushes on disk at once: the newest and the one before it, of LoRA those still in use too."""
    kept = 3 + config.rollout.max_staleness if config.model.lora_rank else 2
    return kept * measured.push(config.model.dtype)


def judge_weights_dir(here: Space, need: int | None) -> Fact:
    """FAIL when the chosen folder cannot hold the pushes."""
    text = f"{size(here.free)} free at {here.folder} for pushes" + (f", {size(need)} needed" if need else "")
    if need and here.free < need:
        return Fact("pushes", "FAIL", f"{text}: prevents every push; set rollout.weights_dir to a larger folder")
    return Fact("pushes", "pass", text)


def judge_shared_memory(shared: Space | None, need: int | None, fallback: Space) -> Fact:
    """Pushes go through `shared` memory where `need` bytes fit, else through the `fallback` folder, slower."""
    if shared is None:
        return judge_weights_dir(fallback, need)
    text = f"{size(shared.free)} free in {shared.folder}" + (f", {size(need)} needed for pushes" if need else "")
    small = shared.total <= _CONTAINER_DEFAULT
    text += ", a container's default" if small else ""
    fix = f"`docker run --ipc host`, or --shm-size {max(1, math.ceil(2 * (need or 4e9) / 1e9))}g"
    fix = fix if small else "free some (files of ended programs in /dev/shm stay), or set rollout.weights_dir"
    if shared.free >= (need or 0) and not small:
        return Fact("pushes", "pass", text)
    if fallback.free >= (need or 0):
        return Fact("pushes", "warn", f"{text}: pushes may go through {fallback.folder}, slower; {fix}")
    text += f", and {size(fallback.free)} in {fallback.folder}: prevents every push"
    return Fact("pushes", "FAIL", f"{text}; {fix}")


# -- what a user may open, start and lock ----------------------------------------------------------------------------


def user_limits(config: Config, gpus: int) -> Iterator[Fact]:
    """Open files and processes; locked memory where there are GPUs."""
    rollout = config.rollout
    servers = rollout.started_workers + len(rollout.urls) if rollout.has_workers else 0
    soft, hard = map(_number, resource.getrlimit(resource.RLIMIT_NOFILE))
    yield judge_open_files(soft, hard, servers)
    processes = min(_number(resource.getrlimit(resource.RLIMIT_NPROC)[0]), process_limit())
    yield judge_processes(processes, 1 + rollout.workers)
    if gpus:
        yield judge_locked(_number(resource.getrlimit(resource.RLIMIT_MEMLOCK)[0]), gpus)


def _number(limit: int) -> float:
    return math.inf if limit == resource.RLIM_INFINITY else limit


def judge_open_files(soft: float, hard: float, servers: int) -> Fact:
    """A run with `servers` raises `soft` to `hard` itself; one without keeps `soft`."""
    need = _FILES_ALONE + servers * _FILES_A_SERVER
    reach = hard if servers else soft
    text = f"{_count(soft)} may be open, {_count(hard)} at most"
    if reach >= need:
        return Fact("open files", "pass", text)
    fix = f"`docker run --ulimit nofile={need}:{need}`, or nofile in /etc/security/limits.conf"
    fix = f"`ulimit -n {need}`" if hard >= need else fix
    return Fact(
        "open files", "warn", f"{text}, {need} are wanted: a batch's connections and files may be refused; {fix}"
    )


def judge_processes(limit: float, started: int) -> Fact:
    """Threads count as processes; `started` of them run torch or vLLM."""
    need = started * _THREADS
    if limit >= need:
        return Fact("processes", "pass", f"{_count(limit)} may run")
    text = f"{_count(limit)} may run, threads included, about {need} are wanted: prevents workers from starting"
    return Fact("processes", "warn", f"{text}; `ulimit -u {need}`, in a container `docker run --pids-limit {need}`")


def judge_locked(limit: float, gpus: int) -> Fact:
    """Bytes of memory that may be locked; only a network card between machines needs it without limit."""
    if limit == math.inf or gpus == 1:
        return Fact(
            "locked",
            "pass",
            "memory without limit" if limit == math.inf else f"{size(limit)} of memory, enough for one GPU",
        )
    text = f"{size(limit)} of memory: NCCL over InfiniBand is refused; within one machine it works"
    return Fact("locked", "warn", f"{text}; `docker run --ulimit memlock=-1`, or `ulimit -l unlimited`")


def _count(limit: float) -> str:
    return "any number" if limit == math.inf else f"{limit:.0f}"


# -- folders ---------------------------------------------------------------------------------------------------------


def folder_facts(config: Config) -> Iterator[Fact]:
    """Whether a file can be written to output_dir, to rollout.weights_dir and to the caches."""
    yield judge_write(
        "output_dir", Path(expand_path(config.output_dir)), "prevents every run; --set output_dir=FOLDER", True
    )
    if config.rollout.weights_dir:
        text = "prevents every push; create it, or --set rollout.weights_dir=null"
        yield judge_write("weights_dir", Path(expand_path(config.rollout.weights_dir)), text, True, create=False)
    yield judge_write(
        "cache", cache_folder(), "prevents `make demo-model`; set GRPO_LAB_CACHE to a folder of yours", False
    )
    from huggingface_hub.constants import HF_HUB_CACHE

    yield judge_write("hub cache", Path(HF_HUB_CACHE), "prevents downloads; set HF_HOME to a folder of yours", False)


def judge_write(name: str, folder: Path, otherwise: str, needed: bool, create: bool = True) -> Fact:
    """Tries an unnamed file in `folder`, or, where it may be made later (`create`), in the nearest folder above that exists."""
    if not create and not folder.is_dir():
        return Fact(name, "FAIL", f"{folder} does not exist: {otherwise}")
    try:
        with tempfile.TemporaryFile(dir=_existing(folder)):
            return Fact(name, "pass", f"{folder} can be written")
    except OSError as error:
        return Fact(
            name,
            "FAIL" if needed else "warn",
            f"{folder} cannot be written ({error.strerror or reason(error)}): {otherwise}",
        )
