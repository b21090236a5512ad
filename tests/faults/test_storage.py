"""Full and read-only disks, damaged files, two processes in one run, clocks that jump: nothing that was saved is lost."""

import fcntl
import json
import os
import re
import resource
import shutil
import signal
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest
from conftest import comparable_metrics, write_tiny_config
from learner_cases import make_groups, make_learner
from transformers import AutoTokenizer, PreTrainedTokenizerBase

from grpo_lab.cli import main
from grpo_lab.config import Config
from grpo_lab.config.file import load_config
from grpo_lab.console import Console
from grpo_lab.errors import ConfigError, RunError
from grpo_lab.evaluation.kept import read_evaluations
from grpo_lab.evaluation.report import draw_run
from grpo_lab.learner.checkpoint import Progress, load_checkpoint, newest_checkpoint, save_checkpoint
from grpo_lab.learner.collate import collate
from grpo_lab.learner.learner import Learner
from grpo_lab.learner.weights import export_weights
from grpo_lab.objective.advantages import batch_advantages
from grpo_lab.objective.axes import resolve
from grpo_lab.run_dir import RunDir
from grpo_lab.storage.records import read_groups, write_groups
from grpo_lab.storage.run_lock import FILE, run_lock
from grpo_lab.storage.scratch import remove_folder, write_whole
from grpo_lab.train import train

LARGE = "training/state.safetensors"  # 50 MB for the tiny model, its largest file
Damage = Callable[[Path], None]


@contextmanager
def no_file_above(size: int) -> Iterator[None]:
    """The system refuses to let a file grow beyond `size` bytes: "File too large"."""
    soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (size, hard))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))


@contextmanager
def mounted(folder: Path, *options: str) -> Iterator[Path]:
    """`folder` as a file system of its own; the test is skipped where mounting is not allowed."""
    folder.mkdir(exist_ok=True)
    if (
        shutil.which("mount") is None
        or subprocess.run(["mount", *options, str(folder)], capture_output=True).returncode
    ):
        pytest.skip("mounting a file system is not allowed here")
    try:
        yield folder
    finally:
        subprocess.run(["umount", "--lazy", str(folder)], check=True)  # mapped files keep it busy


@contextmanager
def all_but(disk: Path, free: int) -> Iterator[None]:
    """A file that leaves `free` bytes of the disk."""
    filler = disk / "filler"
    with filler.open("wb") as file:
        os.posix_fallocate(file.fileno(), 0, shutil.disk_usage(disk).free - free)
    try:
        yield
    finally:
        filler.unlink()


def command(capfd: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch, *words: object) -> tuple[int, str]:
    """`grpo-lab WORDS` in this process: its exit status and what it says on standard error."""
    monkeypatch.setattr(sys, "argv", ["grpo-lab", *map(str, words)])
    capfd.readouterr()
    with pytest.raises(SystemExit) as stopped:
        main()
    return int(stopped.value.code or 0), capfd.readouterr().err


@pytest.fixture(scope="module")
def learner(tiny_model: Path) -> Learner:
    """A learner after its first update, so that it has moments to save."""
    learner = make_learner(tiny_model)
    batch = learner.prepare(collate(make_groups()))
    learner.update(batch, batch_advantages(batch, resolve(Config(method="grpo"))), 0)
    return learner


@pytest.fixture(scope="module")
def tokenizer(tiny_model: Path) -> PreTrainedTokenizerBase:
    return AutoTokenizer.from_pretrained(tiny_model)


@pytest.fixture(scope="module")
def saved(learner: Learner, tokenizer: PreTrainedTokenizerBase, module_path: Path) -> Path:
    """One real checkpoint."""
    return save_checkpoint(module_path, learner, tokenizer, Progress(1, 8, 9)).folder


@pytest.fixture(scope="module")
def settings(tiny_model: Path, module_path: Path) -> Config:
    sets = ["evaluation.problems=2", "evaluation.samples=2"]
    return load_config(write_tiny_config(module_path / "tiny.yaml", tiny_model, module_path / "runs"), sets)


@pytest.fixture(scope="module")
def finished(settings: Config) -> RunDir:
    """A run of three steps that keeps its newest checkpoint and every second, made while the clock runs backwards."""
    config = settings.model_copy(update={"total_rollouts": 24, "keep_last": 1, "keep_every": 16})
    now = iter(range(10**9, 0, -1000))
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(time, "time", lambda: float(next(now)))
        run = train(config, Console())
    assert run
    return run


@pytest.fixture
def run(finished: RunDir, tmp_path: Path) -> RunDir:
    """A copy of the finished run in which a test may replace files (they are links), but not write into them."""
    ignore = shutil.ignore_patterns(FILE)
    return RunDir(Path(shutil.copytree(finished.path, tmp_path / "copy", ignore=ignore, copy_function=os.link)))


# -- a run as a whole ------------------------------------------------------------------------------------------------


def test_a_run_keeps_what_it_should(finished: RunDir) -> None:
    assert list(finished.checkpoint_folders()) == [16, 24]
    assert [row["rollouts"] for row in read_evaluations(finished)] == [0, 8, 16, 24]
    rows = finished.read_metrics()
    assert [row["step"] for row in rows] == [1, 2, 3]
    assert all(value >= 0 for row in rows for key, value in row.items() if key.startswith("time/"))
    assert not [path for path in finished.path.rglob(".*") if path.name != FILE]


def test_a_full_disk_stops_a_run_that_then_goes_on(
    finished: RunDir,
    settings: Config,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capfd: pytest.CaptureFixture[str],
) -> None:
    """One line, exit status 1, the checkpoint before it intact; after room is made the run ends as if nothing had been."""
    with mounted(tmp_path / "disk", "-t", "tmpfs", "-o", "size=400m", "tmpfs") as disk:
        path = disk / "run"
        evaluation = settings.evaluation.model_copy(update={"enabled": False})
        sizes = {"output_dir": str(disk), "total_rollouts": 8, "evaluation": evaluation}
        train(settings.model_copy(update=sizes), Console())
        with all_but(disk, free=40 << 20):  # the model fits, the optimizer's moments do not
            code, error = command(capfd, monkeypatch, "train", "--resume", path, "--set", "total_rollouts=24")
        assert code == 1 and "Traceback" not in error
        assert re.search(
            r"cannot write .*rollouts_00000016: No space left on device; .*--resume", error.splitlines()[-1]
        )
        assert [path.name for path in (path / "checkpoints").iterdir()] == ["rollouts_00000008"]
        load_checkpoint(path / "checkpoints/rollouts_00000008")
        code, error = command(capfd, monkeypatch, "train", "--resume", path, "--set", "total_rollouts=24")
        assert code == 0, error
        assert comparable_metrics(path) == comparable_metrics(finished.path)
        name = f"checkpoints/rollouts_00000024/{LARGE}"
        assert (path / name).read_bytes() == (finished.path / name).read_bytes()


# -- no room ---------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("fails", ["model.safetensors", "tokenizer.json", LARGE])
def test_no_room_for_a_checkpoint(
    saved: Path, learner: Learner, tokenizer: PreTrainedTokenizerBase, tmp_path: Path, fails: str
) -> None:
    """Each library has its own error for it: safetensors, tokenizers and Python."""
    model = (saved / "model.safetensors").stat().st_size
    room = {"model.safetensors": model // 2, "tokenizer.json": model + (2 << 20), LARGE: model + (40 << 20)}[fails]
    with mounted(tmp_path / "disk", "-t", "tmpfs", "-o", "size=300m", "tmpfs") as disk:
        shutil.copytree(saved, disk / "checkpoints/rollouts_00000008")
        with (
            all_but(disk, room),
            pytest.raises(RunError, match=r"rollouts_00000016: No space left on device; free some"),
        ):
            save_checkpoint(disk / "checkpoints", learner, tokenizer, Progress(2, 16, 18))
        assert [path.name for path in (disk / "checkpoints").iterdir()] == ["rollouts_00000008"]
        found = newest_checkpoint(disk / "checkpoints")
        assert found and found.progress == Progress(1, 8, 9)
        save_checkpoint(disk / "checkpoints", learner, tokenizer, Progress(2, 16, 18))


@pytest.mark.parametrize(("limit", "fails"), [(1 << 20, "model"), (40 << 20, "state")])
def test_a_file_that_may_not_grow(
    learner: Learner, tokenizer: PreTrainedTokenizerBase, tmp_path: Path, limit: int, fails: str
) -> None:
    with no_file_above(limit), pytest.raises(RunError, match="rollouts_00000016: File too large"):
        save_checkpoint(tmp_path, learner, tokenizer, Progress(2, 16, 18))
    assert not list(tmp_path.iterdir())


def test_no_room_for_a_push(learner: Learner, tmp_path: Path) -> None:
    with no_file_above(1 << 20), pytest.raises(RunError, match=r"File too large; .*rollout\.weights_dir"):
        export_weights(learner, tmp_path / "version_1")


def test_a_torn_line_of_metrics_is_rewound(run: RunDir) -> None:
    before = run.metrics_file.read_text()
    shutil.copy(run.metrics_file, run.path / "m")
    os.replace(run.path / "m", run.metrics_file)  # no longer a link to the other run's
    with no_file_above(len(before) + 100), pytest.raises(RunError, match=r"metrics\.jsonl: File too large; .*--resume"):
        run.append_metrics({"step": 5, "text": "x" * 500})
    assert len(run.metrics_file.read_text()) == len(before) + 100
    assert [row["step"] for row in run.read_metrics()] == [1, 2, 3]
    run.rewind(3)
    assert run.metrics_file.read_text() == before and len(run.rollout_files()) == 3
    run.rewind(2)
    assert [row["step"] for row in run.read_metrics()] == [1, 2] and list(run.rollout_files()) == [1, 2]


def test_lines_after_a_torn_one_are_kept(run: RunDir) -> None:
    lines = run.metrics_file.read_bytes().splitlines(keepends=True)
    run.metrics_file.unlink()
    run.metrics_file.write_bytes(lines[0] + b"\0\0\xff\n" + lines[1][:20] + b"\n" + b"".join(lines[2:]))
    assert [row["step"] for row in run.read_metrics()] == [1, 3]


@pytest.mark.parametrize("name", ["evaluations/rollouts_00000008.json", "config.yaml", "rollouts/step_000001.parquet"])
def test_no_room_leaves_the_file_as_it_was(run: RunDir, name: str) -> None:
    file = run.path / name
    before, there = file.read_bytes(), sorted(run.path.rglob("*"))
    with no_file_above(100), pytest.raises(RunError, match=f"{re.escape(str(file))}: File too large"):
        if file.suffix == ".parquet":  # as the reference bank
            write_groups(file, make_groups())
        else:
            write_whole(file, "x" * 1000)
    assert file.read_bytes() == before and sorted(run.path.rglob("*")) == there


def test_no_room_for_a_new_run(settings: Config, tmp_path: Path) -> None:
    config = settings.model_copy(update={"output_dir": str(tmp_path)})
    with no_file_above(100), pytest.raises(RunError, match=r"config\.yaml: File too large"):
        RunDir.create(config)
    assert not list(tmp_path.iterdir())


def test_no_room_for_figures_is_no_reason_to_fail(run: RunDir) -> None:
    shutil.rmtree(run.figures)
    said = list[str]()
    with no_file_above(1000):
        assert draw_run(run, said.append) == []
    assert len(said) == 1 and "File too large" in said[0] and "grpo-lab report" in said[0]
    assert not list(run.figures.iterdir())
    assert draw_run(run, said.append)


# -- not allowed -----------------------------------------------------------------------------------------------------


def test_a_read_only_disk(run: RunDir, settings: Config, tmp_path: Path) -> None:
    before = {path: path.stat().st_mtime_ns for path in run.path.rglob("*")}
    with mounted(tmp_path / "view", "--bind", "-o", "ro", str(tmp_path)) as view:
        inside = RunDir.open(view / "copy")
        with pytest.raises(ConfigError, match=r"cannot write to run .*: Read-only file system"):
            train(inside.config, Console(), inside)
        with pytest.raises(ConfigError, match="is not writable; set it to a folder that can be written to"):
            RunDir.create(settings.model_copy(update={"output_dir": str(view), "run_name": "new"}))
        with pytest.raises(RunError, match="Read-only file system"):
            write_whole(view / "numbers.json", "{}")
    assert {path: path.stat().st_mtime_ns for path in run.path.rglob("*")} == before


def test_a_folder_that_cannot_be(settings: Config, tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    for output in (tmp_path / "file", tmp_path / "file/below"):
        with pytest.raises(ConfigError, match=r"is not a folder; set it to a folder that can be written to"):
            RunDir.create(settings.model_copy(update={"output_dir": str(output)}))


# -- damage ----------------------------------------------------------------------------------------------------------


def cut(path: Path) -> None:
    data = path.read_bytes()
    path.unlink()
    path.write_bytes(data[: len(data) // 2])


def flip(path: Path) -> None:
    data = bytearray(path.read_bytes())
    path.unlink()
    data[-100] ^= 1
    path.write_bytes(bytes(data))


def writing(text: str) -> Damage:
    def damage(path: Path) -> None:
        path.unlink()
        path.write_text(text)

    return damage


def leading_out(path: Path) -> None:
    """A manifest whose sums are right, but of files elsewhere."""
    manifest = json.loads(path.read_text())
    manifest["files"]["../rollouts_00000016/config.json"] = manifest["files"]["config.json"]
    path.unlink()
    path.write_text(json.dumps(manifest))


DAMAGES = [
    ("manifest.json", cut, "manifest.json or training/state.json is damaged"),
    ("manifest.json", Path.unlink, "no manifest.json"),
    ("manifest.json", writing("[]"), "is damaged"),
    ("manifest.json", writing('{"files": {}}'), "does not name training/state.json"),
    ("manifest.json", writing('{"files": ["training/state.json"]}'), "is damaged"),
    ("manifest.json", leading_out, "outside of the folder, '../rollouts_00000016/config.json'"),
    ("model.safetensors", cut, r"model.safetensors is damaged \([\d,]+ bytes instead of [\d,]+\)"),
    ("model.safetensors", flip, r"model.safetensors is damaged \(its sha256 differs\)"),
    ("model.safetensors", Path.unlink, "model.safetensors cannot be read"),
    (LARGE, flip, r"training/state.safetensors is damaged \(its sha256 differs\)"),
    ("training/state.json", cut, "training/state.json is damaged"),
]


@pytest.mark.parametrize(("name", "damage", "message"), DAMAGES)
def test_a_damaged_checkpoint_is_passed_over_and_named(run: RunDir, name: str, damage: Damage, message: str) -> None:
    newest, said = run.checkpoints / "rollouts_00000024", list[str]()
    damage(newest / name)
    with pytest.raises(RunError, match=message):
        load_checkpoint(newest)
    found = newest_checkpoint(run.checkpoints, said.append)
    assert found and found.progress.rollouts == 16
    assert len(said) == 1 and re.search(message, said[0]) and "\n" not in said[0]
    assert "rollouts_00000024" in said[0] and said[0].endswith("rollouts_00000016")


def test_without_a_whole_checkpoint_nothing_is_forgotten(run: RunDir, capfd: pytest.CaptureFixture[str]) -> None:
    shutil.rmtree(run.checkpoints / "rollouts_00000016")
    cut(run.checkpoints / "rollouts_00000024/model.safetensors")
    before = run.metrics_file.read_text()
    with pytest.raises(
        RunError, match=r"no checkpoint in .* is whole: checkpoint rollouts_00000024: model.*start again"
    ):
        train(run.config, Console(), run)
    assert run.metrics_file.read_text() == before and len(run.rollout_files()) == 3
    assert "loading" not in capfd.readouterr().out


def test_a_checkpoint_that_went_is_named_with_those_that_stayed(run: RunDir) -> None:
    with pytest.raises(RunError, match=r"no checkpoint at .*00000008; there are: rollouts_00000016, rollouts_00000024"):
        load_checkpoint(run.checkpoints / "rollouts_00000008")


def test_what_a_killed_process_left_is_removed(run: RunDir) -> None:
    (run.checkpoints / ".partial-rollouts_00000040/training").mkdir(parents=True)
    shutil.copytree(run.checkpoints / "rollouts_00000016", run.checkpoints / ".deleting-rollouts_00000008")
    (run.path / "rollouts/.partial-step_000005.parquet-host-1").write_bytes(b"PAR1")
    found = newest_checkpoint(run.checkpoints)
    assert found and found.progress.rollouts == 24 and len(run.rollout_files()) == 3
    run.rewind(3)
    assert not [path for path in run.path.rglob(".*") if path.name != FILE]
    assert list(run.checkpoint_folders()) == [16, 24]


def test_a_deletion_can_be_killed(run: RunDir, monkeypatch: pytest.MonkeyPatch) -> None:
    """Whatever is gone of its files, the folder has no longer a name that counts."""

    def killed(path: Path, **options: object) -> None:
        if path.exists():
            (path / "model.safetensors").unlink()
            raise KeyboardInterrupt

    monkeypatch.setattr(shutil, "rmtree", killed)
    with pytest.raises(KeyboardInterrupt):
        remove_folder(run.checkpoints / "rollouts_00000016")
    monkeypatch.undo()
    assert list(run.checkpoint_folders()) == [24]
    run.rewind(3)
    assert [path.name for path in run.checkpoints.iterdir()] == ["rollouts_00000024"]


@pytest.mark.parametrize("damage", [cut, writing("")])
def test_damaged_records_are_one_line(run: RunDir, damage: Damage) -> None:
    bank, row = run.evaluations / "reference_bank.parquet", run.evaluation_file(8)
    damage(bank)
    damage(row)
    for read in (lambda: read_groups(bank), lambda: read_evaluations(run)):
        with pytest.raises(RunError, match="damaged"):
            read()


# -- two processes ---------------------------------------------------------------------------------------------------

HOLD = """
import os, sys, time
from pathlib import Path
from grpo_lab.storage.run_lock import run_lock
with run_lock(Path(sys.argv[1]), print):
    child = os.fork() if len(sys.argv) > 2 else -1
    if child:
        print(child, flush=True)
    time.sleep(60)
"""


@contextmanager
def another_process(folder: Path, *words: str) -> Iterator[tuple[subprocess.Popen[str], int]]:
    """A process that holds the run, and the id of its forked child where there is one."""
    with subprocess.Popen([sys.executable, "-c", HOLD, folder, *words], stdout=subprocess.PIPE, text=True) as process:
        assert process.stdout
        child = int(process.stdout.readline())
        try:
            yield process, child
        finally:
            process.kill()
            if child > 0:
                os.kill(child, signal.SIGKILL)


def test_the_second_process_is_refused(
    run: RunDir, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    (run.checkpoints / ".partial-rollouts_00000040").mkdir()  # the first one's, which is saving
    before = {path: path.stat().st_mtime_ns for path in run.path.rglob("*") if path.name != FILE}
    with another_process(run.path) as (process, _):
        code, error = command(capfd, monkeypatch, "train", "--resume", run.path, "--set", "total_rollouts=40")
        started = r"since \d{4}-\d\d-\d\d \d\d:\d\d:\d\d [+-]\d{4}"
        held = rf"in use by process {process.pid} on {re.escape(socket.gethostname())} {started}: .*(wait for|stop)"
        assert code == 2 and error.count("\n") == 1 and re.search(held, error), error
        assert {path: path.stat().st_mtime_ns for path in run.path.rglob("*") if path.name != FILE} == before
        named = run.config.model_copy(update={"output_dir": str(run.path.parent), "run_name": run.path.name})
        with pytest.raises(ConfigError, match=f"in use by process {process.pid}.*choose another name"):
            RunDir.create(named)
        assert load_checkpoint(run.checkpoints / "rollouts_00000024")  # reading needs no lock


@pytest.mark.parametrize("words", [(), ("fork",)])
def test_a_killed_process_holds_nothing(run: RunDir, words: tuple[str, ...]) -> None:
    """Not even where a child of it lives on: a requeued job can start at once."""
    with another_process(run.path, *words) as (process, _):
        process.send_signal(signal.SIGKILL)
        process.wait()
        with run_lock(run.path, pytest.fail):
            pass


def test_a_lock_of_another_machine_gets_time(run: RunDir) -> None:
    """It may have died with its lock, which the file server gives back after a while."""
    said = list[str]()
    with (run.path / FILE).open("w+") as other:
        other.write(json.dumps({"pid": 7, "host": "elsewhere", "since": "2026-01-01 00:00:00 +0000"}))
        other.flush()
        fcntl.flock(other, fcntl.LOCK_EX)
        with (
            pytest.raises(ConfigError, match="process 7 on elsewhere"),
            run_lock(run.path, said.append, patience=0.1),
        ):
            pass
        threading.Timer(0.2, fcntl.flock, (other, fcntl.LOCK_UN)).start()
        with run_lock(run.path, said.append, patience=30):
            pass
    assert len(said) == 2 and all("process 7 on elsewhere" in line for line in said)


def test_a_file_system_without_locks(run: RunDir, monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(descriptor: int, operation: int) -> None:
        raise OSError(37, os.strerror(37))

    monkeypatch.setattr(fcntl, "flock", refuse)
    said = list[str]()
    with run_lock(run.path, said.append):
        pass
    assert len(said) == 1 and "has no locks" in said[0]


# -- clocks ----------------------------------------------------------------------------------------------------------


def test_runs_of_one_second_have_names_of_their_own(
    settings: Config, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(time, "strftime", lambda form: "20260101-000000")
    config = settings.model_copy(update={"output_dir": str(tmp_path), "run_name": None})
    names = [RunDir.create(config).path.name for _ in range(3)]
    assert names == [f"grpo-beta0.05-20260101-000000{end}" for end in ("", "-2", "-3")]
    with pytest.raises(ConfigError, match="exists: continue it with --resume"):
        RunDir.create(config.model_copy(update={"run_name": names[0]}))


def test_the_newest_checkpoint_is_by_rollouts_not_by_time(run: RunDir) -> None:
    for folder, when in (("rollouts_00000016", 2e9), ("rollouts_00000024", 1e9)):
        os.utime(run.checkpoints / folder, (when, when))
    found = newest_checkpoint(run.checkpoints)
    assert found and found.progress.rollouts == 24
