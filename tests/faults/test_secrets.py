"""Secrets stay where they are, foreign text is shown as text, and folders and sockets are this user's alone."""

import os
import shutil
import socket
import stat
import subprocess
import sys
import tempfile
from collections.abc import Callable
from dataclasses import dataclass, replace
from html.parser import HTMLParser
from pathlib import Path

import pytest
import yaml
from conftest import write_tiny_config

from grpo_lab.cluster.serve import Place
from grpo_lab.cluster.slurm import Request
from grpo_lab.config import Config, ModelConfig, RolloutConfig
from grpo_lab.config.file import load_config
from grpo_lab.console import Console
from grpo_lab.errors import ConfigError
from grpo_lab.rollout.engines import EngineSpec
from grpo_lab.rollout.engines.vllm_server import _workers
from grpo_lab.rollout.server import ServerProcess
from grpo_lab.run_dir import RunDir
from grpo_lab.storage.records import read_groups, write_groups
from grpo_lab.storage.scratch import scratch_folder
from grpo_lab.sweep import Grid, members

REPOSITORY = Path(__file__).parents[2]
Command = Callable[..., tuple[int, str]]
SECRETS = {name: f"sentinel-{name.lower()}" for name in ("WANDB_API_KEY", "HF_TOKEN", "VLLM_API_KEY", "OPENAI_API_KEY")}


# -- names and places ------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", ["../out", "/out", "a/b", "..", ".", "", "a\\b"])
def test_names_do_not_leave_their_folder(tmp_path: Path, name: str) -> None:
    config = Config(output_dir=str(tmp_path / "runs"), run_name=name)
    for make in (RunDir.refuse_existing, RunDir.create):
        with pytest.raises(ConfigError, match="plain folder name"):
            make(config)
    with pytest.raises(ConfigError, match="letters, digits"):
        Request(name)
    if "\\" not in name:
        with pytest.raises(ConfigError, match="plain folder name"):
            members(None, (), Grid(("grpo",), ("paper",), (0.1,), (0,)), name)
    assert not list(tmp_path.iterdir())


def test_scratch_folders_are_private_and_follow_no_links(tmp_path: Path) -> None:
    (tmp_path / "mine").mkdir()
    (tmp_path / "mine/file").touch()
    gone = next(pid for pid in range(2**22 - 1, 1, -1) if not Path(f"/proc/{pid}").exists())
    planted = tmp_path / f"grpo_lab-weights-{socket.gethostname()}-{gone}-x"
    planted.symlink_to(tmp_path / "mine")
    folder = scratch_folder("weights", tmp_path)
    assert stat.S_IMODE(folder.stat().st_mode) == 0o700 and folder.stat().st_uid == os.getuid()
    assert (tmp_path / "mine/file").exists()


PROGRAM = "import os, socket, sys; socket.socket(socket.AF_UNIX).bind(sys.argv[1]); "
PROGRAM += "print(oct(os.stat(os.path.dirname(sys.argv[1])).st_mode & 0o777), sys.argv[1])"


@pytest.mark.parametrize("is_long", [False, True])
def test_a_started_worker_listens_where_this_user_alone_can_come(tmp_path: Path, is_long: bool) -> None:
    """Also where the path would be too long; a second start takes a new place, not one that others could have prepared."""
    with tempfile.TemporaryDirectory(dir="/tmp") as short:
        logs = scratch_folder("workers", tmp_path if is_long else Path(short))
        log = logs / ("n" * 100 * is_long + "worker.log")
        server = ServerProcess(lambda path: [sys.executable, "-c", PROGRAM, path], log, os.environ)
        for _ in range(2):
            server.start()
            assert server._process and server._process.wait(20) == 0
            server.stop()
        modes, places = zip(*(line.split() for line in log.read_text().splitlines()), strict=True)
    assert modes == ("0o700", "0o700")
    assert len(set(places)) == 1 + is_long and not any(Path(place).exists() for place in places[is_long - 1 :])


def test_nothing_listens_to_other_machines_unless_told(tmp_path: Path) -> None:
    assert Place().host == "127.0.0.1"
    settings = RolloutConfig(workers=2)
    for worker in _workers(EngineSpec(tmp_path, ModelConfig(), settings), tmp_path):
        assert worker.server
        words = list(worker.server._command("/tmp/x"))
        assert words[words.index("--uds") + 1] == "/tmp/x" and "--host" not in words and "--port" not in words


# -- secrets ---------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("address", ["http://user:sentinel@host:8000", "http://sentinel@host:8000"])
def test_an_address_with_a_password_is_refused_and_not_repeated(tmp_path: Path, command: Command, address: str) -> None:
    given = f"rollout.urls=[{address}]"
    file = tmp_path / "c.yaml"
    file.write_text(f"rollout: {{urls: ['{address}']}}\n")
    doctor = ("doctor", "--environment-only", "--set", given)
    trains = (("train", "--set", given, "--dry-run"), ("train", "--config", file), ("train", "--set", given[:-1]))
    for words in (*trains, doctor, ("slurm", file)):
        code, said = command(*words)
        assert code == 2 and "sentinel" not in said and said.count("\n") == 1, said


@dataclass(frozen=True)
class Trained:
    """A run with secrets in its environment: the folder with everything it wrote, and what it said."""

    folder: Path
    config: Path
    said: str


@pytest.fixture(scope="module")
def trained(module_path: Path, tiny_model: Path) -> Trained:
    config = write_tiny_config(module_path / "c.yaml", tiny_model, module_path)
    words = [sys.executable, "-m", "grpo_lab", "train", "--config", str(config)]
    done = subprocess.run(words, env={**os.environ, **SECRETS}, capture_output=True, text=True, cwd=REPOSITORY)
    assert done.returncode == 0, done.stderr
    return Trained(module_path, config, done.stdout + done.stderr)


def test_keys_of_the_environment_are_written_and_shown_nowhere(
    trained: Trained, command: Command, monkeypatch: pytest.MonkeyPatch
) -> None:
    for name, value in SECRETS.items():
        monkeypatch.setenv(name, value)
    monkeypatch.chdir(trained.folder)
    train = ("train", "--config", trained.config)
    expected: dict[tuple[object, ...], int | None] = {
        train: 2,  # the run exists
        (*train, "--set", "run_name=other", "--dry-run"): 0,
        (*train, "--set", "model.name=owner/absent", "--set", "run_name=absent"): 2,
        ("report", "run"): 0,
        ("export", "run", "exported"): 0,
        ("slurm", trained.config, "--name", "job", "--gpus", "0", "--processes", "1"): 0,
        ("doctor", "--environment-only", "--config", trained.config): None,
    }
    spoken = trained.said
    for words, wanted in expected.items():
        code, said = command(*words)
        assert wanted is None or code == wanted, (words, said)
        spoken += said
    written = [file for file in trained.folder.rglob("*") if file.is_file()]
    assert {"config.yaml", "metrics.jsonl", "report.html", "job.sbatch", "README.md"} <= {file.name for file in written}
    for value in SECRETS.values():
        assert value not in spoken and not [file for file in written if value.encode() in file.read_bytes()]


# -- foreign text ----------------------------------------------------------------------------------------------------

HOSTILE = "</pre><img src=x onerror=alert(1)><script>alert(2)</script>\x1b]0;title\x07\x1b[31m</title>{{ 7*7 }}"


class Page(HTMLParser):
    """Its tags, and whatever in it could run or fetch."""

    def __init__(self, text: str) -> None:
        super().__init__()
        self.tags, self.active = list[str](), list[str]()
        self.feed(text)

    def handle_starttag(self, tag: str, attributes: list[tuple[str, str | None]]) -> None:
        self.tags.append(tag)
        for name, value in attributes:
            fetches = name in ("src", "href") and not (value or "").startswith(("data:image/", "#"))
            self.active += [f"{name}={value}"] if fetches or name.startswith("on") else []


def test_the_report_shows_foreign_text_as_text(tmp_path: Path, trained: Trained, command: Command) -> None:
    shutil.copytree(trained.folder / "run", hostile := tmp_path / HOSTILE.replace("/", "\\"))
    for file in RunDir(hostile).rollout_files().values():
        groups = read_groups(file)[0]
        write_groups(file, [
            replace(
                group,
                problem=replace(group.problem, id=HOSTILE, answer=HOSTILE),
                completions=tuple(replace(completion, text=HOSTILE) for completion in group.completions),
                grades=tuple(replace(grade, extracted=HOSTILE) for grade in group.grades),
            )
            for group in groups
        ])  # fmt: skip
    tree = yaml.safe_load((hostile / "config.yaml").read_text())
    tree["model"]["name"] = tree["data"]["task"] = tree["run_name"] = HOSTILE.replace("\x1b", "").replace("\x07", "")
    (hostile / "config.yaml").write_text(yaml.safe_dump(tree))
    plain = tmp_path / "plain"
    shutil.copytree(hostile, plain)
    code, said = command("report", hostile, plain, "--output", tmp_path / "report.html")
    assert code == 0 and "\x1b" not in said, said
    page = Page(text := (tmp_path / "report.html").read_text())
    assert page.tags.count("title") == 1 and page.tags.count("details") >= 2 and "img" in page.tags
    assert page.active == [] and "script" not in page.tags and "iframe" not in page.tags
    assert text.count("&lt;script&gt;") > 20 and "{{ 7*7 }}" in text


def test_a_terminal_is_given_no_control_characters(capfd: pytest.CaptureFixture[str], command: Command) -> None:
    Console().say(f"warning    worker says: {HOSTILE}\r\x9b2J‮evil\nnext [bold]line[/]\ttab")
    said = capfd.readouterr().out
    assert "\\x1b]0;title\\x07" in said and "\nnext [bold]line[/]" in said and "\\u202eevil" in said
    assert not any(sign in said for sign in "\x1b\x07\r\x9b‮")
    code, said = command("eval", "checkpoint", "no\x1b[31mwhere")
    assert code == 2 and "\x1b" not in said
    code, said = command("train", "--\x1b[31mnone")
    assert code == 2 and "\x1b" not in said


def test_the_files_of_a_run_can_be_opened_by_a_hostile_name_alone(tmp_path: Path, tiny_config: Path) -> None:
    """A name is a plain component, whatever signs it has; it does not become markup or a path."""
    config = load_config(tiny_config, ["run_name='a b;$(touch x)`y`'", f"output_dir={tmp_path}"])
    run = RunDir.create(config)
    assert run.path == tmp_path / "a b;$(touch x)`y`" and run.config.run_name == config.run_name
