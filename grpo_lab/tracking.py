"""The optional trackers, Weights & Biases and TensorBoard. metrics.jsonl is written whether or not one is on.

A tracker never stops a run: each works in a thread of its own, and what goes wrong there is one line for the user.
"""

from __future__ import annotations

import json
import os
import queue
import re
import threading
import uuid
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from dataclasses import astuple, dataclass, fields
from importlib.util import find_spec
from pathlib import Path
from types import TracebackType
from typing import Any, Protocol

from grpo_lab.config import Config
from grpo_lab.config.file import dump_yaml
from grpo_lab.errors import ConfigError
from grpo_lab.evaluation.report import draw_run
from grpo_lab.evaluation.samples import Sample, choose_samples
from grpo_lab.run_dir import RunDir
from grpo_lab.storage.scratch import write_whole
from grpo_lab.types import RolloutGroup

STEP = "rollouts/total"
SAMPLES = 24  # completions shown of each evaluation
_WAITING = 2000  # calls a tracker may be behind
_FINISH_S = 60.0  # for the rest to arrive at the end of a run
_INIT_S = 30.0


@dataclass(frozen=True)
class Milestone:
    """An evaluation: `final` is F, floor and gap as they stand; completions; figures as PNG files."""

    rollouts: int
    final: Mapping[str, float]
    samples: Sequence[Sample]
    figures: Sequence[Path]


class TrackerProtocol(Protocol):
    """Where a run is mirrored to. Calls come from one thread, in this order; after an exception only `finish`."""

    name: str

    def start(self) -> str:
        """Connect; returns where the run can be seen."""

    def numbers(self, values: Mapping[str, float], rollouts: int) -> None:
        """Metrics by their logged names, at `rollouts`."""

    def milestone(self, milestone: Milestone) -> None: ...

    def finish(self, failed: bool) -> None:
        """Send the rest and let go of everything. `failed`: the run or the tracker ended with an error."""


def check_trackers(config: Config) -> None:
    """ConfigError when a tracker is asked for whose package is missing."""
    settings = config.tracking
    wanted = [(f"tracking.wandb={settings.wandb}", "wandb")] * (settings.wandb != "disabled")
    wanted += [("tracking.tensorboard=true", "tensorboard")] * settings.tensorboard
    for setting, package in wanted:
        if find_spec(package) is None:
            off = "tracking.tensorboard=false" if package == "tensorboard" else "tracking.wandb=disabled"
            raise ConfigError(
                f"{setting} needs {package}, which is not installed: pip install {package}, or --set {off}"
            )


class Tracker:
    """A context that mirrors a run to the trackers its config asks for; `say` takes a line for the user."""

    def __init__(self, config: Config, run: RunDir, say: Callable[[str], None] = print) -> None:
        check_trackers(config)
        self._run, self._say = run, say
        trackers: list[TrackerProtocol] = []
        if config.tracking.wandb != "disabled":
            trackers.append(WandbTracker(config, run))
        if config.tracking.tensorboard:
            trackers.append(TensorBoardTracker(config, run))
        self._threads = [_Thread(tracker, say) for tracker in trackers]

    def log(self, numbers: Mapping[str, float], rollouts: int) -> None:
        """A row of numbers at `rollouts`."""
        for thread in self._threads:
            thread.do(lambda tracker: tracker.numbers(numbers, rollouts))

    def evaluated(self, numbers: Mapping[str, float], groups: Sequence[RolloutGroup], rollouts: int) -> None:
        """An evaluation's numbers (`Evaluation.flat`), what was sampled for it, and the run's figures with it."""
        if not self._threads:
            return
        self.log(numbers, rollouts)
        figures = [path for path in draw_run(self._run, self._say) if path.suffix == ".png"]
        milestone = Milestone(rollouts, final_numbers(numbers), choose_samples(groups, SAMPLES), figures)
        for thread in self._threads:
            thread.do(lambda tracker: tracker.milestone(milestone))

    def __enter__(self) -> Tracker:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        for thread in self._threads:
            thread.finish(failed=kind is not None)


def final_numbers(flat: Mapping[str, float]) -> dict[str, float]:
    """F, both ends of the floor's bracket and of the gap F - F*, from an evaluation's flat numbers; units of reward."""
    energy, lower, upper = (flat[f"eval/{name}"] for name in ("free_energy", "floor_lower", "floor_upper"))
    return {
        "final/free_energy": energy,
        "final/floor_lower": lower,
        "final/floor_upper": upper,
        "final/gap_lower": energy - upper,
        "final/gap_upper": energy - lower,
    }


class _Thread:
    """A tracker in its own thread: the run neither waits for it nor ends with it."""

    def __init__(self, tracker: TrackerProtocol, say: Callable[[str], None]) -> None:
        self._tracker, self._say, self._is_on = tracker, say, True
        self._calls: queue.Queue[Callable[[TrackerProtocol], None] | None] = queue.Queue(_WAITING)
        self._thread = threading.Thread(target=self._work, name=f"tracker-{tracker.name}", daemon=True)
        self._thread.start()

    def do(self, call: Callable[[TrackerProtocol], None]) -> None:
        """Have the tracker do this after all that went before; nothing once it is off."""
        if self._is_on:
            try:
                self._calls.put_nowait(call)
            except queue.Full:
                self._give_up(f"it is {_WAITING:,} calls behind")

    def finish(self, failed: bool) -> None:
        """Let the tracker end; waits a minute at most."""
        self.do(lambda tracker: tracker.finish(failed))
        if self._is_on:
            self._calls.put(None)
            self._thread.join(_FINISH_S)
            if self._thread.is_alive():
                self._give_up(f"not all had arrived after {_FINISH_S:.0f} s")

    def _work(self) -> None:
        try:
            self._say(f"tracking     {self._tracker.start()}")
            while (call := self._calls.get()) is not None:
                call(self._tracker)
        except Exception as error:  # of any kind: a tracker's trouble is never the run's
            self._give_up(" ".join(str(error).split())[:200] or type(error).__name__)
            with suppress(Exception):
                self._tracker.finish(failed=True)

    def _give_up(self, reason: str) -> None:
        if self._is_on:
            self._is_on = False
            self._say(f"warning      {self._tracker.name} is off: {reason}; metrics.jsonl goes on with every number")


class WandbTracker:
    """Weights & Biases. A resumed run goes on under the same id, kept in RUN/tracking.json; all files are in RUN/wandb."""

    name = "wandb"

    def __init__(self, config: Config, run: RunDir) -> None:
        self._config, self._folder = config, run.path.resolve()
        self._run: Any = None

    def start(self) -> str:
        files, mode = self._folder / "wandb", self._config.tracking.wandb
        files.mkdir(exist_ok=True)  # else wandb would take a hidden or a temporary folder
        os.environ.setdefault("WANDB_DATA_DIR", str(files))
        os.environ.setdefault("WANDB_CACHE_DIR", str(files / "cache"))
        import wandb

        wandb.setup(wandb.Settings(silent=True))
        if mode == "online" and not wandb.login(prompt=False, verify=False):
            raise RuntimeError("no API key: set WANDB_API_KEY or run `wandb login`")
        self._run = wandb.init(
            project=self._config.tracking.wandb_project,
            id=wandb_id(self._folder),
            name=self._folder.name,
            dir=str(self._folder),
            mode=mode,
            resume="allow",
            config=self._config.model_dump(mode="json"),
            allow_val_change=True,
            settings=wandb.Settings(silent=True, console="off", init_timeout=_INIT_S, finish_timeout=_FINISH_S / 2),
        )
        self._run.define_metric(STEP)
        self._run.define_metric("*", step_metric=STEP)
        if mode == "online":
            return f"wandb {self._run.url}"
        return f"wandb offline; later: wandb sync {Path(self._run.dir).parent}"

    def numbers(self, values: Mapping[str, float], rollouts: int) -> None:
        self._run.log({**values, STEP: rollouts})

    def milestone(self, milestone: Milestone) -> None:
        import wandb

        columns = [field.name for field in fields(Sample)]
        table = wandb.Table(columns=columns, data=[list(astuple(sample)) for sample in milestone.samples])
        images = {f"figures/{path.stem}": wandb.Image(str(path)) for path in milestone.figures}
        self._run.log({"eval/samples": table, **images, STEP: milestone.rollouts})
        self._run.summary.update(dict(milestone.final))

    def finish(self, failed: bool) -> None:
        import wandb

        try:
            if self._run:
                self._run.finish(exit_code=int(failed))
        finally:
            wandb.teardown()  # it would do so when the process ends, with a traceback where its service is gone


def wandb_id(folder: Path) -> str:
    """The id of the run in `folder`: made once, with the folder's name in it, and kept in its tracking.json."""
    file = folder / "tracking.json"
    if not file.is_file():
        name = re.sub(r"[^A-Za-z0-9_.-]", "_", folder.name)[:48]
        write_whole(file, json.dumps({"wandb_id": f"{name}-{uuid.uuid4().hex[:12]}"}))
    return str(json.loads(file.read_text())["wandb_id"])


class TensorBoardTracker:
    """Event files in RUN/tensorboard: scalars by our names at rollouts, figures, completions as text.

    A resumed run hides what was written after its checkpoint.
    """

    name = "tensorboard"

    def __init__(self, config: Config, run: RunDir) -> None:
        self._config, self._folder = config, run.path / "tensorboard"
        self._writer: Any = None
        rows = run.read_metrics()
        self._first = int(rows[-1][STEP]) + 1 if rows else 1

    def start(self) -> str:
        from torch.utils.tensorboard import SummaryWriter

        self._writer = SummaryWriter(str(self._folder), purge_step=self._first, flush_secs=20)
        self._writer.add_text("config", _indented(dump_yaml(self._config)), 0)
        return f"tensorboard --logdir {self._folder}"

    def numbers(self, values: Mapping[str, float], rollouts: int) -> None:
        for name, value in values.items():
            self._writer.add_scalar(name, value, rollouts)

    def milestone(self, milestone: Milestone) -> None:
        from matplotlib.image import imread

        for path in milestone.figures:
            self._writer.add_image(f"figures/{path.stem}", imread(path), milestone.rollouts, dataformats="HWC")
        for name, value in milestone.final.items():
            self._writer.add_scalar(name, value, milestone.rollouts)
        texts = (
            f"**{s.problem}: {s.outcome}**, reward {s.reward:g}, answer `{s.extracted}`, wanted `{s.wanted}`, "
            f"{s.tokens} tokens\n\n{_indented(s.text)}"
            for s in milestone.samples
        )
        self._writer.add_text("eval/samples", "\n\n".join(texts), milestone.rollouts)
        self._writer.flush()

    def finish(self, failed: bool) -> None:
        if self._writer:
            self._writer.close()


def _indented(text: str) -> str:
    """Markdown that shows `text` as it is."""
    return "\n".join(f"    {line}" for line in text.splitlines())
