"""Training problems by step: an endless stream of shuffled epochs, so that resuming needs the step alone."""

from collections.abc import Sequence
from random import Random

from grpo_lab.seeding import derive_seed
from grpo_lab.types import Problem


def problems_for_step(problems: Sequence[Problem], seed: int, step: int, count: int) -> list[Problem]:
    """Positions step·count up to (step+1)·count, that one left out, of the stream: a pure function of its arguments.

    Epoch e is `problems` shuffled by derive_seed(seed, "epoch", e); a step may cross into the next epoch, or several.
    """
    assert problems and step >= 0 and count >= 1, "a task has problems; steps count from 0"
    positions = range(step * count, (step + 1) * count)
    epochs = range(positions[0] // len(problems), positions[-1] // len(problems) + 1)
    orders = {epoch: _order(len(problems), seed, epoch) for epoch in epochs}
    return [problems[orders[position // len(problems)][position % len(problems)]] for position in positions]


def _order(size: int, seed: int, epoch: int) -> list[int]:
    order = list(range(size))
    Random(derive_seed(seed, "epoch", epoch)).shuffle(order)
    return order
