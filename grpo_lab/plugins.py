"""A file's name is its config name; a dotted path `package.module:Class` loads code from outside the package.

Modules are looked for where Python looks, and then in the folder the command was started in.
Each plugin folder fixes the class name its files define (`Gate`, `Task`, `EngineImpl`); files starting with `_` are private.
"""

import importlib
import os
import pkgutil
import sys
from importlib import util
from typing import Any

from grpo_lab.errors import ConfigError, in_words, unknown_name


def names(package: str) -> list[str]:
    """Names of the plugins in a package, sorted; nothing is imported, since gates import torch."""
    spec = util.find_spec(package)
    assert spec, package
    return sorted(m.name for m in pkgutil.iter_modules(spec.submodule_search_locations) if not m.name.startswith("_"))


def is_outside(name: str) -> bool:
    """Whether `name` is a dotted path to code outside the plugin folders."""
    return "." in name or ":" in name


def load(package: str, name: str, class_name: str) -> Any:
    """The class `class_name` of plugin `name` in `package`, or of the dotted path `module:Class` (`module` alone works too).

    Raises ConfigError when the name is unknown, the module cannot be found, or the class is missing.
    """
    kind = class_name.removesuffix("Impl").lower()
    if not is_outside(name):
        if name not in names(package):
            raise unknown_name(kind, name, names(package))
        return getattr(importlib.import_module(f"{package}.{name}"), class_name)
    module_name, _, attribute = name.partition(":")
    attribute = attribute or class_name
    if not sys.flags.safe_path and os.getcwd() not in sys.path:
        sys.path.append(os.getcwd())
    try:
        if util.find_spec(module_name) is None:
            raise ModuleNotFoundError(f"no module named {module_name!r}")
        module = importlib.import_module(module_name)
    except (ModuleNotFoundError, ValueError) as error:
        if "__path__" in str(error):  # "file.Class", or "file.py:Class"
            parent, _, rest = module_name.rpartition(".")
            meant = f"{parent}:{attribute if rest == 'py' else rest}"
            raise ConfigError(
                f"cannot import {kind} {name!r}: {parent} is a module, no package; write {meant}"
            ) from None
        colon = "" if ":" in name else f", and write {kind}s of other files as module:{class_name}"
        raise ConfigError(
            f"cannot import {kind} {name!r}: {error}; start in its folder or put that on PYTHONPATH{colon}"
        ) from None
    except Exception as error:
        raise ConfigError(f"cannot import {kind} {name!r}: {in_words(error)}; correct that file") from None
    if not hasattr(module, attribute):
        own = [key for key, value in vars(module).items() if getattr(value, "__module__", "") == module.__name__]
        has = f"; it defines {', '.join(own)}: write {module_name}:{own[0]}" if own else ""
        raise ConfigError(f"{kind} {name!r}: module {module_name} defines no {attribute!r}{has}")
    if not callable(found := getattr(module, attribute)):
        raise ConfigError(
            f"{kind} {name!r} is a {type(found).__name__}, which cannot be called; name a class or a function"
        )
    return found
