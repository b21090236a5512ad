"""Configs from YAML files, `--set key.path=value` and flags, and back to YAML; every refusal is one line. Imports no torch."""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from pathlib import Path
from typing import Any

import yaml
from pydantic import BaseModel, ValidationError

from grpo_lab.config import Config, check_batch_algebra
from grpo_lab.errors import ConfigError, unknown_name

# Keys that do not change what is computed: a resumed run may change them (total_rollouts under a constant schedule only).
FREE_ON_RESUME = {
    "output_dir",
    "run_name",
    "tracking",
    "keep_last",
    "keep_every",
    "total_rollouts",
    "rollout.weights_dir",
    "rollout.mismatch_limit",
    "rollout.workers",
    "rollout.urls",
    "rollout.worker_gpus",
    "rollout.worker_gpu_memory",
    "rollout.worker_timeout_s",
    "rollout.worker_restarts",
    "learner.shard",
    "evaluation.enabled",
    "evaluation.bank_dir",
}


def load_config(path: Path | None, overrides: Sequence[str] = (), flags: Mapping[str, Any] | None = None) -> Config:
    """The configuration of a YAML file (or the defaults), then `--set key.path=value`, then non-null command-line flags.

    Raises ConfigError, in one line, for a missing file, bad YAML, an unknown key or a wrong value.
    """
    tree = _read_yaml(path) if path is not None else {}
    for override in overrides:
        _apply_override(tree, override)
    given = {key: value for key, value in (flags or {}).items() if value is not None}
    tree |= given
    typed = {override.partition("=")[0].strip() for override in overrides} | given.keys()
    return build_config(tree, source=str(path) if path else "command line", typed=typed)


def build_config(tree: Mapping[str, Any], source: str, typed: Collection[str] = ()) -> Config:
    """A validated Config of a plain tree; ConfigError says which key of which source is wrong.

    Keys in `typed` come from the command line, the others from `source`.
    """
    try:
        config = Config.model_validate(tree)
    except ValidationError as error:
        location = ".".join(str(part) for part in error.errors(include_url=False)[0]["loc"])
        own = any(location == key or location.startswith(f"{key}.") for key in typed)
        raise ConfigError(f"{'command line' if own else source}: {first_problem(error)}") from None
    check_batch_algebra(config)
    return config


def dump_yaml(config: BaseModel) -> str:
    """The configuration as YAML, every key resolved."""
    return yaml.safe_dump(config.model_dump(mode="json"), sort_keys=False, allow_unicode=True)


def changed_keys(old: Config, new: Config) -> list[str]:
    """Keys that differ and would change the trajectory, as `key: old -> new`."""
    before, after = _flatten(old.model_dump(mode="json")), _flatten(new.model_dump(mode="json"))
    differing = [k for k in before.keys() | after.keys() if before.get(k) != after.get(k)]
    free = FREE_ON_RESUME if new.learner.schedule == "constant" else FREE_ON_RESUME - {"total_rollouts"}
    relevant = [k for k in sorted(differing) if not any(k == name or k.startswith(name + ".") for name in free)]
    return [f"{k}: {before.get(k)!r} -> {after.get(k)!r}" for k in relevant]


def _flatten(tree: Mapping[str, Any], prefix: str = "") -> dict[str, Any]:
    flat: dict[str, Any] = {}
    for key, value in tree.items():
        if isinstance(value, Mapping) and value:
            flat |= _flatten(value, f"{prefix}{key}.")
        else:
            flat[prefix + key] = value
    return flat


class _UniqueKeyLoader(yaml.SafeLoader):
    """YAML's safe loader, but a key that stands twice in one mapping is an error, not the last one's victory."""

    def construct_mapping(self, node: yaml.MappingNode, deep: bool = False) -> dict[Any, Any]:
        keys = [key.value for key, _ in node.value]
        twice = next((key for key, _ in node.value if keys.count(key.value) > 1), None)
        if twice is not None:
            raise yaml.constructor.ConstructorError(
                None, None, f"the key {twice.value!r} stands twice", twice.start_mark
            )
        return super().construct_mapping(node, deep)


def _read_yaml(path: Path) -> dict[str, Any]:
    try:
        tree = yaml.load(path.read_text(encoding="utf-8"), Loader=_UniqueKeyLoader)
    except OSError as error:
        raise ConfigError(f"cannot read config {str(path)!r}: {error.strerror}; give the path of a YAML file") from None
    except (yaml.YAMLError, ValueError) as error:
        raise ConfigError(f"config {str(path)!r} is not valid YAML: {' '.join(str(error).split())}") from None
    if tree is None:
        return {}
    if not isinstance(tree, dict):
        raise ConfigError(f"config {str(path)!r} must be a mapping of keys to values, got a {type(tree).__name__}")
    return tree


def _apply_override(tree: dict[str, Any], override: str) -> None:
    key, equals, text = override.partition("=")
    if not equals or not key.strip():
        raise ConfigError(f"--set {override!r}: expected key.path=value, for example --set learner.learning_rate=1e-5")
    try:
        value = yaml.safe_load(text)
    except (yaml.YAMLError, ValueError):
        raise ConfigError(f"--set {override!r}: the value is not valid YAML; quote it") from None
    *parents, leaf = key.strip().split(".")
    for parent in parents:
        child = tree.setdefault(parent, {})
        if not isinstance(child, dict):
            raise ConfigError(f"--set {override!r}: {parent!r} is a single value, it has no key below it")
        tree = child
    tree[leaf] = value


def first_problem(error: ValidationError, root: type[BaseModel] = Config, prefix: str = "") -> str:
    """What is wrong, in one line, with the first bad key of model `root`, whose keys stand under `prefix` ("a.b.")."""
    problem = error.errors(include_url=False)[0]
    location = prefix + ".".join(str(part) for part in problem["loc"])
    if problem["type"] == "extra_forbidden":
        return str(unknown_name("key", location, _keys_beside(problem["loc"], root, prefix)))
    given = problem["input"]
    more = f" (and {error.error_count() - 1} more)" if error.error_count() > 1 else ""
    return f"{location}={given!r}: {problem['msg'][0].lower()}{problem['msg'][1:]}{more}"


def _keys_beside(location: tuple[int | str, ...], root: type[BaseModel], prefix: str) -> list[str]:
    section: Any = root
    for part in location[:-1]:
        section = section.model_fields[str(part)].annotation
    prefix += "".join(f"{part}." for part in location[:-1])
    return [prefix + name for name in section.model_fields]
