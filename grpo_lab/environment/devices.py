"""torch's build and the GPUs against each other, the driver and what the run asks of them."""

from __future__ import annotations

import json
import shutil
import subprocess
import sys
import time
from collections.abc import Iterator
from dataclasses import dataclass
from importlib import metadata
from pathlib import Path
from typing import Literal

from grpo_lab.config import Config
from grpo_lab.environment import torch_report
from grpo_lab.environment.facts import Fact, size

_NO_GPU_USE = "prevents any use of the GPU"
_SMALL = "training runs on the CPU, which suits small models only (the demo's has 0.135 billion parameters)"
_OLDEST, _BFLOAT16 = (7, 0), (8, 0)  # compute capabilities: the oldest vLLM runs on, and the first it runs bf16 on

Hardware = Literal["none", "card", "driver"]


@dataclass(frozen=True)
class Gpu:
    """A visible GPU; memory in bytes."""

    name: str
    free: int
    total: int
    capability: tuple[int, int]


@dataclass(frozen=True)
class Torch:
    """torch as imported. `cuda` and `hip` are the build's; `driver` is the driver's CUDA, 12040 = 12.4; `error`: no import."""

    version: str
    cuda: str | None = None
    hip: str | None = None
    usable: bool = False
    reason: str = ""
    driver: int = 0
    gpus: tuple[Gpu, ...] = ()
    error: str = ""


class TorchLook:
    """torch imported in another process, from now on; `result` waits for it, `limit_s` from now at most."""

    def __init__(self, limit_s: float = 8.0) -> None:
        self._deadline = time.monotonic() + limit_s
        self._found: Torch | Exception | None = None
        command = [sys.executable, "-P", torch_report.__file__]
        try:
            self._process = subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)
        except OSError as error:
            self._found = error

    def result(self) -> Torch:
        """What torch sees. TimeoutError when it has not said so in time, OSError when there can be no process."""
        if self._found is None:
            try:
                output, errors = self._process.communicate(timeout=max(0.0, self._deadline - time.monotonic()))
                self._found = _read(output) if self._process.returncode == 0 else _broken(errors)
            except subprocess.TimeoutExpired:
                self.stop()
                self._found = TimeoutError("importing it takes long here; a second try may find its files in memory")
        if isinstance(self._found, Exception):
            raise self._found
        return self._found

    @property
    def gpus(self) -> tuple[Gpu, ...]:
        """The GPUs that torch can use; none when it could not say."""
        try:
            return self.result().gpus
        except (TimeoutError, OSError):
            return ()

    @property
    def on_gpu(self) -> bool:
        """Whether this is a machine to use GPUs on, whatever this torch makes of it."""
        return bool(self.gpus) or hardware() == "driver"

    def stop(self) -> None:
        """End the process if it still runs."""
        if self._found is None and self._process.poll() is None:
            self._process.kill()
            self._process.communicate()


def _read(output: str) -> Torch:
    found = json.loads(output.splitlines()[-1])
    gpus = [Gpu(g["name"], g["free"], g["total"], tuple(g["capability"])) for g in found.pop("gpus")]
    return Torch(**found, gpus=tuple(gpus))


def _broken(errors: str) -> Torch:
    try:
        version = metadata.version("torch")
    except metadata.PackageNotFoundError:
        version = ""
    lines = errors.strip().splitlines()
    return Torch(version, error=lines[-1][:200] if lines else "its import ended without a word")


def hardware() -> Hardware:
    """Whether NVIDIA's driver shows a GPU here, a card is in the machine without one, or there is neither."""
    if any(Path("/dev").glob("nvidia[0-9]*")) or (Path("/dev/dxg").exists() and shutil.which("nvidia-smi")):
        return "driver"
    return "card" if any(map(_is_nvidia_display, Path("/sys/bus/pci/devices").glob("*"))) else "none"


def _is_nvidia_display(device: Path) -> bool:
    try:
        vendor, kind = (device / "vendor").read_text().strip(), (device / "class").read_text()
    except OSError:
        return False
    return vendor == "0x10de" and kind.startswith("0x03")


def torch_fact(look: TorchLook) -> Iterator[Fact]:
    """torch's build against the machine."""
    yield judge_torch(look.result(), hardware())


def judge_torch(torch: Torch, found: Hardware) -> Fact:
    """FAIL when torch does not import, or cannot use the NVIDIA GPU that is here."""
    if torch.error:
        what = f"{torch.version} cannot be imported ({torch.error})" if torch.version else "not installed"
        setup = "make -B setup CUDA=1" if found == "driver" else "make -B setup"
        return Fact("torch", "FAIL", f"{what}: prevents everything; `{setup}`")
    if torch.hip:
        text = f"{torch.version}, built for ROCm {torch.hip}, on which this project is not tried"
        return Fact("torch", "pass" if torch.usable else "warn", text)
    if torch.cuda is not None:
        return _judge_cuda(torch, torch.cuda, f"{torch.version}, built for CUDA {torch.cuda}", found)
    if found != "driver":
        return Fact("torch", "pass", f"{torch.version}, a CPU build")
    text = f"{torch.version}, a CPU build on a machine with an NVIDIA GPU"
    return Fact("torch", "FAIL", f"{text}: {_NO_GPU_USE}; `rm -r .venv`, then `make setup CUDA=1`")


def _judge_cuda(torch: Torch, cuda: str, build: str, found: Hardware) -> Fact:
    """A build for `cuda` against the driver: the same major version or a newer one runs it."""
    driver = f"{torch.driver // 1000}.{torch.driver % 1000 // 10}"
    if not torch.driver and found == "driver":
        fix = "in a container `docker run --gpus all`, else install NVIDIA's driver"
        return Fact("torch", "FAIL", f"{build}, but the driver's libcuda.so.1 is not found: {_NO_GPU_USE}; {fix}")
    if not torch.driver:
        fix = "`rm -r .venv`, then `make setup`, gives the smaller CPU build"
        return Fact("torch", "warn", f"{build}, but no NVIDIA driver is here, so the CPU is used; {fix}")
    if torch.driver // 1000 < int(cuda.split(".")[0]):
        fix = f"update NVIDIA's driver, or install a torch built for CUDA {driver}"
        return Fact("torch", "FAIL", f"{build}, but the driver goes to CUDA {driver}: {_NO_GPU_USE}; {fix}")
    if not torch.usable:
        why = torch.reason or "no device is visible; is CUDA_VISIBLE_DEVICES empty?"
        return Fact("torch", "FAIL", f"{build}, but CUDA does not start ({why}): {_NO_GPU_USE}; try `nvidia-smi`")
    return Fact("torch", "pass", f"{build}; the driver goes to CUDA {driver}")


def gpu_facts(config: Config, look: TorchLook) -> Iterator[Fact]:
    """One line for each visible GPU, or one that says what it means that there is none."""
    gpus = look.gpus
    if not gpus:
        yield judge_no_gpu(hardware())
        return
    rollout = config.rollout
    needed = 1 + rollout.workers * rollout.worker_gpus
    for index, gpu in enumerate(gpus):
        takes, key = 0.0, ""
        if index == 0 and rollout.engine_name == "vllm":
            takes, key = rollout.gpu_memory_utilization, "rollout.gpu_memory_utilization"
        elif 0 < index < needed:
            takes, key = rollout.worker_gpu_memory, "rollout.worker_gpu_memory"
        yield judge_gpu(f"gpu {index}", gpu, config.model.dtype, takes, key)
    if rollout.workers and len(gpus) < needed:
        text = f"{len(gpus)} visible, but {needed} are needed: one learns, {needed - 1} sample"
        yield Fact("gpus", "FAIL", f"{text}; lower rollout.workers, or --set rollout.workers=0 to share one")


def judge_no_gpu(found: Hardware) -> Fact:
    """What it means that torch sees no GPU; a warning where a card is in the machine."""
    if found == "none":
        return Fact("gpu", "pass", f"none: {_SMALL}")
    if found == "card":
        fix = "install NVIDIA's driver, in a container `docker run --gpus all`"
        return Fact("gpu", "warn", f"an NVIDIA card is here, but no driver: {_SMALL}; {fix}")
    return Fact("gpu", "warn", f"an NVIDIA GPU is here, but torch cannot use it: {_SMALL}; see torch above")


def judge_gpu(name: str, gpu: Gpu, dtype: str, takes: float, key: str) -> Fact:
    """A GPU against the dtype, and its free memory against the share of it that vLLM `takes` by the config's `key`."""
    major, minor = gpu.capability
    text = f"{gpu.name}, {size(gpu.free)} of {size(gpu.total)} free, compute capability {major}.{minor}"
    if takes and gpu.capability < _OLDEST:
        return Fact(name, "FAIL", f"{text}: vLLM needs 7.0; --set rollout.engine=hf works without it, slowly")
    if takes and dtype == "bfloat16" and gpu.capability < _BFLOAT16:
        return Fact(name, "FAIL", f"{text}: vLLM refuses bfloat16 below 8.0; --set model.dtype=float16")
    if gpu.free < takes * gpu.total:
        wanted = f"vLLM takes {size(takes * gpu.total)} ({key}={takes:g}) and will not start"
        return Fact(name, "FAIL", f"{text}: {wanted}; end what else runs there (`nvidia-smi`), or lower {key}")
    if gpu.free < 0.5 * gpu.total:
        return Fact(name, "warn", f"{text}: other programs hold more than half; `nvidia-smi` shows them")
    return Fact(name, "pass", text)


def gpu_memory_fact(config: Config, look: TorchLook, learner: int | None) -> Iterator[Fact]:
    """The learner's bytes against the first GPU; nothing where there is no GPU or the model's size is unknown."""
    if look.gpus and learner:
        share = config.rollout.gpu_memory_utilization if config.rollout.engine_name == "vllm" else 0.0
        yield judge_gpu_memory(look.gpus[0].total, learner, share, config.learner.shard)


def judge_gpu_memory(total: int, learner: int, share: float, sharded: bool) -> Fact:
    """The learner's bytes, before activations, against a GPU of `total` bytes, of which an engine beside it takes `share`."""
    engine = share * total
    text = f"weights, gradients and moments take {size(learner)} of {size(total)}, before activations"
    if engine:
        text += f"; vLLM beside them {size(engine)}"
    if learner + engine <= total:
        return Fact("gpu memory", "pass", text)
    if sharded:
        return Fact("gpu memory", "warn", f"{text}: enough --processes must share them (learner.shard)")
    fix = "lower rollout.gpu_memory_utilization, " if learner < total and engine else ""
    fix += "--set model.lora_rank=16, or --processes with learner.shard=true"
    return Fact("gpu memory", "FAIL", f"{text}: prevents this training; {fix}")
