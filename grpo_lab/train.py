"""The training loop: the numbered steps of the README, in their order."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass

import torch

from grpo_lab.assemble import Parts, assemble, build_learner, check, check_data
from grpo_lab.batch import StepGroups, collect_step
from grpo_lab.config import Config
from grpo_lab.console import Console
from grpo_lab.errors import RunError
from grpo_lab.evaluation.bank import ReferenceBank, has_bank, run_bank
from grpo_lab.evaluation.report import draw_run, evaluate_run, evaluation_table, is_evaluated, sample
from grpo_lab.health import Health
from grpo_lab.learner.checkpoint import Checkpoint, Progress, newest_checkpoint, save_checkpoint, saved_checkpoints
from grpo_lab.learner.collate import collate
from grpo_lab.learner.gradient import NonFiniteError
from grpo_lab.learner.ranks import READY, Ranks, follow
from grpo_lab.metrics import batch_metrics, rollout_metrics, time_metrics
from grpo_lab.objective.advantages import batch_advantages
from grpo_lab.rollout.ahead import BatchesAhead
from grpo_lab.run_dir import RunDir
from grpo_lab.signals import Interrupted, StopRequest, stop_signals
from grpo_lab.storage.records import token_columns
from grpo_lab.storage.rotation import rotate
from grpo_lab.storage.run_lock import run_lock
from grpo_lab.tracking import Tracker, check_trackers


def train(config: Config, console: Console, resume: RunDir | None = None) -> RunDir | None:
    """Run (or continue) a training to `total_rollouts`, or to the end of the step in which a stop signal came.

    Of several processes, rank 0 runs it and returns the run; the others follow its learner. Raises ConfigError before any model
    loads, RunError afterwards; what was saved stays.
    """
    ranks = Ranks()
    if ranks.is_main:
        try:
            with ExitStack() as held:
                return _lead(config, console, resume, ranks, held)
        finally:
            console.close()
            ranks.end()
            ranks.share(console.folder)
    if ranks.share(None) == READY:  # else rank 0 has ended before it had anything to follow
        follow(build_learner(config, _resume_point(config, resume) if resume else None))
    console.keep_log(ranks.share(None), f"rank_{ranks.index}.log")
    return None


def _lead(config: Config, console: Console, resume: RunDir | None, ranks: Ranks, held: ExitStack) -> RunDir:
    if resume:
        held.enter_context(run_lock(resume.path, console.say))
    checkpoint = _resume_point(config, resume, console.say) if resume else None
    check_trackers(config)
    objective, task = check(config), check_data(config)
    console.describe(config, objective)
    if not resume:
        RunDir.refuse_existing(config)
    console.phase(
        "loading", f"loading    {config.model.place} and the {config.rollout.engine_name} engine", is_news=True
    )
    ranks.share(READY)
    parts = assemble(config, checkpoint, say=console.say, task=task)
    with stop_signals() as stop:
        try:
            run = resume or RunDir.create(config)
            if not resume:
                held.enter_context(run_lock(run.path, console.say))
            progress = checkpoint.progress if checkpoint else Progress()
            run.rewind(progress.step)
            rotate(run, config, console.say)  # a run that was killed while it removed some goes on with that
            console.started(run, config, progress)
            if progress.rollouts >= config.total_rollouts:
                console.say(f"complete   after {progress.rollouts:,} rollouts; raise total_rollouts to train on")
            with Tracker(config, run, console.say) as tracker:
                stopped = _loop(parts, run, progress, console, tracker, stop)
        except torch.OutOfMemoryError as error:
            raise RunError(
                f"out of GPU memory ({str(error).split('.')[0]}): lower learner.microbatch_tokens or "
                "rollout.gpu_memory_utilization, then continue with --resume"
            ) from None
        finally:
            console.keep_worker_logs(getattr(parts.engine, "logs", None))
            parts.close()
            console.close()
        console.finished(run, evaluation_table(run), draw_run(run, console.say), stopped)
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


def _loop(parts: Parts, run: RunDir, progress: Progress, console: Console, tracker: Tracker, stop: StopRequest) -> str:
    """Steps and evaluations until the end or a stop signal; returns the signal's name, "" at the end.

    A signal that comes while completions are sampled ends it at once: nothing has been learnt from them yet, and the resumed
    run samples them again. At any other time the step is finished first.
    """
    config = parts.config
    steps = config.total_rollouts // config.rollouts_per_step
    sampler = BatchesAhead(lambda step: collect_step(parts, step), config.rollout.max_staleness, steps)
    with sampler:
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
                    _save(job, progress)
                    saved = progress.step
        except Interrupted:
            if progress.step > saved:
                _save(job, progress)
        except NonFiniteError as error:
            last = next(saved_checkpoints(run.checkpoints), None)
            raise RunError(f"{error}; last good checkpoint: {last.folder if last else 'none yet'}") from None
        return stop.name


def _begin(job: _Job, progress: Progress) -> ReferenceBank | None:
    """Proven weights in the engine, and the reference's samples where evaluations need them."""
    parts, settings = job.parts, job.parts.config.evaluation
    if progress.step == 0:  # the policy is the reference: the bank is drawn from weights that have been proven
        parts.push_weights(0)
    bank = None
    if settings.enabled:
        what = f"{settings.problems} held-out problems x {settings.samples} samples"
        found = settings.bank_dir is None and has_bank(job.run.evaluations)
        text = f"reference  bank of {what} found" if found else f"reference  {what}, for the floor"
        job.console.phase("reference", text, is_news=True)
        with job.stop.interrupts():
            bank = run_bank(parts, job.run.evaluations)
    if progress.step > 0:
        parts.push_weights(progress.step)
    return bank


def _evaluate(job: _Job, progress: Progress, bank: ReferenceBank) -> None:
    job.console.phase("evaluate", f"evaluating at {progress.rollouts:,} rollouts", is_news=True)
    try:
        with job.stop.interrupts():
            groups = bank.groups if progress.rollouts == 0 else sample(job.parts)  # at 0 the policy is the reference
    except Interrupted:
        job.console.say(
            f"note       the evaluation at {progress.rollouts:,} rollouts was given up; the resumed run makes it"
        )
        raise
    evaluation = evaluate_run(job.parts, job.run, bank, groups, progress.rollouts)
    job.console.evaluation(evaluation)
    job.tracker.evaluated(evaluation.flat(), groups, progress.rollouts)


def _step(job: _Job, progress: Progress) -> tuple[Progress, dict[str, float]]:
    """One batch from problems to pushed weights. The numbers are the README's."""
    parts, console, sampler = job.parts, job.console, job.sampler
    config, times = parts.config, dict[str, float]()
    console.phase("sampling", f"step {progress.step + 1}: sampling {config.rollouts_per_step:,} completions")
    # 1, 2, 3. problems, G siblings of each, graded
    with job.stop.interrupts():
        (groups, sampling), spent = sampler.take(progress.step)
    console.phase("annotate", f"step {progress.step + 1}: log-probs under the learner and the reference")
    # 4, 5. tensors; log-probs under the learner and the reference
    with _timed(times, "annotate"):
        batch = parts.learner.prepare(collate(groups))
    # 6. advantages, with the KL in the reward where the objective puts it
    advantage = batch_advantages(batch, parts.objective)
    metrics = {**rollout_metrics(groups), **sampling, **batch_metrics(batch, parts.objective, progress.step)}
    job.health.check(metrics, progress.step + 1)
    console.phase("update", f"step {progress.step + 1}: updating")
    # 7. micro-batches -> loss -> gradient -> optimizer
    with _timed(times, "update"):
        report = parts.learner.update(batch, advantage, progress.step)
    console.phase("sync")
    # 8. the new weights travel back
    tokens = int(batch.tokens.completion_mask.sum())
    after = Progress(progress.step + 1, progress.rollouts + config.rollouts_per_step, progress.tokens + tokens)
    with _timed(times, "sync"):
        pushed = parts.push_weights(after.step)
    sampler.allow(after.step)
    console.phase("record")
    # 9. the record
    if config.tracking.rollouts:
        job.run.save_rollouts(after.step, groups, token_columns(batch, advantage, report))
    counters = {"step": after.step, "rollouts/total": after.rollouts, "tokens/total": after.tokens}
    speed = time_metrics(spent, times, tokens)
    return after, {**counters, **metrics, **report.metrics, **pushed, **speed}


def _save(job: _Job, progress: Progress) -> None:
    job.console.phase("save")
    saved = save_checkpoint(job.run.checkpoints, job.parts.learner, job.parts.tokenizer, progress)
    job.console.checkpoint(saved.folder, progress.rollouts)
    rotate(job.run, job.parts.config, job.console.say)


def _is_milestone(config: Config, progress: Progress) -> bool:
    return progress.rollouts % config.checkpoint_every == 0 or progress.rollouts >= config.total_rollouts


def _resume_point(config: Config, run: RunDir, say: Callable[[str], None] = lambda line: None) -> Checkpoint | None:
    run.refuse_changes(config)
    found = newest_checkpoint(run.checkpoints, say)
    if found is None:
        say(f"note       {run.path} has no checkpoint yet: it begins again at step 0")
    return found


@contextmanager
def _timed(times: dict[str, float], name: str) -> Iterator[None]:
    start = time.perf_counter()
    yield
    times[name] = time.perf_counter() - start
