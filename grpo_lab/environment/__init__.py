"""What this machine has for a run, before anything of the run is loaded: facts, each with what is missing and its remedy.

Measuring and judging are apart: `judge_*` functions take numbers and say what they mean. Imports no torch; another process
does. Nothing is left on disk.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator

from grpo_lab.config import Config
from grpo_lab.environment import devices, limits, software
from grpo_lab.environment.facts import Fact, reason
from grpo_lab.environment.inputs import Inputs

__all__ = ["AUDIT_NEEDS", "Fact", "survey"]

AUDIT_NEEDS = frozenset({"torch", "transformers", "accelerate", "vllm", "model", "data"})  # names of facts


def survey(config: Config) -> Iterator[Fact]:
    """One fact after the other, as they are found, in less than 10 s. A check that breaks is a warning with the reason."""
    look, inputs = devices.TorchLook(), Inputs(config)
    try:
        for name, check in _checks(config, look, inputs):
            try:
                yield from check()
            except Exception as error:
                yield Fact(name, "warn", f"could not be checked ({reason(error)})")
    finally:
        look.stop()


def _checks(config: Config, look: devices.TorchLook, inputs: Inputs) -> list[tuple[str, Callable[[], Iterable[Fact]]]]:
    """Every check by name, in the order of the report: what others are judged by comes first."""
    return [
        ("hub", inputs.ask),
        ("python", software.python_fact),
        ("packages", lambda: software.package_facts(config)),
        ("launcher", software.launcher_fact),
        ("cores", lambda: limits.cores_fact(config)),
        ("folders", lambda: limits.folder_facts(config)),
        ("torch", lambda: devices.torch_fact(look)),
        ("gpu", lambda: devices.gpu_facts(config, look)),
        ("vllm", lambda: software.vllm_fact(config, look.on_gpu)),
        ("limits", lambda: limits.user_limits(config, len(look.gpus))),
        ("model", inputs.model_fact),
        ("data", inputs.data_fact),
        ("gpu memory", lambda: devices.gpu_memory_fact(config, look, inputs.learner_bytes)),
        ("memory", lambda: limits.memory_fact(config, inputs.size, look.on_gpu)),
        ("disk", lambda: limits.disk_fact(config, inputs.size)),
        ("pushes", lambda: limits.push_fact(config, inputs.size)),
    ]
