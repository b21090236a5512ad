"""Seconds of a learner's step as group size, completion length and prompts double, one at a time, and the exponents.

All points share one learner and are interleaved round by round. Lengths do not vary within a point, so that a doubling is
one. An exponent is the slope of log seconds over log size: 1 where twice the work takes twice as long.
"""

from __future__ import annotations

import statistics
import tempfile
from argparse import Namespace
from functools import partial
from math import log
from pathlib import Path

import _common as common
import _models as models

AXES = ("group_size", "completion", "prompts")


def main(arguments: list[str] | None = None) -> None:
    parser = common.parser(__doc__.partition("\n")[0])
    parser.add_argument("--model", type=Path, default=models.DEMO_MODEL, help="a transformers model folder")
    parser.add_argument("--dtype", default="float32", choices=["float32", "bfloat16"])
    parser.add_argument("--group-size", type=int, default=8, help="where the doublings start")
    parser.add_argument("--completion", type=int, default=64, help="where the doublings start, tokens")
    parser.add_argument("--prompts", type=int, default=1, help="where the doublings start")
    parser.add_argument("--prompt", type=int, default=130, help="prompt tokens")
    parser.add_argument("--doublings", type=int, default=3)
    parser.add_argument("--microbatch-tokens", type=int, default=4096)
    parser.add_argument("--no-share-prompt", action="store_true", help="the padded path")
    options = parser.parse_args(arguments)
    with tempfile.TemporaryDirectory() as folder:
        if options.tiny:
            options.model = models.random_model(Path(folder), vocabulary=4096)
            options.group_size, options.completion, options.prompt = 2, 4, 8
            options.doublings, options.rounds = 1, 1
        measure(options)


def measure(options: Namespace) -> None:
    """Time every point, then fit the slopes."""
    from grpo_lab.learner.collate import collate

    start = {axis: getattr(options, axis) for axis in AXES}
    points = {axis: [start | {axis: start[axis] * 2**n} for n in range(options.doublings + 1)] for axis in AXES}
    most = start["prompts"] * 2**options.doublings
    learner, objective = models.make_learner(
        options.model, most, start["group_size"], options.dtype, options.microbatch_tokens, not options.no_share_prompt
    )
    steps = {}
    for point in (point for along in points.values() for point in along):
        size, completion, prompts = (point[axis] for axis in AXES)
        groups = models.synthetic_groups(prompts, size, prompt=options.prompt, completion=completion, vary=False)
        steps[str(point)] = partial(models.step_times, learner, objective, collate(groups))
    samples = common.interleave(steps, options.rounds)
    middle = {name: {q: statistics.median(timed[q]) for q in ("annotate", "update")} for name, timed in samples.items()}
    rows = []
    for axis, along in points.items():
        sizes = [point[axis] for point in along]
        for quantity in ("annotate", "update", "step"):
            times = [
                sum(middle[str(point)].values()) if quantity == "step" else middle[str(point)][quantity]
                for point in along
            ]
            shown = "  ".join(f"{size}: {time:.3g}" for size, time in zip(sizes, times, strict=True))
            rows.append([axis, quantity, slope(sizes, times), slope(sizes[-2:], times[-2:]), shown])
    print(
        f"start: {start}, prompts of {options.prompt} tokens, micro-batches of {options.microbatch_tokens}, {options.dtype}"
    )
    common.report(["doubled", "part", "exponent", "last doubling", "size: seconds"], rows, options, samples)


def slope(sizes: list[int], times: list[float]) -> float:
    """Least-squares slope of log times over log sizes."""
    return statistics.linear_regression([log(size) for size in sizes], [log(time) for time in times]).slope


if __name__ == "__main__":
    main()
