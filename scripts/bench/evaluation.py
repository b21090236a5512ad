"""Seconds of an evaluation: sampling the held-out problems, and measuring what was sampled, in one process.

Sampling is the config's engine at temperature 1; measuring is the learner's log-probs, full-vocabulary KL and entropy under the
policy and the reference, and the statistics. The policy is the reference with its weights a little moved, so that
neither is spared. `total` is sampling and measuring over sampling alone.
"""

from __future__ import annotations

import statistics
import tempfile
from pathlib import Path
from typing import Any

import _common as common
import _models as models


def main(arguments: list[str] | None = None) -> None:
    parser = common.parser(__doc__.partition("\n")[0])
    parser.add_argument("--config", type=Path, default=common.REPOSITORY / "configs/quickstart_cpu.yaml")
    parser.add_argument("--set", action="append", default=[], metavar="KEY=VALUE", help="as of grpo-lab train")
    parser.add_argument("--problems", type=int, default=64)
    parser.add_argument("--samples", type=int, default=8)
    options = parser.parse_args(arguments)
    with tempfile.TemporaryDirectory() as folder:
        if options.tiny:
            model = models.random_model(Path(folder), 49152, tokenizer=models.DEMO_MODEL)
            options.problems, options.samples, options.rounds = 2, 2, 1
            options.set += [f"model.name={model}", "rollout.engine=hf", "rollout.max_new_tokens=4"]
        measure(options)


def measure(options: Any) -> None:
    """`--rounds` evaluations after an uncounted one."""
    from grpo_lab.assemble import assemble
    from grpo_lab.config.file import load_config
    from grpo_lab.evaluation.bank import run_bank
    from grpo_lab.evaluation.evaluate import measure as measure_policy
    from grpo_lab.evaluation.report import sample

    sizes = [f"evaluation.problems={options.problems}", f"evaluation.samples={options.samples}"]
    config = load_config(options.config, [*options.set, *sizes])
    parts, last = assemble(config), dict[str, Any]()
    try:
        bank = run_bank(parts, None)
        for parameter in parts.learner.policy.trainable().values():
            parameter.data.mul_(1.001)
        parts.push_weights(1)

        def evaluate() -> dict[str, float]:
            sampling = common.seconds(lambda: last.update(groups=sample(parts)))
            spent = common.seconds(lambda: measure_policy(parts.learner, last["groups"], bank, config.beta, 0))
            tokens = sum(len(c.token_ids) for group in last["groups"] for c in group.completions)
            return {"sampling": sampling, "measuring": spent, "tokens": float(tokens)}

        samples = common.interleave({"evaluation": evaluate}, options.rounds)["evaluation"]
    finally:
        parts.close()
    print(
        f"{options.problems} problems x {options.samples} samples, {config.model.dtype}, {config.rollout.engine_name}"
    )
    middle = {name: statistics.median(values) for name, values in samples.items()}
    total = [a + b for a, b in zip(samples["sampling"], samples["measuring"], strict=True)]
    row = [middle["sampling"], middle["measuring"], f"{common.ratio(total, samples['sampling']):.2f}x"]
    speed = [round(middle["tokens"] / middle[name]) for name in ("sampling", "measuring")]
    header = ["evaluation", "sampling s", "measuring s", "total", "sampled tok/s", "measured tok/s"]
    common.report(header, [["", *row, *speed]], options, samples)


if __name__ == "__main__":
    main()
