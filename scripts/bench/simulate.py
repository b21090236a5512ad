"""On paper: how many rollout GPUs a learner GPU wants, at which staleness, and where more GPUs stop helping.

Nothing is measured here. Rates come from data sheets and the shares assumed below, or from you (--learner-tokens-per-second,
--worker-tokens-per-second, --concurrency, --push-seconds); a seeded simulation of grpo_lab's rules (_simulation.py) turns them
into steps. With P parameters, of which bf16 takes 2P bytes:

- a worker with n running sequences makes a token of each in a + b n seconds: a = 2P / memory bandwidth + STEP_OVERHEAD, as the
  weights are read once for all; b = cache bytes of a mean context / memory bandwidth + 2P FLOP / compute;
- the learner spends --flops-per-token x P FLOP on a token, a prompt once a group: 2 for the old log-probs, 2 for the
  reference's, 6 for the update (8 in all where one update a batch takes the old ones from its own forward; 2 more with gradient
  checkpointing); attention's own are left out. Its GPUs take whole groups, each doubling of them loses LEARNER_LOSS;
- a push takes PUSH_LATENCY + 2P bytes / --push-gigabytes-per-second, a shared folder's, on all workers at once.

Idle is a learner that waits for a batch or a push, a worker that runs no sequence.
"""

from __future__ import annotations

import math
from argparse import ArgumentParser, ArgumentTypeError, Namespace
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import _common as common
from _simulation import Integers, Rates, System, Workload, candidates, learner_speed_up, simulate


@dataclass(frozen=True)
class Hardware:
    """Of one GPU, from its data sheet: bf16 FLOP/s without sparsity, bytes/s and bytes of memory."""

    flops: float
    bandwidth: float
    memory: float


@dataclass(frozen=True)
class Model:
    """Parameters, and bytes of keys and values a token: 2 x layers x heads of keys x their size x 2 bytes."""

    parameters: float
    cache: float


HARDWARE = {"h100": Hardware(989e12, 3.35e12, 80e9), "h200": Hardware(989e12, 4.8e12, 141e9)}
MODELS = {  # shapes of Qwen2.5-0.5B and -7B and of Llama-3.1-70B
    "0.5B": Model(0.494e9, 2 * 24 * 2 * 64 * 2),
    "7B": Model(7.62e9, 2 * 28 * 4 * 128 * 2),
    "70B": Model(70.6e9, 2 * 80 * 8 * 128 * 2),
}
COMPUTE_SHARE, BANDWIDTH_SHARE, MEMORY_SHARE = 0.4, 0.7, 0.9  # of the data sheet's that is reached (assumed)
STEP_OVERHEAD = 0.005  # seconds of a decoding step besides the GPU's work (assumed)
PUSH_LATENCY = 0.5  # seconds (assumed)
LEARNER_LOSS = 0.05  # of its speed, at each doubling of the learner's GPUs (assumed)
LEARNER_BYTES = (
    25  # a parameter: fp32 master, gradient and two moments, two bf16 copies, a quarter for activations (assumed)
)
MOST_SEQUENCES = 256  # a worker's, as grpo_lab starts vLLM
KNEE = 1.5  # doubling brings less
NUMBERS: dict[str, tuple[type, float | None, float, str]] = {  # option: type, default, least, help
    "prompts-per-step": (int, 128, 1, "prompts_per_step"),
    "group-size": (int, 8, 1, "group_size"),
    "mini-batches": (int, 4, 1, "learner.mini_batches"),
    "prompt-tokens": (int, 200, 0, "of a prompt"),
    "mean-length": (float, 1000.0, 1, "tokens of a completion"),
    "length-variation": (float, 0.7, 0, "its standard deviation over its mean"),
    "max-new-tokens": (int, 4096, 1, "rollout.max_new_tokens"),
    "steps": (int, 8, 1, "steps that count"),
    "seed": (int, 0, 0, "of the lengths"),
    "flops-per-token": (float, 10.0, 1, "of the learner, in parameters"),
    "push-gigabytes-per-second": (float, 10.0, 0.001, "read by every worker at once"),
    "push-seconds": (float, None, 0, "measured, instead"),
    "learner-tokens-per-second": (float, None, 1, "measured on one GPU, instead"),
    "worker-tokens-per-second": (float, None, 1, "measured on one worker with all its sequences running, instead"),
    "concurrency": (int, None, 1, "sequences a worker runs at once, instead of what its memory holds"),
    "worker-gpus": (int, None, 1, "of one worker, instead of the fewest whose half holds the weights"),
    "most-learner-gpus": (int, None, 1, "8 keeps the learner on one machine"),
}


def main(arguments: list[str] | None = None) -> None:
    options = make_parser().parse_args(arguments)
    if options.tiny:
        options.models, options.gpus, options.steps, options.staleness = ["0.5B"], [1, 4], 2, [1]
        options.prompts_per_step = 4
    rows = [row for name in options.models for row in survey(name, options)]
    print(
        f"a model on paper, not a measurement: {options.gpu.upper()}, {COMPUTE_SHARE:.0%} of its FLOP/s, {BANDWIDTH_SHARE:.0%} "
        f"of its bandwidth, {options.prompts_per_step} x {options.group_size} completions a step of {options.mean_length:g} "
        f"tokens (variation {options.length_variation:g}, at most {options.max_new_tokens})"
    )
    for name in options.models:
        print(f"{name:>5}: {describe(MODELS[name], options)}")
    header = ["model", "GPUs", "learner:workers", "in flight", "staleness", "mean", "rollouts/s", "step s"]
    header += ["learner idle", "workers idle", "overlap", "x alternating"]
    common.report(header, [shown(row) for row in rows], options, rows)
    print("alternating on more than one GPU is there to compare: grpo_lab does not do it")
    for name in options.models:
        print(f"{name:>5}: {knee([row for row in rows if row['model'] == name])}")
    if options.figure:
        print(f"drawn {', '.join(map(str, draw(rows, options.figure)))}")


def make_parser() -> ArgumentParser:
    made = common.parser(__doc__.partition("\n")[0])
    made.add_argument("--models", nargs="+", default=list(MODELS), choices=MODELS)
    made.add_argument("--gpus", type=number(int, 1), nargs="+", default=[2**n for n in range(10)], help="totals to try")
    made.add_argument("--gpu", default="h200", choices=HARDWARE)
    made.add_argument("--staleness", type=number(int, 0), nargs="+", default=[0, 1, 2, 4], help="max_staleness to try")
    ways = ["wait", "keep", "abort"]
    made.add_argument("--in-flight", nargs="+", default=ways[:2], choices=ways, help="to try, liked best first")
    for name, (kind, default, least, text) in NUMBERS.items():
        made.add_argument(f"--{name}", type=number(kind, least), default=default, help=text)
    made.add_argument("--figure", type=Path, help="draw rollouts/s against GPUs there")
    return made


def number(kind: type, least: float) -> Callable[[str], float]:
    """A reader of numbers that refuses smaller ones."""

    def read(text: str) -> float:
        if not least <= kind(text) < math.inf:
            raise ArgumentTypeError(f"{text}: at least {least:g}")
        return kind(text)

    read.__name__ = kind.__name__  # argparse names it where the text is no number
    return read


# -- rates -----------------------------------------------------------------------------------------------------------


def worker_gpus(model: Model, options: Namespace) -> int:
    """GPUs of one worker: the smallest power of two of whose memory the weights take half at most."""
    share = 2 * model.parameters / (0.5 * HARDWARE[options.gpu].memory)
    return options.worker_gpus or 2 ** max(0, math.ceil(math.log2(share)))


def fewest_learner_gpus(model: Model, options: Namespace) -> int:
    """GPUs over which the learner's state has to be split."""
    return math.ceil(LEARNER_BYTES * model.parameters / (MEMORY_SHARE * HARDWARE[options.gpu].memory))


def rates(model: Model, learner_gpus: int, options: Namespace) -> Rates:
    """Of a worker and of a learner of so many GPUs, derived as the module says; what is measured replaces it."""
    gpu, size = HARDWARE[options.gpu], worker_gpus(model, options)
    compute, bandwidth = COMPUTE_SHARE * gpu.flops * size, BANDWIDTH_SHARE * gpu.bandwidth * size
    weights = 2 * model.parameters
    context = options.prompt_tokens + options.mean_length * (1 + options.length_variation**2) / 2
    once, each = weights / bandwidth + STEP_OVERHEAD, model.cache * context / bandwidth + weights / compute
    held = int((MEMORY_SHARE * gpu.memory * size - weights) / (model.cache * context))
    if held < 1:
        raise SystemExit(
            f"--worker-gpus {size}: {weights / 1e9:.3g} GB of weights and a cache do not fit there; use more"
        )
    concurrency = options.concurrency or min(MOST_SEQUENCES, held)
    push = options.push_seconds
    if push is None:
        push = PUSH_LATENCY + weights / (1e9 * options.push_gigabytes_per_second)
    one = options.learner_tokens_per_second
    if one is None:
        one = COMPUTE_SHARE * gpu.flops / (options.flops_per_token * model.parameters)
    learner = one * learner_speed_up(learner_gpus, options.prompts_per_step // options.mini_batches, LEARNER_LOSS)
    derived = Rates(1 / each, once / each, concurrency, learner, push, compute / weights)
    if options.worker_tokens_per_second is None:
        return derived
    return replace(derived, peak=derived.peak * options.worker_tokens_per_second / derived.decoding(concurrency))


# -- the search ------------------------------------------------------------------------------------------------------


def survey(name: str, options: Namespace) -> list[dict[str, Any]]:
    """For every total of GPUs the best split and its staleness, beside all GPUs alternating between both roles."""
    load = Workload(
        options.prompts_per_step, options.group_size, options.prompt_tokens, options.mean_length,
        options.length_variation, options.max_new_tokens,
    )  # fmt: skip
    lengths = load.lengths(1 + options.steps + 2 * max(options.staleness), options.seed)
    rows, size = [], worker_gpus(MODELS[name], options)
    for gpus in options.gpus:
        split, alternating = best_split(name, gpus, lengths, options), None
        if max(fewest_learner_gpus(MODELS[name], options), size) <= gpus:
            alternating = evaluate(name, (gpus, gpus // size), ("wait", 0), lengths, options)
        rows.append({"model": name, "gpus": gpus, "split": split, "alternating": alternating})
    return rows


def best_split(name: str, gpus: int, lengths: Integers, options: Namespace) -> dict[str, Any] | None:
    """Within 2 % of the most rollouts/s the first --in-flight, then the least staleness; None where no split fits.

    Of each --in-flight, the splits around the one that looks best on paper are simulated with the most staleness.
    """
    fewest, size = fewest_learner_gpus(MODELS[name], options), worker_gpus(MODELS[name], options)
    splits, tried = candidates(gpus, fewest, size, options.most_learner_gpus or gpus), []
    if not splits:
        return None
    for mode in options.in_flight:
        guesses = [estimate(name, split, mode, lengths, options) for split in splits]
        middle = guesses.index(min(guesses))
        near = [splits[middle + offset] for offset in (-3, -1, 0, 1, 3) if 0 <= middle + offset < len(splits)]
        *fewer, most = sorted(options.staleness)
        results = [evaluate(name, split, (mode, most), lengths, options) for split in near]
        fastest = max(results, key=lambda result: result["rollouts_per_second"])
        split = (fastest["learner"], fastest["workers"])
        tried += [*(evaluate(name, split, (mode, k), lengths, options) for k in fewer), fastest]
    enough = 0.98 * max(result["rollouts_per_second"] for result in tried)
    return next(result for result in tried if result["rollouts_per_second"] >= enough)


def estimate(name: str, split: tuple[int, int], mode: str, lengths: Integers, options: Namespace) -> float:
    """About the seconds of a step: the slower side's, a little more where the other is almost as slow."""
    speed = rates(MODELS[name], split[0], options)
    tokens, running = float(lengths.sum(axis=1).mean()), min(speed.concurrency, lengths.shape[1] / split[1])
    generate = tokens / (split[1] * speed.decoding(running))
    if mode == "wait":
        generate = max(generate, float(lengths.max(axis=1).mean()) * (1 + speed.half) / speed.peak)
    learn = (tokens + options.prompts_per_step * options.prompt_tokens) / speed.learner
    return math.hypot(generate**2, learn**2) ** 0.5


def evaluate(
    name: str, split: tuple[int, int], way: tuple[str, int], lengths: Integers, options: Namespace
) -> dict[str, Any]:
    """One simulated run of (learner GPUs, workers) with (in_flight, max_staleness): its summary and what was run."""
    system = System(split[1], rates(MODELS[name], split[0], options), way[1], way[0])
    outcome = simulate(system, lengths, options.group_size, options.prompt_tokens)
    first = 1 + max(options.staleness)  # before it batches are younger, and the last ones have none ahead of them
    size = worker_gpus(MODELS[name], options)
    run = {"learner": split[0], "workers": split[1], "worker_gpus": size, "in_flight": way[0], "max_staleness": way[1]}
    return run | outcome.summary(first, first + options.steps)


# -- what is shown ---------------------------------------------------------------------------------------------------


def describe(model: Model, options: Namespace) -> str:
    """The rates that a row rests on."""
    speed, fewest, size = rates(model, 1, options), fewest_learner_gpus(model, options), worker_gpus(model, options)
    return (
        f"learner {speed.learner:,.0f} tokens/s a GPU, {fewest} at least; worker of {size} GPUs "
        f"{speed.decoding(speed.concurrency):,.0f} tokens/s with {speed.concurrency} sequences, {speed.decoding(1):,.0f} with "
        f"one; push {speed.push_seconds:.2g} s"
    )


def shown(row: dict[str, Any]) -> list[Any]:
    """A line of the table; where no split fits, that of the alternating GPUs."""
    split, alternating = row["split"], row["alternating"]
    chosen = split or alternating
    if not chosen:
        return [row["model"], row["gpus"], "does not fit", *["-"] * 9]
    size = f"{chosen['learner']}:{chosen['workers'] * chosen['worker_gpus']}" if split else "alternating"
    gain = chosen["rollouts_per_second"] / alternating["rollouts_per_second"] if alternating else "-"
    shares = [f"{chosen[key]:.0%}" for key in ("learner_idle", "worker_idle", "overlap")]
    numbers = [chosen["max_staleness"], chosen["staleness"], chosen["rollouts_per_second"], chosen["step_seconds"]]
    mode = chosen["in_flight"] if chosen["max_staleness"] else "-"
    return [row["model"], row["gpus"], size, mode, *numbers, *shares, gain]


def knee(rows: Sequence[dict[str, Any]]) -> str:
    """After how many GPUs, split or alternating, doubling them brings less than KNEE."""
    ways = {row["gpus"]: [way for way in (row["split"], row["alternating"]) if way] for row in rows}
    speeds = {gpus: max((way["rollouts_per_second"] for way in tried), default=0.0) for gpus, tried in ways.items()}
    for gpus, speed in sorted(speeds.items()):
        if speeds.get(2 * gpus, math.inf) < KNEE * speed:
            return f"knee at {gpus} GPUs: {2 * gpus} are {speeds[2 * gpus] / speed:.2f} times as fast"
    return "no knee here"


def draw(rows: Sequence[dict[str, Any]], path: Path) -> list[Path]:
    """Rollouts/s against GPUs, a colour a model; dashed: all GPUs alternate."""
    from matplotlib.figure import Figure
    from matplotlib.ticker import LogLocator

    from grpo_lab.drawing import PALETTE, legend_below, save

    figure = Figure(figsize=(6.4, 4.6), layout="constrained")
    axes = figure.add_subplot(xscale="log", yscale="log", xlabel="GPUs", ylabel="rollouts / s")
    for name, colour in zip(dict.fromkeys(row["model"] for row in rows), PALETTE, strict=False):
        for way, style in (("split", "o-"), ("alternating", "--")):
            ran = [row for row in rows if row["model"] == name and row[way]]
            speeds = [row[way]["rollouts_per_second"] for row in ran]
            axes.plot([row["gpus"] for row in ran], speeds, style, color=colour, markersize=4, label=f"{name}, {way}")
    totals = sorted({row["gpus"] for row in rows})
    axes.set_xticks(totals, [str(total) for total in totals])
    axes.yaxis.set_major_locator(LogLocator(subs=(1, 2, 5)))
    axes.yaxis.set_major_formatter("{x:g}")
    axes.minorticks_off()
    axes.set_title("A model on paper, not a measurement", fontsize=10)
    legend_below(figure, 3)
    return save(figure, path.with_suffix(""))


if __name__ == "__main__":
    main()
