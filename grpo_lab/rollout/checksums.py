"""sha256 sums of weights: do the workers hold the same bytes, and the learner's where names can be compared?"""

import hashlib
from collections.abc import Mapping

_NOTHING = hashlib.sha256(b"").hexdigest()  # a matrix that was packed away


def differing(workers: Mapping[str, Mapping[str, str]], learner: Mapping[str, str]) -> list[str]:
    """What differs, a line each: tensors of two workers, or of a worker and the learner.

    `workers`: sums by worker and by vLLM's name (place:tensor). `learner`: by the tensor's own name; what vLLM fused, packed or
    sharded is left out.
    """
    lines = []
    first = next(iter(workers), "")
    for name, sums in workers.items():
        wrong = sorted(
            key for key in workers[first].keys() | sums.keys() if _differ(workers[first].get(key), sums.get(key))
        )
        if wrong:
            lines.append(f"{first} and {name} hold different weights after the same push ({_some(wrong)})")
        wrong = sorted(key for key in comparable(sums, learner) if comparable(sums, learner)[key] != learner[key])
        if wrong:
            lines.append(f"{name} does not hold the learner's bytes ({_some(wrong)})")
    return lines


def comparable(sums: Mapping[str, str], learner: Mapping[str, str]) -> dict[str, str]:
    """A worker's sums of the tensors that the learner has under the same name, whole and unpacked."""
    if len({key.rpartition(":")[0] for key in sums}) > 1:  # sharded over several GPUs
        return {}
    held = {key.rpartition(":")[2]: digest for key, digest in sums.items() if digest != _NOTHING}
    return {name: digest for name, digest in held.items() if name in learner}


def _differ(one: str | None, other: str | None) -> bool:
    return one != other and _NOTHING not in (one, other)


def _some(names: list[str]) -> str:
    return f"{len(names)} tensors, first {names[0]}"
