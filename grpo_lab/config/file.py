"""Configs from YAML files, `--set key.path=value` and flags, and back to YAML; every refusal is one line. Imports no torch."""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import yaml
from pydantic import BaseModel, ValidationError

from grpo_lab.config import Config, check_batch_algebra
from grpo_lab.config.names import known_part, unknown_key
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
    tree = read_yaml(path) if path is not None else {}
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


PLACE = ("run_name", "output_dir")  # keys in which every two runs differ: where a run lies


@dataclass(frozen=True)
class Change:
    """A key with two values, as words; `is_trajectory`: a resumed run with the second would not compute the same."""

    key: str
    before: str
    after: str
    is_trajectory: bool

    def __str__(self) -> str:
        return f"{self.key}: {self.before} -> {self.after}"


def changes(old: Config, new: Config) -> list[Change]:
    """What differs, by key."""
    before, after = _flatten(old.model_dump(mode="json")), _flatten(new.model_dump(mode="json"))
    differing = sorted(key for key in before.keys() | after.keys() if before.get(key) != after.get(key))
    said = lambda tree, key: in_yaml(tree[key]) if key in tree else "not set"  # noqa: E731
    return [Change(k, said(before, k), said(after, k), not is_free(k, new.learner.schedule)) for k in differing]


def changed_keys(old: Config, new: Config) -> list[str]:
    """Keys that differ and would change the trajectory, as `key: old -> new`."""
    return [str(change) for change in changes(old, new) if change.is_trajectory]


def is_free(key: str, schedule: str = "constant") -> bool:
    """Whether a resumed run may change `key`; under another schedule than constant the learning rate knows the end."""
    parts = key.split(".")
    above = {".".join(parts[:length]) for length in range(1, len(parts) + 1)}
    return bool(above & FREE_ON_RESUME) and (key != "total_rollouts" or schedule == "constant")


def _flatten(tree: Mapping[str, Any], prefix: str = "") -> dict[str, Any]:
    flat: dict[str, Any] = {}
    for key, value in tree.items():
        if isinstance(value, Mapping):
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


def read_yaml(path: Path) -> dict[str, Any]:
    """The mapping in a YAML file. ConfigError, in one line with the place, for anything else."""
    try:
        tree = yaml.load(path.read_text(encoding="utf-8"), Loader=_UniqueKeyLoader)
    except OSError as error:
        raise ConfigError(f"cannot read config {str(path)!r}: {error.strerror}; give the path of a YAML file") from None
    except UnicodeDecodeError:
        raise ConfigError(f"config {str(path)!r} is not text in UTF-8; give the path of a YAML file") from None
    except (yaml.YAMLError, ValueError, RecursionError) as error:
        raise ConfigError(f"config {str(path)!r} is not valid YAML: {_yaml_problem(error)}") from None
    if tree is None:
        raise ConfigError(
            f"config {str(path)!r} is empty: write at least one key (`grpo-lab config explain` lists them), or leave it out "
            "for the defaults"
        )
    if not isinstance(tree, dict):
        raise ConfigError(
            f"config {str(path)!r} must be a mapping of keys to values, got a {type(tree).__name__}; write for example "
            "`beta: 0.05`"
        )
    return tree


def _yaml_problem(error: Exception) -> str:
    if isinstance(error, RecursionError):
        return "it is nested too deeply"
    if not isinstance(error, yaml.MarkedYAMLError) or error.problem is None or error.problem_mark is None:
        return " ".join(str(error).split())[:200]
    hint = (
        "; indent with spaces"
        if "'\\t'" in error.problem
        else "; plain values only"
        if " tag " in error.problem
        else ""
    )
    return f"line {error.problem_mark.line + 1}, column {error.problem_mark.column + 1}: {error.problem}{hint}"


def _apply_override(tree: dict[str, Any], override: str) -> None:
    key, equals, text = override.partition("=")
    if not equals or not key.strip():
        raise ConfigError(f"--set {override!r}: expected key.path=value, for example --set learner.learning_rate=1e-5")
    try:
        value = yaml.load(text, Loader=_UniqueKeyLoader)
    except (yaml.YAMLError, ValueError, RecursionError):
        raise ConfigError(f"--set {override!r}: the value is not valid YAML; quote it") from None
    *parents, leaf = key.strip().split(".")
    for parent in parents:
        child = tree.setdefault(parent, {})
        if not isinstance(child, dict):
            raise ConfigError(
                f"--set {override!r}: {parent!r} is {in_yaml(child)[:80]} in the file, which has no key below it"
            )
        tree = child
    tree[leaf] = value


def first_problem(error: ValidationError, root: type[BaseModel] = Config, prefix: str = "") -> str:
    """What is wrong, in one line, with the first bad key of model `root`, whose keys stand under `prefix` ("a.b.")."""
    problem = error.errors(include_url=False)[0]
    location = prefix + ".".join(str(part) for part in problem["loc"])
    if problem["type"] == "extra_forbidden":
        beside = _keys_beside(problem["loc"], root, prefix)
        return str(unknown_name("key", location, beside) if prefix else unknown_key(location, beside))
    more = f" (and {error.error_count() - 1} more)" if error.error_count() > 1 else ""
    where = f"; see grpo-lab config explain {known_part(location)}" if root is Config and known_part(location) else ""
    given = in_yaml(problem["input"])[:80]
    return f"{location.removesuffix('.[key]')}={given}: {_wording(problem, root)}{more}{where}"


_NEEDED = {
    "int": "a whole number is needed, in digits",
    "float": "a number is needed",
    "bool": "true or false is needed",
    "list": "a list is needed: [first, second]",
    "dict": "names with values are needed: {name: value}",
    "string": "text is needed; put it in quotes",
    "invalid": "names are text; put it in quotes",
}  # by the first word of pydantic's kind of error, for the kinds whose words speak of Python


def _wording(problem: Any, root: type[BaseModel]) -> str:
    """What is wrong and what is allowed."""
    kind, _, rest = problem["type"].partition("_")
    if kind == "model":
        section, _, key = _keys_beside((*problem["loc"], ""), root, "")[0].rpartition(".")
        return f"this is a section, it needs keys of its own, such as {section}.{key}; leave it out for the defaults"
    if isinstance(problem["input"], dict) and kind in ("int", "float", "bool", "list", "string", "literal"):
        return "this is a single value, it has no keys below it"
    if kind in _NEEDED and rest in ("type", "parsing", "from_float", "key"):
        return _NEEDED[kind]
    text = problem["msg"].removeprefix("Value error, ")
    return f"{text[0].lower()}{text[1:]}"


def in_yaml(value: Any) -> str:
    """A value as a user writes it: null, true and false as in YAML, text in quotes."""
    named = {None: "null", True: "true", False: "false"}
    return named[value] if value is None or isinstance(value, bool) else repr(value)


def _keys_beside(location: tuple[int | str, ...], root: type[BaseModel], prefix: str) -> list[str]:
    section: Any = root
    for part in location[:-1]:
        section = section.model_fields[str(part)].annotation
    prefix += "".join(f"{part}." for part in location[:-1])
    return [prefix + name for name in section.model_fields]
