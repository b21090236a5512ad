"""Servers end with their owner, however it ends; and the machine's shares and a log's last words."""

import contextlib
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from grpo_lab.errors import ConfigError
from grpo_lab.rollout import guard
from grpo_lab.rollout.server import ServerProcess, cpu_shares, gpu_shares

pytestmark = pytest.mark.skipif(sys.platform != "linux", reason="reads /proc")

# Prints its process id and that of a child of its own, then waits for a minute.
WAITS = """
import os, signal, subprocess, sys, time
child = subprocess.Popen(["sleep", "60"])
print(os.getpid(), child.pid, flush=True)
time.sleep(60)
"""
DEAF = "import signal; signal.signal(signal.SIGTERM, signal.SIG_IGN)" + WAITS
POLITE = (
    "import signal, sys; signal.signal(signal.SIGTERM, lambda *_: (child.kill(), print('tidy'), sys.exit(3)))" + WAITS
)
LEAVES = WAITS.replace("time.sleep(60)", "sys.exit(7)")
IMPATIENT = f"import sys; sys.path.insert(0, {str(Path(guard.__file__).parent)!r}); import guard; guard.GRACE_S = 0.3; "


def until(condition: Callable[[], object], seconds: float = 20) -> None:
    end = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < end, "it did not come about"
        time.sleep(0.01)


def lives(pid: int) -> bool:
    try:
        state = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0]
    except (FileNotFoundError, ProcessLookupError):
        return False
    return state != "Z"


def parent(pid: int) -> int:
    return int(Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[1])


class Log:
    """Where the programs above print; whatever they named there is killed at the end of a test."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self.path.touch()

    def pids(self) -> list[int]:
        until(lambda: "\n" in self.path.read_text())
        return [int(word) for word in self.path.read_text().splitlines()[0].split()]

    def server(self, program: str) -> ServerProcess:
        server = ServerProcess(lambda socket: [sys.executable, "-c", program], self.path, os.environ)
        server.start()
        return server

    def guarded(self, program: str) -> subprocess.Popen[bytes]:
        """The guard with a grace period of 0.3 s over a program."""
        command = [sys.executable, "-c", IMPATIENT + "sys.exit(guard.main())", sys.executable, "-c", program]
        with self.path.open("ab") as output:
            return subprocess.Popen(command, stdin=subprocess.PIPE, stdout=output)


@pytest.fixture
def log(tmp_path: Path) -> Iterator[Log]:
    log = Log(tmp_path / "server.log")
    yield log
    for word in log.path.read_text().partition("\n")[0].split():
        if word.isdigit() and lives(int(word)):
            os.kill(int(word), signal.SIGKILL)


def test_closing_stdin_ends_the_command_and_its_children(log: Log) -> None:
    process = log.guarded(DEAF)
    pids = log.pids()
    assert process.stdin
    process.stdin.close()
    assert process.wait(20) == 128 + signal.SIGKILL
    until(lambda: not any(map(lives, pids)))


def test_sigterm_ends_the_command_and_its_children(log: Log) -> None:
    process = log.guarded(WAITS)
    pids = log.pids()
    process.terminate()
    assert process.wait(20) == 128 + signal.SIGTERM
    until(lambda: not any(map(lives, pids)))


def test_a_command_that_ends_by_itself_gives_its_status_and_leaves_nothing(log: Log) -> None:
    process = log.guarded(LEAVES)
    assert process.wait(20) == 7
    until(lambda: not any(map(lives, log.pids())))


def test_a_stopped_server_may_tidy_up(log: Log) -> None:
    server = log.server(POLITE)
    pids = log.pids()
    assert server.is_running
    server.stop()
    assert not server.is_running and "tidy" in log.path.read_text()
    until(lambda: not any(map(lives, pids)))


def test_a_server_that_ignores_sigterm_can_be_killed_at_once(log: Log) -> None:
    server = log.server(DEAF)
    pids = log.pids()
    start = time.monotonic()
    server.stop(at_once=True)
    assert time.monotonic() - start < guard.GRACE_S / 2
    until(lambda: not any(map(lives, pids)))


def test_a_server_ends_with_its_killed_owner(log: Log) -> None:
    owner = f"""
import os, pathlib, sys, time
from grpo_lab.rollout.server import ServerProcess
command = [sys.executable, "-c", {WAITS.replace('"sleep", "60"', '"true"')!r}]
server = ServerProcess(lambda socket: command, pathlib.Path({str(log.path)!r}), os.environ)
server.start()
time.sleep(60)
"""
    process = subprocess.Popen([sys.executable, "-c", owner])
    pid = log.pids()[0]
    process.kill()
    process.wait()
    until(lambda: not lives(pid))


def test_a_server_ends_with_its_killed_guard(log: Log) -> None:
    server = log.server(WAITS)
    pid = log.pids()[0]
    variables = Path(f"/proc/{pid}/environ").read_bytes().decode().split("\0")
    (temporary,) = (Path(one.removeprefix("TMPDIR=")) for one in variables if one.startswith("TMPDIR="))
    os.kill(parent(pid), signal.SIGKILL)
    until(lambda: not lives(pid) and not server.is_running)
    server.stop()
    assert temporary.is_dir(), "nobody was left to remove it"
    log.guarded("print()").wait(20)
    assert not temporary.exists(), "the next one does"


def test_a_server_is_told_its_socket_which_nobody_before_it_left(log: Log) -> None:
    program = "import os, sys; print(os.path.exists(sys.argv[1]), sys.argv[1])"
    server = ServerProcess(lambda socket: [sys.executable, "-c", program, socket], log.path, os.environ)
    server.socket.touch()
    server.start()
    until(lambda: not server.is_running)
    server.stop()
    assert log.path.read_text() == f"False {server.socket}\n"
    assert server.socket.parent == log.path.parent


def test_a_server_can_listen_at_its_socket_though_its_folder_has_a_long_name(tmp_path: Path) -> None:
    # as below /tmp where the host's name has 64 characters, or in a long TMPDIR
    folder = tmp_path / f"grpo_lab-workers-{'h' * 64}-1234567-abcdefgh"
    folder.mkdir()
    program = "import socket, sys; socket.socket(socket.AF_UNIX).bind(sys.argv[1]); print('bound')"
    server = ServerProcess(lambda socket: [sys.executable, "-c", program, socket], folder / "worker-0.log", os.environ)
    server.start()
    until(lambda: not server.is_running)
    server.stop()
    assert server.log.read_text() == "bound\n"


@pytest.mark.parametrize("end", ["itself", "politely", "at once", "owner gone"])
def test_temporary_files_of_a_server_go_with_it(log: Log, monkeypatch: pytest.MonkeyPatch, end: str) -> None:
    """A Unix socket can be made among them, however long the name of the usual directory is."""
    usual = log.path.parent / ("usual" + "-" * 60)
    usual.mkdir()
    monkeypatch.setenv("TMPDIR", str(usual))
    monkeypatch.delenv("TORCHINDUCTOR_CACHE_DIR", raising=False)
    program = (
        "import os, socket, sys, tempfile; from uuid import uuid4; "
        "socket.socket(socket.AF_UNIX).bind(f'{tempfile.gettempdir()}/{uuid4()}'); os.close(tempfile.mkstemp()[0]); "
        "print(tempfile.gettempdir(), os.environ['TORCHINDUCTOR_CACHE_DIR'], flush=True)"
    )
    wait = "" if end == "itself" else "; import time; time.sleep(60)"
    guarded = log.guarded(program + wait)
    assert guarded.stdin
    until(lambda: "\n" in log.path.read_text())
    temporary, cache = map(Path, log.path.read_text().split())
    assert cache.parent == usual and temporary != usual
    if end != "itself":
        assert len(list(temporary.iterdir())) == 2
    if end == "politely":
        guarded.terminate()
    elif end == "at once":
        guarded.stdin.write(b"k")
        guarded.stdin.flush()
    elif end == "owner gone":
        guarded.stdin.close()
    guarded.wait(20)
    assert not temporary.exists() and list(usual.iterdir()) == []


def test_the_end_of_a_command_is_noticed_though_its_children_live(log: Log) -> None:
    server = log.server(LEAVES)
    pids = log.pids()
    try:
        until(lambda: not server.is_running, 1.5)
    finally:
        with contextlib.suppress(ProcessLookupError):  # the guard has ended it, as it should
            os.killpg(pids[0], signal.SIGKILL)
        server.stop()


# -- shares and words ------------------------------------------------------------------------------------------------


def test_the_first_gpus_are_the_learners() -> None:
    assert gpu_shares(["0", "1", "2"], 1, 2, 1) == [{"CUDA_VISIBLE_DEVICES": "1"}, {"CUDA_VISIBLE_DEVICES": "2"}]
    devices = [share["CUDA_VISIBLE_DEVICES"] for share in gpu_shares(["7", "5", "4", "3", "1", "0"], 2, 2, 2)]
    assert devices == ["4,3", "1,0"]


def test_too_few_gpus_say_how_many_are_needed() -> None:
    with pytest.raises(ConfigError, match=r"need 5 GPUs, 4 are visible.*rollout\.workers=0"):
        gpu_shares(["0", "1", "2", "3"], 1, 2, 2)
    with pytest.raises(ConfigError, match=r"2 learner process\(es\) need 4 GPUs, 3 are visible"):
        gpu_shares(["0", "1", "2"], 2, 2, 1)


@pytest.mark.parametrize(
    ("cores", "workers", "bound"),
    [([0, 1], 1, [None]), ([0, 2, 3, 5, 6], 2, ["0,2", "3,5"]), ([4, 5], 2, ["4", "5"]), ([0], 2, ["nobind"] * 2)],
)
def test_cores_are_divided_where_there_are_enough(cores: list[int], workers: int, bound: list[str | None]) -> None:
    assert [share.get("VLLM_CPU_OMP_THREADS_BIND") for share in cpu_shares(cores, workers)] == bound


def last_error(log: Log, *lines: str) -> str:
    log.path.write_text("\n".join(["", *lines, ""]))
    return ServerProcess(lambda socket: [], log.path, {}).last_error()


def test_the_last_error_is_the_last_line_that_tells_of_one(log: Log) -> None:
    lines = ["(EngineCore pid=7) ValueError: first", "torch.OutOfMemoryError: CUDA   out of memory.", "INFO: bye"]
    assert last_error(log, *lines) == "OutOfMemoryError: CUDA out of memory."
    assert last_error(log, "vllm: error: unrecognized arguments: --x") == "error: unrecognized arguments: --x"
    lines = [
        "pydantic.ValidationError: 1 validation error for ModelConfig",
        "  Value error, too long. Or [type=value_error]",
    ]
    assert last_error(log, *lines) == "Value error, too long"


def test_a_log_without_an_error_has_no_last_one(log: Log) -> None:
    assert last_error(log, "INFO: an Error of mine") == ""
    assert ServerProcess(lambda socket: [], log.path.with_name("none.log"), {}).last_error() == ""


def test_the_last_error_is_the_root_cause(log: Log) -> None:
    found = last_error(
        log,
        "(EngineCore pid=7) ERROR 12-02 [core.py:9] ValueError: No available memory for the cache blocks.",
        "(APIServer pid=6) RuntimeError: Engine core initialization failed. See root cause above. Failed core proc(s): {}",
    )
    assert found == "ValueError: No available memory for the cache blocks."


def test_the_last_error_is_of_the_newest_start(log: Log) -> None:
    programs = ["raise ValueError('of the first start')", "raise SystemExit('this is the second')"]
    server = ServerProcess(lambda socket: [sys.executable, "-c", programs.pop(0)], log.path, os.environ)
    while programs:
        server.start()
        until(lambda: not server.is_running)
        server.stop()
    assert "this is the second" in log.path.read_text()
    assert "of the first start" not in server.last_error()
