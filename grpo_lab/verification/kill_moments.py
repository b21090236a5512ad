"""When to kill a run: moments of many kinds, chosen from what the same run did undisturbed."""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import dataclass
from random import Random
from typing import Literal

from grpo_lab.verification.breaking import Moment, Operation


@dataclass(frozen=True)
class Kind:
    """A kind of moment, told by the operations whose names match `operation`.

    `at`: right before one; `after`: a millisecond after it; `inside`: as soon as a line like `inside` is on the stack of the
    work that leads to it; `between`: in the middle of that work, where a library writes a file without an operation of its own.
    """

    name: str
    when: Literal["at", "after", "inside", "between"]
    operation: str
    inside: str = ""


@dataclass(frozen=True)
class Planned:
    """A moment of a run's future, its kind's name, and the index of the operation of the run it follows or comes before."""

    index: int
    kind: str
    moment: Moment


_CHECKPOINT, _PARTIAL_CHECKPOINT = r"run/checkpoints/rollouts_\d+", r"run/checkpoints/\.partial-rollouts_\d+"
_NEXT_PUSH, _REMOVAL = r"os\.mkdir weights/version_0*[1-9]\d*$", r"os\.rename run/checkpoints/\.deleting-"
_GAP_S = 0.01

# The most telling first: of few kills, each is of another kind.
KINDS = (
    Kind("checkpoint between manifest and rename", "at", rf"os\.rename {_CHECKPOINT}$"),
    Kind("update", "inside", _NEXT_PUSH, r"learner/learner\.py:\d+ in update"),
    Kind("checkpoint, half-written", "between", rf" {_PARTIAL_CHECKPOINT}/"),
    Kind("line of metrics", "at", r"open run/metrics\.jsonl$"),
    Kind("sampling", "inside", _NEXT_PUSH, r"batch\.py:\d+ in collect_step"),
    Kind("checkpoint, its small files", "at", rf"(open|os\.mkdir) {_PARTIAL_CHECKPOINT}/"),
    Kind("log-probs", "inside", _NEXT_PUSH, r"learner/learner\.py:\d+ in prepare"),
    Kind("record of rollouts", "at", r"(open|os\.rename) run/rollouts/"),
    Kind("push of weights", "at", r" weights/version_0*[1-9]"),
    Kind("evaluation", "inside", r"^[1-9]\d* os\.mkdir run/evaluations$", r"evaluate\.py:\d+ in measure"),
    Kind("checkpoint just renamed", "after", rf"os\.rename {_CHECKPOINT}$"),
    Kind("file of an evaluation", "at", r"(open|os\.rename) run/evaluations/(\.partial-)?rollouts_"),
    Kind("reference bank, drawn", "inside", r"^0 os\.mkdir run/evaluations$", r"rollout/collect\.py:\d+ in collect"),
    Kind("reference bank, its file", "at", r"os\.rename run/evaluations/reference_bank"),
    Kind("loading", "inside", r"^-1 os\.mkdir run$", r"assemble\.py:\d+ in build_learner"),
    Kind("folder of the run", "at", r"^-1 (os\.mkdir|open|os\.rename) run(/checkpoints|/[^/]*config[^/]*)$"),
    Kind("figures", "at", r"(open|os\.mkdir|os\.rename) run/figures"),
    Kind("removal of old checkpoints", "at", _REMOVAL),
)


def choose_moments(operations: Sequence[Operation], kills: int, seed: int) -> list[Planned]:
    """`kills` moments of a run that did `operations`, in their order, of as many kinds as can be; fewer where it has no more.

    No two have the same index: then each lies ahead of a run that was killed at the one before and resumed.
    """
    random, pools = Random(seed), [candidates(operations, kind) for kind in KINDS]
    chosen: dict[int, Planned] = {}
    while len(chosen) < kills:
        before = len(chosen)
        for pool in sorted(pools[: kills - before], key=len):  # who has little choice chooses first
            free = [planned for planned in pool if planned.index not in chosen]
            if free:
                planned = random.choice(free)
                chosen[planned.index] = planned
        pools = [pool for pool in pools if any(planned.index not in chosen for planned in pool)]
        if not pools:
            break
    return [chosen[index] for index in sorted(chosen)]


def candidates(operations: Sequence[Operation], kind: Kind) -> list[Planned]:
    """Every moment of this kind in a run that did `operations`; of operations of one name the first counts."""
    names = [operation.name for operation in operations]
    first = [
        index for index, name in enumerate(names) if names.index(name) == index and re.search(kind.operation, name)
    ]
    planned = [_plan(operations, index, kind) for index in first]
    return [found for found in planned if found]


def _plan(operations: Sequence[Operation], index: int, kind: Kind) -> Planned | None:
    """The moment told by the operation at `index`; None where the work that leads to it is too short to be met."""
    operation, previous = operations[index], operations[max(index - 1, 0)]
    gap = operation.at_s - previous.at_s
    if kind.when == "inside":  # watched for since the last push, which every resumed run begins with
        version = previous.name.partition(" ")[0]
        push = next(other.name for other in operations if other.name.startswith(f"{version} "))
        return Planned(index - 1, kind.name, Moment(push, inside=kind.inside)) if gap > _GAP_S else None
    if kind.when == "between":
        inside = gap > _GAP_S and re.search(_PARTIAL_CHECKPOINT, previous.name)
        return Planned(index - 1, kind.name, Moment(previous.name, gap / 2)) if inside else None
    if kind.operation == _REMOVAL:  # belongs to its checkpoint's rename: a run resumed from it does not rename again
        index = max(at for at in range(index) if re.search(rf"os\.rename {_CHECKPOINT}$", operations[at].name))
    return Planned(index, kind.name, Moment(operation.name, 0.001 if kind.when == "after" else 0.0))
