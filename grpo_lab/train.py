"""The training loop: the numbered steps of the README, in their order."""

from __future__ import annotations

import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass

import torch

from grpo_lab.assemble import Parts, assemble, build_learner, check
from grpo_lab.batch import StepGroups, collect_step
from grpo_lab.config import Config
from grpo_lab.console import Console
from grpo_lab.errors import RunError
from grpo_lab.evaluation.bank import ReferenceBank, run_bank
from grpo_lab.evaluation.report import draw_run, evaluate_run, evaluation_table, is_evaluated, sample
from grpo_lab.health import Health
from grpo_lab.learner.checkpoint import Checkpoint, Progress, newest_checkpoint, save_checkpoint
from grpo_lab.learner.collate import collate
from grpo_lab.learner.gradient import NonFiniteError
from grpo_lab.learner.ranks import READY, Ranks, follow
from grpo_lab.metrics import batch_metrics, rollout_metrics, time_metrics
from grpo_lab.objective.advantages import batch_advantages
from grpo_lab.records import token_columns
from grpo_lab.rollout.ahead import BatchesAhead
from grpo_lab.run_dir import RunDir
from grpo_lab.signals import Interrupted, StopRequest, stop_signals
from grpo_lab.tracking import Tracker


def train(config: Config, console: Console, resume: RunDir | None = None) -> RunDir | None:
    """Run (or continue) a training to `total_rollouts`, or to the end of the step in which a stop signal came.

    Of several processes, rank 0 runs it and returns the run; the others follow its learner. Raises ConfigError before any model
    loads, RunError afterwards; what was saved stays.
    """
    ranks = Ranks()
    if ranks.is_main:
        try:
            return _lead(config, console, resume, ranks)
        finally:
            ranks.end()
    if ranks.share(None) == READY:  # else rank 0 has ended before it had anything to follow
        follow(build_learner(config, _resume_point(config, resume) if resume else None))
    return None


def _lead(config: Config, console: Console, resume: RunDir | None, ranks: Ranks) -> RunDir:
    checkpoint = _resume_point(config, resume) if resume else None
    console.describe(config, check(config))
    if not resume:
        RunDir.refuse_existing(config)
    console.say(f"loading    {config.model.place} and the {config.rollout.engine_name} engine")
    ranks.share(READY)
    parts = assemble(config, checkpoint, say=console.say)
    try:
        run = resume or RunDir.create(config)
        progress = checkpoint.progress if checkpoint else Progress()
        run.rewind(progress.step)
        console.started(run, config, progress)
        with Tracker(config, run) as tracker:
            stopped = _loop(parts, run, progress, console, tracker)
    except torch.OutOfMemoryError as error:
        raise RunError(
            f"out of GPU memory ({str(error).split('.')[0]}): lower learner.microbatch_tokens or "
            "rollout.gpu_memory_utilization, then continue with --resume"
        ) from None
    finally:
        parts.close()
        console.close()
    console.finished(run, evaluation_table(run), draw_run(run), stopped)
    return run


@dataclass(frozen=True)
class _Job:
    """What the loop works with."""

    parts: Parts
    run: RunDir
    console: Console
    tracker: Tracker
    sampler: BatchesAhead[StepGroups]
    health: Health
    stop: StopRequest


def _loop(parts: Parts, run: RunDir, progress: Progress, console: Console, tracker: Tracker) -> str:
    """Steps and evaluations until the end or a stop signal; returns the signal's name, "" at the end.

    A signal that comes while completions are sampled ends it at once: nothing has been learnt from them yet, and the resumed
    run samples them again. At any other time the step is finished first.
    """
    config = parts.config
    steps = config.total_rollouts // config.rollouts_per_step
    sampler = BatchesAhead(lambda step: collect_step(parts, step), config.rollout.max_staleness, steps)
    with stop_signals() as stop, sampler:
        job = _Job(parts, run, console, tracker, sampler, Health(config, run.read_metrics()), stop)
        saved = progress.step
        try:
            bank = _begin(job, progress)
            sampler.allow(progress.step)
            while True:
                if bank and _is_milestone(config, progress) and not is_evaluated(run, progress.rollouts):
                    _evaluate(job, progress, bank)
                if progress.rollouts >= config.total_rollouts:
                    break
                progress, metrics = _step(job, progress)
                run.append_metrics(metrics)
                tracker.log(metrics, progress.rollouts)
                console.step(metrics)
                if _is_milestone(config, progress):
                    save_checkpoint(run.checkpoints, parts.learner, parts.tokenizer, progress)
                    saved = progress.step
        except Interrupted:
            if progress.step > saved:
                save_checkpoint(run.checkpoints, parts.learner, parts.tokenizer, progress)
        except NonFiniteError as error:
            last = newest_checkpoint(run.checkpoints)
            raise RunError(f"{error}; last good checkpoint: {last.folder if last else 'none yet'}") from None
        return stop.name


def _begin(job: _Job, progress: Progress) -> ReferenceBank | None:
    """Proven weights in the engine, and the reference's samples where evaluations need them."""
    parts, settings = job.parts, job.parts.config.evaluation
    if progress.step == 0:  # the policy is the reference: the bank is drawn from weights that have been proven
        parts.push_weights(0)
    bank = None
    if settings.enabled:
        job.console.say(f"reference  {settings.problems} held-out problems x {settings.samples} samples, for the floor")
        with job.stop.interrupts():
            bank = run_bank(parts, job.run.evaluations)
    if progress.step > 0:
        parts.push_weights(progress.step)
    return bank


def _evaluate(job: _Job, progress: Progress, bank: ReferenceBank) -> None:
    job.console.say(f"evaluating at {progress.rollouts:,} rollouts")
    with job.stop.interrupts():
        groups = bank.groups if progress.rollouts == 0 else sample(job.parts)  # at 0 the policy is the reference
    evaluation = evaluate_run(job.parts, job.run, bank, groups, progress.rollouts)
    job.console.evaluation(evaluation)
    job.tracker.log(evaluation.flat(), progress.rollouts)


def _step(job: _Job, progress: Progress) -> tuple[Progress, dict[str, float]]:
    """One batch from problems to pushed weights. The numbers are the README's."""
    parts, console, sampler = job.parts, job.console, job.sampler
    config, times = parts.config, dict[str, float]()
    console.phase(f"step {progress.step + 1}: sampling {config.rollouts_per_step:,} completions")
    # 1, 2, 3. problems, G siblings of each, graded
    with job.stop.interrupts():
        (groups, sampling), spent = sampler.take(progress.step)
    console.phase(f"step {progress.step + 1}: log-probs under the learner and the reference")
    # 4, 5. tensors; log-probs under the learner and the reference
    with _timed(times, "annotate"):
        batch = parts.learner.prepare(collate(groups))
    # 6. advantages, with the KL in the reward where the objective puts it
    advantage = batch_advantages(batch, parts.objective)
    metrics = {**rollout_metrics(groups), **sampling, **batch_metrics(batch, parts.objective, progress.step)}
    job.health.check(metrics, progress.step + 1)
    console.phase(f"step {progress.step + 1}: updating")
    # 7. micro-batches -> loss -> gradient -> optimizer
    with _timed(times, "update"):
        report = parts.learner.update(batch, advantage, progress.step)
    # 8. the new weights travel back
    tokens = int(batch.tokens.completion_mask.sum())
    after = Progress(progress.step + 1, progress.rollouts + config.rollouts_per_step, progress.tokens + tokens)
    with _timed(times, "sync"):
        pushed = parts.push_weights(after.step)
    sampler.allow(after.step)
    # 9. the record
    if config.tracking.rollouts:
        job.run.save_rollouts(after.step, groups, token_columns(batch, advantage, report))
    counters = {"step": after.step, "rollouts/total": after.rollouts, "tokens/total": after.tokens}
    speed = time_metrics(spent, times, tokens)
    return after, {**counters, **metrics, **report.metrics, **pushed, **speed}


def _is_milestone(config: Config, progress: Progress) -> bool:
    return progress.rollouts % config.checkpoint_every == 0 or progress.rollouts >= config.total_rollouts


def _resume_point(config: Config, run: RunDir) -> Checkpoint | None:
    run.refuse_changes(config)
    return newest_checkpoint(run.checkpoints)


@contextmanager
def _timed(times: dict[str, float], name: str) -> Iterator[None]:
    start = time.perf_counter()
    yield
    times[name] = time.perf_counter() - start
