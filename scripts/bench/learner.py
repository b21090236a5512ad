"""Tokens a second of grpo_lab's learner against a bare loop of transformers and torch, on the same tokens in one process.

Contenders, interleaved round by round:
  bare          rows in their order, padded; all logits, log-softmax, gather; the same clipped loss; backward; clip; fused AdamW
  bare-sorted   the same with rows sorted by length into grpo_lab's micro-batches, and logits from the prompt's end on only
  padded        grpo_lab with learner.share_prompt=False
  shared        grpo_lab with learner.share_prompt=True, the default
  shared-once   the same with the old log-probs from the update's own forward, as a training with one update a batch does
All have the same micro-batch budget, the same dtype and one update. `annotate` is two passes without
gradient (policy and reference); the bare loops do the same. Below fp32 only grpo_lab keeps fp32 masters. The gradient's norm
shows that all compute the same. Useful tokens are the completions'; tokens with prompts count every sibling's prompt,
however often it was computed. MFU is 2 FLOPs a parameter and token of each forward without gradient and 6 of the update, over
tokens that are no padding (a shared prompt once), as a share of the rate of a large matrix product on this machine.
On a GPU the peak of its memory is printed too. `--profile` instead says which operators a step of each contender spends its
time in: the limit of what is left to win.
"""

from __future__ import annotations

import statistics
import tempfile
from argparse import Namespace
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import _common as common
import _models as models
import torch

from grpo_lab.learner.collate import collate, select
from grpo_lab.learner.packing import count_tokens, plan_microbatches
from grpo_lab.types import TokenBatch

CONTENDERS = ("bare", "bare-sorted", "padded", "shared", "shared-once")


class BareLoop:
    """Policy, frozen reference and AdamW, with nothing of grpo_lab but the batch's tensors."""

    def __init__(self, options: Namespace, tidy: bool) -> None:
        from transformers import AutoModelForCausalLM

        device = "cuda" if torch.cuda.is_available() else "cpu"
        load = partial(AutoModelForCausalLM.from_pretrained, options.model, dtype=getattr(torch, options.dtype))
        self.policy, self.reference = load().to(device).eval(), load().to(device).eval()
        self._tidy, self._budget, self._device = tidy, options.microbatch_tokens, device
        self._adamw = torch.optim.AdamW(self.policy.parameters(), lr=1e-9, weight_decay=0.0, fused=True)

    def step(self, tokens: TokenBatch) -> dict[str, float]:
        """Seconds of the two passes without gradient and of the update, and the gradient's norm."""
        done: dict[str, Any] = {}
        annotate = common.seconds(
            lambda: done.update(old=self._score(self.policy, tokens), ref=self._score(self.reference, tokens))
        )
        update = common.seconds(lambda: done.update(norm=self._update(tokens, done["old"], done["ref"])))
        return {"annotate": annotate, "update": update, "grad_norm": done["norm"]}

    def _parts(self, tokens: TokenBatch) -> list[tuple[torch.Tensor, TokenBatch]]:
        rows = torch.arange(tokens.num_sequences)
        if self._tidy:
            plan = plan_microbatches(tokens, rows, self._budget, share_prompt=False)
        else:
            plan = list(rows.split(max(1, self._budget // tokens.input_ids.shape[1])))
        return [(rows, select(tokens, rows)) for rows in plan]

    @torch.no_grad()
    def _score(self, model: Any, tokens: TokenBatch) -> torch.Tensor:
        scores = torch.zeros(tokens.completion_mask.shape)
        for rows, part in self._parts(tokens):
            scores[rows, : part.completion_mask.shape[1]] = models.plain_logprobs(model, part, self._tidy).cpu()
        return scores

    def _update(self, tokens: TokenBatch, old: torch.Tensor, ref: torch.Tensor) -> float:
        """dapo's clip, KL in the reward at beta 0.05, leave-one-out, sums over sequences x 512: what make_learner trains."""
        returns = (tokens.rewards - 0.05 * ((old - ref) * tokens.completion_mask).sum(dim=1)).view(
            -1, tokens.group_size
        )
        others = (returns.sum(dim=1, keepdim=True) - returns) / (tokens.group_size - 1)
        advantages = (returns - others).flatten()
        for rows, part in self._parts(tokens):
            columns = part.completion_mask.shape[1]
            scale = advantages[rows].unsqueeze(1).to(self._device)
            now = models.plain_logprobs(self.policy, part, self._tidy)
            ratios = (now - old[rows, :columns].to(self._device)).exp()
            gain = torch.minimum(ratios * scale, ratios.clamp(0.8, 1.28) * scale) * part.completion_mask.to(
                self._device
            )
            (-gain.sum() / (tokens.num_sequences * 512)).backward()
        norm = float(torch.nn.utils.clip_grad_norm_(self.policy.parameters(), 1.0))
        self._adamw.step()
        self._adamw.zero_grad(set_to_none=True)
        return norm


def contender(name: str, options: Namespace, tokens: TokenBatch) -> Callable[[], dict[str, float]]:
    """A step of the contender `name`, ready to be timed."""
    if name.startswith("bare"):
        return partial(BareLoop(options, tidy=name == "bare-sorted").step, tokens)
    learner, objective = models.make_learner(
        options.model, options.prompts, options.group_size, options.dtype, options.microbatch_tokens, name != "padded"
    )
    return partial(models.step_times, learner, objective, tokens, once=name == "shared-once")


def work(name: str, what: str, options: Namespace, tokens: TokenBatch) -> float:
    """FLOPs of the model that a step of `name` cannot do without, in `what`: "update" or "both"."""
    from accelerate import init_empty_weights
    from transformers import AutoConfig, AutoModelForCausalLM

    with init_empty_weights():
        model = AutoModelForCausalLM.from_config(AutoConfig.from_pretrained(options.model))
    parameters = sum(
        p.numel() for p in model.parameters()
    )  # tied embeddings once: the head's product, the lookup is free
    shared = name.startswith("shared")
    plan = plan_microbatches(tokens, torch.arange(tokens.num_sequences), options.microbatch_tokens, shared)
    real = sum(count_tokens(tokens, rows, shared).real for rows in plan)
    passes = 0 if what == "update" else 1 if name == "shared-once" else 2
    return real * parameters * (6 + 2 * passes)


def main(arguments: list[str] | None = None) -> None:
    parser = common.parser(__doc__.partition("\n")[0])
    parser.add_argument("--model", type=Path, default=models.DEMO_MODEL, help="a transformers model folder")
    parser.add_argument(
        "--random", action="store_true", help="random weights of Qwen2.5-0.5B's shape instead of --model"
    )
    parser.add_argument(
        "--data", type=Path, help="a GSM8K train.jsonl, or its folder: real prompts, answers as completions"
    )
    parser.add_argument("--dtype", default="float32", choices=["float32", "bfloat16"])
    parser.add_argument("--prompts", type=int, default=2, help="groups of one step")
    parser.add_argument("--group-size", type=int, default=32)
    parser.add_argument("--microbatch-tokens", type=int, default=4096)
    parser.add_argument(
        "--only", nargs="+", default=list(CONTENDERS), choices=CONTENDERS, help="needs what you compare with"
    )
    parser.add_argument("--profile", action="store_true", help="where the time of one step goes, in place of the table")
    options = parser.parse_args(arguments)
    with tempfile.TemporaryDirectory() as folder:
        if options.tiny:
            real = {"vocabulary": 49152, "tokenizer": models.DEMO_MODEL} if options.data else {"vocabulary": 4096}
            options.model = models.random_model(Path(folder), **real)
            options.prompts, options.group_size, options.rounds = 2, 4, 1
        elif options.random:
            shape = {"layers": 24, "hidden": 896, "intermediate": 4864, "kv_heads": 2}
            options.model = models.random_model(Path(folder), vocabulary=151936, **shape)
        measure(options)


def measure(options: Namespace) -> None:
    """Run the contenders and print tokens a second, and each against the first one of --only."""
    size = {"prompts": options.prompts, "size": options.group_size}
    lengths = {"prompt": 20, "completion": 10} if options.tiny else {}
    groups = (
        models.gsm8k_groups(options.data, options.model, **size)
        if options.data
        else models.synthetic_groups(**size, **lengths)
    )
    tokens = collate(groups)
    useful = int(tokens.completion_mask.sum())
    everything = useful + int(tokens.prompt_lengths.sum())
    print(
        f"{tokens.num_sequences} sequences: prompts {float(tokens.prompt_lengths.float().mean()):.0f} tokens, completions "
        f"{useful / tokens.num_sequences:.0f} on average; {useful:,} useful, {everything:,} with prompts; {options.dtype}"
    )
    steps = {name: contender(name, options, tokens) for name in options.only}
    if options.profile:
        profile(steps, options)
        return
    samples = common.interleave(steps, options.rounds)
    for timed in samples.values():
        timed["both"] = [a + u for a, u in zip(timed["annotate"], timed["update"], strict=True)]
    first, rate = samples[options.only[0]], common.matmul_rate(options.dtype, 256 if options.tiny else 4096)
    rows = []
    for name, timed in samples.items():
        for what in ("both",) if name == "shared-once" else ("update", "both"):
            middle = statistics.median(timed[what])
            label = "update" if what == "update" else "annotate + update"
            speeds = [useful / middle, everything / middle]
            times = [round(min(timed[what]), 3), round(middle, 3), f"{common.ratio(first[what], timed[what]):.2f}x"]
            mfu = work(name, what, options, tokens) / middle / rate
            rows.append(
                [name, label, *times, *(round(speed, 1) for speed in speeds), f"{mfu:.1%}", timed["grad_norm"][0]]
            )
    header = [
        "contender",
        "what",
        "s min",
        "s median",
        f"vs {options.only[0]}",
        "useful tok/s",
        "tok/s with prompts",
        "MFU",
        "grad norm",
    ]
    print(f"a matrix product reaches {rate / 1e12:.3g} TFLOP/s")
    if torch.cuda.is_available():
        print(
            f"peak of GPU memory {torch.cuda.max_memory_allocated() / 2**30:.1f} GiB, all contenders' weights included"
        )
    common.report(
        header, rows, options, {"useful_tokens": useful, "tokens_with_prompts": everything, "samples": samples}
    )


def profile(steps: dict[str, Callable[[], dict[str, float]]], options: Namespace, largest: int = 10) -> None:
    """After a warm step, the share of one step's own time by operator, the `largest` of each contender."""
    from torch.profiler import ProfilerActivity
    from torch.profiler import profile as profiler

    on_gpu = torch.cuda.is_available()
    rows = []
    for name, step in steps.items():
        step()
        with profiler(activities=[ProfilerActivity.CUDA if on_gpu else ProfilerActivity.CPU]) as recorded:
            step()
        times = {e.key: e.self_device_time_total if on_gpu else e.self_cpu_time_total for e in recorded.key_averages()}
        total = sum(times.values())
        for operator, time in sorted(times.items(), key=lambda item: -item[1])[:largest]:
            rows.append([name, operator[:60], round(time / 1e6, 2), f"{time / total:.1%}"])
    common.report(["contender", "operator", "s", "share"], rows, options, None)


if __name__ == "__main__":
    main()
