"""Trackers: what they hold equals metrics.jsonl, a resumed run goes on, and their trouble is one line."""

import json
import os
import signal
import threading
import time
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import matplotlib

matplotlib.use("Agg")
import numpy as np
import psutil
import pytest

from grpo_lab import tracking
from grpo_lab.config import Config
from grpo_lab.config.file import build_config
from grpo_lab.errors import ConfigError
from grpo_lab.evaluation.samples import choose_samples
from grpo_lab.run_dir import RunDir
from grpo_lab.tracking import Milestone, Tracker, check_trackers, final_numbers, wandb_id
from grpo_lab.types import Completion, Grade, Problem, RolloutGroup

FLAT = {"eval/reward": 0.5, "eval/free_energy": -0.4, "eval/floor_lower": -0.9, "eval/floor_upper": -0.6}
KEY = "0123456789abcdef" * 2 + "01234567"


@pytest.fixture(autouse=True)
def wandb_of_nobody(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """No key, no settings, no service of this user or of another test."""
    for name in [name for name in os.environ if name.startswith("WANDB_")]:
        monkeypatch.delenv(name)
    monkeypatch.setenv("HOME", str(tmp_path / "home"))
    monkeypatch.setenv("NETRC", str(tmp_path / "netrc"))
    monkeypatch.setenv("WANDB_DATA_DIR", "x")  # so that what the tracker sets is taken back
    monkeypatch.setenv("WANDB_CACHE_DIR", "x")
    monkeypatch.delenv("WANDB_DATA_DIR")
    monkeypatch.delenv("WANDB_CACHE_DIR")


def make_run(tmp_path: Path, **settings: object) -> tuple[Config, RunDir]:
    config = build_config(
        {"output_dir": str(tmp_path / "runs"), "run_name": "a run: 1", "tracking": settings}, source="test"
    )
    return config, RunDir.create(config)


def row(step: int, reward: float) -> dict[str, float]:
    return {"step": step, "rollouts/total": step * 8, "reward/mean": reward, "loss": -1.5e-9, "perf/overlap": 0.0}


def groups() -> list[RolloutGroup]:
    outcomes = ("correct", "wrong", "truncated", "unparsable")
    grades = tuple(Grade(float(o == "correct"), o, None if o == "unparsable" else "4") for o in outcomes)
    texts = ("#### 4", "<script>alert(1)</script> | `5`", "# heading\n\nno end", "")
    completions = tuple(Completion((1, 2), (-1.0, -1.0), text, "stop", 0) for text in texts)
    return [RolloutGroup(Problem(f"p{n}", (), "4"), (1,), completions, grades) for n in range(3)]


def scalars(folder: Path) -> dict[str, dict[int, float]]:
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    events = EventAccumulator(str(folder), size_guidance={"scalars": 0})
    events.Reload()
    return {tag: {e.step: e.value for e in events.Scalars(tag)} for tag in events.Tags()["scalars"]}


def test_tensorboard_equals_metrics_jsonl_and_a_resumed_run_hides_later_steps(tmp_path: Path) -> None:
    config, run = make_run(tmp_path, tensorboard=True)
    said: list[str] = []
    with Tracker(config, run, said.append) as tracker:
        for step in (1, 2, 3):
            run.append_metrics(row(step, 0.1 * step))
            tracker.log(row(step, 0.1 * step), step * 8)
    run.rewind(1)  # as if the newest checkpoint were of step 1
    with Tracker(config, run, said.append) as tracker:
        run.append_metrics(row(2, 0.7))
        tracker.log(row(2, 0.7), 16)
        tracker.evaluated(FLAT, groups(), 16)
    found = scalars(run.path / "tensorboard")
    for name in row(1, 0):
        wanted = {r["rollouts/total"]: np.float32(r[name]) for r in run.read_metrics()}
        assert {step: np.float32(value) for step, value in found[name].items()} == wanted
    assert found["eval/free_energy"] == {16: pytest.approx(-0.4)}
    assert found["final/gap_upper"] == {16: pytest.approx(0.5)}
    assert said == [f"tracking     tensorboard --logdir {run.path / 'tensorboard'}"] * 2


def test_tensorboard_shows_figures_and_texts(tmp_path: Path) -> None:
    from matplotlib.image import imsave
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    config, run = make_run(tmp_path, tensorboard=True)
    imsave(tmp_path / "free_energy.png", np.zeros((12, 20, 3)))
    shown = tracking.TensorBoardTracker(config, run)
    shown.start()
    shown.milestone(Milestone(8, final_numbers(FLAT), choose_samples(groups(), 4), [tmp_path / "free_energy.png"]))
    shown.finish(False)
    events = EventAccumulator(str(run.path / "tensorboard"))
    events.Reload()
    (image,) = events.Images("figures/free_energy")
    assert (image.step, image.width, image.height) == (8, 20, 12)
    (text,) = events.Tensors("eval/samples/text_summary")
    markdown = text.tensor_proto.string_val[0].decode()
    assert "**p0: wrong**, reward 0, answer `4`" in markdown and "\n    # heading\n" in markdown
    assert "method: grpo" in events.Tensors("config/text_summary")[0].tensor_proto.string_val[0].decode()


def records(file: Path) -> list[Any]:
    """Every record that wandb keeps for its upload: 7 bytes, then LevelDB's log of blocks of 32 KiB."""
    from wandb.proto import wandb_internal_pb2

    data, place, whole, found = file.read_bytes(), 7, b"", []
    while place + 7 <= len(data):
        left = 32768 - place % 32768
        length, kind = int.from_bytes(data[place + 4 : place + 6], "little"), data[place + 6]
        if left < 7 or kind == 0:  # a block's filling
            place += left
            continue
        whole += data[place + 7 : place + 7 + length]
        place += 7 + length
        if kind in (1, 4):  # whole, or the last part
            found.append(wandb_internal_pb2.Record.FromString(whole))
            whole = b""
    return found


def test_wandb_offline_keeps_everything_below_the_run_under_one_id(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("WANDB_API_KEY", KEY)
    config, run = make_run(tmp_path, wandb="offline")
    said: list[str] = []
    for step in (1, 2):
        with Tracker(config, run, said.append) as tracker:
            tracker.log(row(step, 0.1 * step), step * 8)
            tracker.evaluated(FLAT, groups(), step * 8)
        time.sleep(1.1)  # wandb names its folders by the second
    assert len(said) == 2 and all(line.startswith("tracking     wandb offline") for line in said)
    name = json.loads((run.path / "tracking.json").read_text())["wandb_id"]
    files = sorted(run.path.glob(f"wandb/offline-run-*-{name}/run-{name}.wandb"))
    assert len(files) == 2
    for step, file in enumerate(files, start=1):
        history: dict[str, Any] = {}
        summary: dict[str, Any] = {}
        metrics, configured = set(), {}
        for record in records(file):
            for item in record.history.item:
                history["/".join(item.nested_key) or item.key] = json.loads(item.value_json)
            for item in record.summary.update:
                summary["/".join(item.nested_key) or item.key] = json.loads(item.value_json)
            for item in record.run.config.update:
                configured[item.key] = json.loads(item.value_json)
            metrics |= {record.metric.name or record.metric.glob_name}
        assert {key: history[key] for key in row(step, 0)} == row(step, 0.1 * step)
        assert history["eval/free_energy"] == -0.4 and history["eval/samples/nrows"] == 12
        assert summary["final/gap_lower"] == pytest.approx(0.2) and {"*", "rollouts/total"} <= metrics
        assert configured["method"] == "grpo"
        (table,) = file.parent.glob("files/media/table/eval/samples*.json")
        assert ["p0", "4", "unparsable", 0, "", 2, ""] in json.loads(table.read_text())["data"]
    assert not any(KEY.encode() in f.read_bytes() for f in run.path.rglob("*") if f.is_file())
    outside = [path for path in tmp_path.rglob("*") if path.is_file() and run.path not in path.parents]
    assert outside == [] and capfd.readouterr() == ("", "")


def test_ids_are_kept_and_differ_between_folders_of_one_name(tmp_path: Path) -> None:
    folders = [tmp_path / "one/a b", tmp_path / "two/a b"]
    for folder in folders:
        folder.mkdir(parents=True)
    ids = [wandb_id(folder) for folder in folders]
    assert ids == [wandb_id(folder) for folder in folders] and ids[0] != ids[1] and ids[0].startswith("a_b-")


def test_online_without_a_key_is_one_line(tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> None:
    config, run = make_run(tmp_path, wandb="online")
    said: list[str] = []
    with Tracker(config, run, said.append) as tracker:
        tracker.log(row(1, 0.1), 8)
    assert len(said) == 1 and "wandb is off: no API key" in said[0] and "wandb login" in said[0]
    assert capfd.readouterr() == ("", "")


def test_a_dead_service_is_one_line_and_no_wait(tmp_path: Path) -> None:
    config, run = make_run(tmp_path, wandb="offline")
    said: list[str] = []
    with Tracker(config, run, said.append) as tracker:
        tracker.log(row(1, 0.1), 8)
        deadline = time.monotonic() + 20
        while not said and time.monotonic() < deadline:
            time.sleep(0.05)
        time.sleep(0.3)
        (service,) = [p for p in psutil.Process().children(recursive=True) if "wandb-core" in p.name()]
        os.kill(service.pid, signal.SIGKILL)
        start = time.monotonic()
        for step in range(2, 40):
            tracker.log(row(step, 0.1), step * 8)
        assert time.monotonic() - start < 0.5
        time.sleep(0.5)
    assert time.monotonic() - start < 10
    assert len(said) == 2 and "wandb is off" in said[1]


class Stuck:
    """A tracker that never comes back, or that raises."""

    name = "stuck"

    def __init__(self, error: Exception | None = None) -> None:
        self._error, self.leave = error, threading.Event()

    def start(self) -> str:
        if self._error:
            raise self._error
        return "stuck"

    def numbers(self, values: Mapping[str, float], rollouts: int) -> None:
        self.leave.wait(30)

    def milestone(self, milestone: Milestone) -> None: ...

    def finish(self, failed: bool) -> None: ...


def test_a_tracker_that_hangs_or_fails_holds_nothing_up(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(tracking, "_FINISH_S", 0.2)
    monkeypatch.setattr(tracking, "_WAITING", 3)
    said: list[str] = []
    stuck = Stuck()
    start = time.monotonic()
    for hanging, calls in ((stuck, 1), (stuck, 9), (Stuck(OSError("disk\nfull")), 2)):
        thread = tracking._Thread(hanging, said.append)
        for _ in range(calls):
            thread.do(lambda tracker: tracker.numbers({}, 0))
        thread.finish(failed=False)
    stuck.leave.set()
    assert time.monotonic() - start < 5
    warnings = [line for line in said if line.startswith("warning")]
    assert [line.split(";")[0].split(": ", 1)[1] for line in warnings] == [
        "not all had arrived after 0 s",
        "it is 3 calls behind",
        "disk full",
    ]


@pytest.mark.parametrize(("key", "value"), [("wandb", "offline"), ("tensorboard", True)])
def test_a_missing_package_is_refused(key: str, value: object, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    config, _ = make_run(tmp_path, **{key: value})
    check_trackers(config)
    monkeypatch.setattr(tracking, "find_spec", lambda name: None)
    with pytest.raises(ConfigError, match=f"pip install {key}"):
        check_trackers(config)


def test_samples_show_every_outcome() -> None:
    chosen = choose_samples(groups(), 6)
    assert [s.outcome for s in chosen] == ["correct", "correct", "truncated", "unparsable", "wrong", "wrong"] or [
        s.outcome for s in chosen
    ].count("correct") == 2
    assert {s.outcome for s in chosen} == {"correct", "wrong", "truncated", "unparsable"} and chosen[0].problem == "p0"
    assert choose_samples([], 3) == []
