"""Peak memory of log-probs and backward, grpo_lab's against full logits, by completion length and vocabulary size.

Every point is a process of its own: a random two-layer model (so that activations are small beside logits) makes the
log-probs of one micro-batch of siblings and runs backward; the peak is what that adds to the loaded model, gradients
included. Contenders: `full` (full logits, log-softmax, gather), `lean` (logits from the prompt's end on), `padded` and
`shared` (grpo_lab without and with prompt sharing). `--rounds` is the number of processes a point; the smallest peak counts.
"""

from __future__ import annotations

import json
import tempfile
from argparse import Namespace
from pathlib import Path
from typing import Any

import _common as common
import _models as models

CONTENDERS = ("full", "lean", "padded", "shared")


def main(arguments: list[str] | None = None) -> None:
    parser = common.parser(__doc__.partition("\n")[0])
    parser.add_argument("--vocabularies", type=int, nargs="+", default=[49152, 151936])
    parser.add_argument("--lengths", type=int, nargs="+", default=[64, 128, 256, 512], help="completion tokens")
    parser.add_argument("--prompt", type=int, default=130, help="prompt tokens")
    parser.add_argument("--siblings", type=int, default=4, help="rows of the micro-batch")
    parser.add_argument("--hidden", type=int, default=576)
    parser.add_argument("--dtype", default="float32", choices=["float32", "bfloat16"])
    parser.add_argument("--only", nargs="+", default=list(CONTENDERS), choices=CONTENDERS)
    parser.add_argument(
        "--limit-gb", type=float, default=12, help="leave out points whose logits would need about more"
    )
    parser.add_argument("--child", type=json.loads, help="internal: measure one point and print it as JSON")
    options = parser.parse_args(arguments)
    if options.child:
        print(json.dumps(measure_point(**options.child)))
        return
    if options.tiny:
        options.vocabularies, options.lengths, options.only, options.rounds = [4096], [32], ["shared"], 1
        options.hidden = 64
    compare(options)


def compare(options: Namespace) -> None:
    """All points, contenders side by side."""
    rows, samples = [], []
    with tempfile.TemporaryDirectory() as folder:
        for vocabulary in options.vocabularies:
            model = models.random_model(Path(folder) / str(vocabulary), vocabulary, hidden=options.hidden)
            for length in options.lengths:
                peaks = [best_peak(name, str(model), vocabulary, length, options, samples) for name in options.only]
                rows.append([vocabulary, length, *(peak if isinstance(peak, str) else round(peak) for peak in peaks)])
    print(
        f"peak MiB above the loaded model; {options.siblings} siblings, prompt {options.prompt} tokens, {options.dtype}"
    )
    common.report(["vocabulary", "completion", *options.only], rows, options, samples)


def best_peak(
    name: str, model: str, vocabulary: int, length: int, options: Namespace, samples: list[dict[str, Any]]
) -> float | str:
    """The smallest peak of --rounds processes, or why there is none."""
    positions = options.siblings * (length + (options.prompt if name == "full" else 0))
    if name in ("full", "lean") and 4 * positions * vocabulary * 4 > options.limit_gb * 2**30:
        return "too large"
    point = {"contender": name, "model": model, "length": length, "vocabulary": vocabulary}
    point |= {"prompt": options.prompt, "siblings": options.siblings, "dtype": options.dtype}
    measured = [common.in_child(__file__, point) for _ in range(options.rounds)]
    samples += [point | one for one in measured]
    return min((one["peak_mib"] for one in measured if "peak_mib" in one), default=measured[0].get("error", ""))


def measure_point(
    contender: str, model: str, length: int, vocabulary: int, prompt: int, siblings: int, dtype: str
) -> dict[str, float]:
    """One micro-batch in this process: MiB above the loaded model, and seconds."""
    import torch
    from transformers import AutoModelForCausalLM

    from grpo_lab.learner.collate import collate
    from grpo_lab.learner.logprobs import completion_logprobs

    device = "cuda" if torch.cuda.is_available() else "cpu"
    policy = AutoModelForCausalLM.from_pretrained(model, dtype=getattr(torch, dtype)).to(device).eval()

    def batch(size: int, prompt_length: int, completion: int) -> Any:
        return collate(models.synthetic_groups(1, size, prompt=prompt_length, completion=completion, vary=False))

    def backward(tokens: Any) -> None:
        if contender in ("full", "lean"):
            logprobs = models.plain_logprobs(policy, tokens, lean=contender == "lean")
        else:
            logprobs = completion_logprobs(policy, tokens, share_prompt=contender == "shared")
        (-logprobs.sum() / logprobs.numel()).backward()

    backward(batch(2, 4, 4))  # libraries and kernels allocate on first use
    policy.zero_grad(set_to_none=True)
    tokens = batch(siblings, prompt, length)
    times: list[float] = []
    peak = common.peak_above(lambda: times.append(common.seconds(lambda: backward(tokens))))
    return {"peak_mib": peak, "seconds": times[0]}


if __name__ == "__main__":
    main()
