"""Is resuming exact? A short run of a config, undisturbed, beside the same run killed with SIGKILL and resumed."""

from __future__ import annotations

import hashlib
import json
import shutil
import time
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from grpo_lab.config import Config, expand_path
from grpo_lab.config.file import build_config, dump_yaml
from grpo_lab.console import Console
from grpo_lab.errors import ConfigError, RunError
from grpo_lab.learner.checkpoint import newest_checkpoint, saved_checkpoints
from grpo_lab.run_dir import RunDir
from grpo_lab.verification.breaking import Moment, Outcome, run_watched
from grpo_lab.verification.kill_moments import Planned, choose_moments

Facts = dict[str, Any]

_KILLED, _CONFIG = -9, "shortened.yaml"


@dataclass(frozen=True)
class Comparison:
    """One thing compared between two runs: how much of it there was, and the first difference, "" where all is equal."""

    what: str
    count: str
    difference: str


def shortened(config: Config, steps: int, given: Collection[str] = ()) -> Config:
    """The config of a run of `steps` steps that saves each (unless checkpoint_every is among the keys `given` by hand).

    Its bank is its own and nothing is sent to wandb. ConfigError where resuming is not exact by design.
    """
    if config.rollout.max_staleness:
        raise ConfigError(
            f"rollout.max_staleness={config.rollout.max_staleness}: such a run follows its workers' timing, so no resume of "
            "it is exact; add --set rollout.max_staleness=0 --set rollout.in_flight=wait to verify the rest"
        )
    step = config.rollouts_per_step
    tree = config.model_dump(mode="json")
    tree |= {"total_rollouts": steps * step, "run_name": None}
    if "checkpoint_every" not in given:
        tree["checkpoint_every"] = step
    tree["tracking"]["wandb"] = "disabled"
    tree["evaluation"]["bank_dir"] = None
    return build_config(tree, source="the shortened run")


@dataclass(frozen=True)
class Verification:
    """What `verify` did, everything of it in `folder`: each kill, each process of the killed run, each thing compared."""

    folder: Path
    kills: list[Planned]
    outcomes: list[Outcome]
    comparisons: list[Comparison]

    @property
    def is_exact(self) -> bool:
        return not any(comparison.difference for comparison in self.comparisons)


def verify(config: Config, kills: int, console: Console) -> Verification:
    """Run `config` undisturbed, then with `kills` kills at moments seeded by the run's seed, and compare the two.

    Everything stays in a new folder below `output_dir`. ConfigError when that cannot be made or the config does not start,
    RunError when one of the runs fails by itself.
    """
    folder = new_folder(config)
    console.say(f"verify     {folder}")
    if config.rollout.has_workers:
        console.say("note       vLLM servers batch what arrives together: rounding alone can make such runs differ")
    calm, broken = WatchedRun(folder, "undisturbed"), WatchedRun(folder, "killed")
    begin = time.monotonic()
    operations = calm.to_the_end().operations
    steps = config.total_rollouts // config.rollouts_per_step
    console.say(
        f"run        undisturbed: {steps} steps, {len(operations)} file operations, {time.monotonic() - begin:.0f} s"
    )
    moments = choose_moments(operations, kills, config.seed)
    if len(moments) < kills:
        console.say(f"note       the run has {len(moments)} different moments to kill it at, not {kills}")
    outcomes = kill_and_resume(broken, moments, console)
    results = compare(RunDir.open(calm.path), RunDir.open(broken.path))
    for result in results:
        verdict = f"DIFFERENT: {result.difference}" if result.difference else "equal"
        console.say(f"{result.what:10} {result.count}: {verdict}")
    return Verification(folder, moments, outcomes, results)


def new_folder(config: Config) -> Path:
    """`output_dir`/verify-resume-<time>, with the config of both runs. ConfigError when it cannot be made."""
    folder = Path(expand_path(config.output_dir)).resolve() / time.strftime("verify-resume-%Y%m%d-%H%M%S")
    try:
        folder.mkdir(parents=True)
    except OSError as error:
        raise ConfigError(
            f"cannot create {str(folder)!r}: {error.strerror}; set output_dir to a writable folder"
        ) from None
    own = config.model_copy(update={"output_dir": str(folder)})
    (folder / _CONFIG).write_text(dump_yaml(own))
    return folder


@dataclass(frozen=True)
class WatchedRun:
    """One of the two runs, in `folder`/`name`; its output goes to `folder`/`name`.log."""

    folder: Path
    name: str

    @property
    def path(self) -> Path:
        return self.folder / self.name

    def go(self, moment: Moment | None = None) -> Outcome:
        """Start it, or resume it where there is something to resume, up to `moment` or its end. RunError when it fails."""
        arguments = ["train", "--resume", str(self.path)]
        if not (self.path / "config.yaml").is_file():  # killed before it began: nothing is in the folder
            shutil.rmtree(self.path, ignore_errors=True)
            arguments = ["train", "--config", str(self.folder / _CONFIG), "--name", self.name]
        log = self.folder / f"{self.name}.log"
        outcome = run_watched(self.path, arguments, log, moment)
        if outcome.code not in (0, _KILLED):
            said = [line for line in log.read_text(errors="replace").splitlines() if line.strip()] or ["no output"]
            kind = ConfigError if outcome.code == 2 else RunError
            reason = f"exit code {outcome.code}: {said[-1].removeprefix('grpo-lab: ')}"
            raise kind(f"the {self.name} run ended with {reason} (all it said: {log})")
        return outcome

    def to_the_end(self) -> Outcome:
        """Start or resume it, and let it end. RunError when it does not."""
        outcome = self.go()
        if outcome.code:
            raise RunError(f"the {self.name} run was killed by somebody else, perhaps for its memory")
        return outcome


def kill_and_resume(run: WatchedRun, moments: Sequence[Planned], console: Console) -> list[Outcome]:
    """Run and kill at each moment in turn, then let it end; the outcome of every process. RunError when one fails by itself."""
    outcomes: list[Outcome] = []
    for number, planned in enumerate(moments, 1):
        outcome = run.go(planned.moment)
        outcomes.append(outcome)
        if outcome.code != _KILLED:
            console.say(f"kill {number}/{len(moments)}   {planned.kind}: never came, the run has ended")
            return outcomes
        after = f"{1000 * planned.moment.wait_s:.0f} ms after" if planned.moment.wait_s else "at"
        where = f"in {outcome.where}" if outcome.where else f"{after} {planned.moment.operation.partition(' ')[2]}"
        console.say(f"kill {number}/{len(moments)}   {planned.kind}, {where}; {_what_is_saved(run.path)}")
    return [*outcomes, run.to_the_end()]


def _what_is_saved(path: Path) -> str:
    if not (path / "config.yaml").is_file():
        return "it had not begun: started again"
    newest = newest_checkpoint(path / "checkpoints")
    return f"resumed after step {newest.progress.step}" if newest else "nothing saved yet: resumed from the start"


def compare(one: RunDir, other: RunDir) -> list[Comparison]:
    """What must be equal between two runs of one config, each with its first difference."""
    kinds: tuple[tuple[str, str, Callable[[RunDir], Facts]], ...] = (
        ("weights", "files of checkpoints (sha256 of model, optimizer, state)", _checkpoint_facts),
        ("metrics", "numbers of metrics.jsonl, all but time/* and perf/*", _metric_facts),
        ("rollouts", "columns of rollout records, token ids among them", _rollout_facts),
        ("evaluation", "numbers and files of evaluations", _evaluation_facts),
        ("files", "names of files, none left half-written", _file_facts),
    )
    found = []
    for what, unit, facts in kinds:
        first, second = facts(one), facts(other)
        count = f"{len(first.keys() | second.keys()):,} {unit}" if first or second else "not kept"
        found.append(Comparison(what, count, _first_difference(first, second)))
    return found


def _first_difference(one: Mapping[str, Any], other: Mapping[str, Any]) -> str:
    keys = [key for key in {**one, **other} if one.get(key) != other.get(key)]
    if not keys:
        return ""
    before, after = (str(facts.get(keys[0], "absent"))[:60] for facts in (one, other))
    return f"{keys[0]}: {before} undisturbed, {after} killed (and {len(keys) - 1:,} more)"


def _checkpoint_facts(run: RunDir) -> Facts:
    """sha256 of every file of every complete checkpoint, verified."""
    facts: Facts = {}
    for checkpoint in reversed(list(saved_checkpoints(run.checkpoints))):
        files = json.loads((checkpoint.folder / "manifest.json").read_text())["files"]
        facts |= {f"{checkpoint.folder.name}/{name}": entry["sha256"] for name, entry in files.items()}
    return facts


def _metric_facts(run: RunDir) -> Facts:
    return {
        f"line {number}, step {row['step']}, {name}": value
        for number, row in enumerate(run.read_metrics(), 1)
        for name, value in row.items()
        if not name.startswith(("time/", "perf/"))
    }


def _rollout_facts(run: RunDir) -> Facts:
    """A digest of every column, token ids first."""
    import pyarrow.parquet as pq

    facts: Facts = {}
    for file in run.rollout_files().values():
        table = pq.read_table(file)
        for name in sorted(table.column_names, key=lambda name: name != "token_ids"):
            digest = hashlib.sha256(repr(table[name].to_pylist()).encode()).hexdigest()
            facts[f"{file.name}, {name}"] = digest
    return facts


def _evaluation_facts(run: RunDir) -> Facts:
    facts: Facts = {}
    for file in sorted(run.evaluations.glob("*")):
        if file.suffix == ".json":
            facts |= {f"{file.name}, {name}": value for name, value in json.loads(file.read_text()).items()}
        else:
            facts[file.name] = hashlib.sha256(file.read_bytes()).hexdigest()
    return facts


def _file_facts(run: RunDir) -> Facts:
    """The files of the run, but for those of trackers and libraries, which each process has its own of."""
    names = (path.relative_to(run.path) for path in sorted(run.path.rglob("*")))
    return {str(name): "there" for name in names if name.parts[0] not in ("tensorboard", "wandb", "logs")}
