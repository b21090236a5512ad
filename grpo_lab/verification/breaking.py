"""A training in a process that is watched: its file operations are told, and at one of them, or soon after, SIGKILL comes.

`run_watched` starts `python -m grpo_lab.verification.breaking PLAN train ...`: an audit hook beside the unchanged command
line. Only the standard library is imported here.
"""

from __future__ import annotations

import json
import os
import re
import runpy
import select
import signal
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

_PATH_AT = {"open": 0, "os.mkdir": 0, "os.rename": 1, "os.remove": 0, "os.rmdir": 0, "shutil.rmtree": 0}
_WRITES = os.O_WRONLY | os.O_RDWR | os.O_CREAT
_PACKAGE = f"{Path(__file__).parents[1]}/"
_LOOK_S = 0.002  # between two looks at the stack


@dataclass(frozen=True)
class Moment:
    """When a run is killed: right before the file operation of this name; or `wait_s` seconds after it; or after it, as soon as
    a line of the stack, "path/file.py:88 in function", matches the pattern `inside`."""

    operation: str
    wait_s: float = 0.0
    inside: str = ""


@dataclass(frozen=True)
class Operation:
    """A file operation of a run: "<version of the last pushed weights> <audit event> <path>", and when it came, in seconds.

    Paths begin with `run` for the run's folder and with `weights` for the folder of its pushes, so that runs can be compared.
    """

    name: str
    at_s: float


@dataclass(frozen=True)
class Outcome:
    """How a watched process ended: exit status (-9: killed), what it did, and the line of grpo_lab a kill `inside` found."""

    code: int
    pid: int
    operations: tuple[Operation, ...]
    where: str


def run_watched(run: Path, arguments: Sequence[str], log: Path, moment: Moment | None = None) -> Outcome:
    """`grpo-lab` with `arguments`, watched for the run in folder `run` and killed at `moment`; its output is added to `log`."""
    reader, writer = os.pipe()
    os.set_blocking(reader, False)
    plan = json.dumps({"pipe": writer, "run": str(run), "moment": asdict(moment) if moment else None})
    command = [sys.executable, "-m", "grpo_lab.verification.breaking", plan, *arguments]
    told = b""
    with log.open("ab") as file, _started(command, file, writer) as process:
        os.close(writer)
        while process.poll() is None:
            select.select([reader], [], [], 0.1)
            told += _read(reader)
            if moment and moment.wait_s and f" {moment.operation}\n".encode() in told:
                time.sleep(moment.wait_s)
                process.kill()
        process.wait()
        told += _read(reader)
    os.close(reader)
    text = told.decode(errors="replace")
    times = re.findall(r"^(\d+\.\d+) (-?\d+ \S+ .+)$", text, flags=re.MULTILINE)
    operations = tuple(Operation(name, float(at_s)) for at_s, name in times)
    where = re.search(r"^killed in (.+)$", text, flags=re.MULTILINE)
    return Outcome(process.returncode, process.pid, operations, where[1] if where else "")


@contextmanager
def _started(command: Sequence[str], output: Any, pipe: int) -> Iterator[subprocess.Popen[bytes]]:
    process = subprocess.Popen(command, stdout=output, stderr=output, pass_fds=[pipe])
    try:
        yield process
    finally:  # nothing goes on behind the back of somebody who stopped this
        process.kill()
        process.wait()


def _read(pipe: int) -> bytes:
    """Everything that is in the pipe now; a pause where its writers are gone, so that waiting for their end costs nothing."""
    told = b""
    try:
        while chunk := os.read(pipe, 65536):
            told += chunk
        time.sleep(0.01)
    except BlockingIOError:
        pass
    return told


def _watch(pipe: int, run: Path, moment: Moment | None) -> None:
    """From now on tell every file operation of the main thread on the run, before it happens, and be killed at `moment`."""
    owner = (os.getpid(), threading.get_ident())
    version = -1

    def hook(event: str, arguments: tuple[Any, ...]) -> None:
        nonlocal version
        if event not in _PATH_AT or (os.getpid(), threading.get_ident()) != owner:
            return
        place = _place(arguments[_PATH_AT[event]], run)
        if not place or (event == "open" and not arguments[2] & _WRITES):
            return
        pushed = re.fullmatch(r"weights/version_(\d+)", place)
        version = int(pushed[1]) if pushed and event == "os.mkdir" else version
        name = f"{version} {event} {place}"
        os.write(pipe, f"{time.monotonic():.6f} {name}\n".encode())
        if moment and name == moment.operation:
            if moment.inside:
                threading.Thread(target=_kill_inside, args=(owner[1], moment.inside, pipe), daemon=True).start()
            elif not moment.wait_s:
                os.kill(os.getpid(), signal.SIGKILL)  # else the reader of the pipe does it

    sys.addaudithook(hook)


def _kill_inside(thread: int, pattern: str, pipe: int) -> None:
    """Look at the stack of `thread` until a line of it matches `pattern`; tell the innermost line of grpo_lab and kill."""
    while True:
        frame, lines = sys._current_frames().get(thread), list[str]()
        while frame is not None:
            lines.append(f"{frame.f_code.co_filename}:{frame.f_lineno} in {frame.f_code.co_name}")
            frame = frame.f_back
        if any(re.search(pattern, line) for line in lines):
            own = next(
                (line.removeprefix(_PACKAGE) for line in lines if line.startswith(_PACKAGE) and __file__ not in line),
                lines[0],
            )
            os.write(pipe, f"killed in {own}\n".encode())
            os.kill(os.getpid(), signal.SIGKILL)
        time.sleep(_LOOK_S)


def _place(path: Any, run: Path) -> str:
    """`path` with the run's own names replaced; "" for what does not belong to the run."""
    if not isinstance(path, str | bytes | os.PathLike):
        return ""
    text = os.fsdecode(path).removesuffix(f"-{socket.gethostname()}-{os.getpid()}")
    pushes = re.search(r"/grpo_lab-weights-[^/]*(/.*)?$", text)
    if pushes:
        return "weights" + (pushes[1] or "")
    inside = text.removeprefix(f"{run.parent}/")
    is_run = inside != text and run.name in inside.split("/")[0]
    return inside.replace(run.name, "run", 1) if is_run else ""


def main() -> None:
    """The watched process: PLAN is taken off the arguments, the rest is grpo-lab's."""
    plan = json.loads(sys.argv.pop(1))
    os.set_inheritable(plan["pipe"], False)
    _watch(plan["pipe"], Path(plan["run"]), Moment(**plan["moment"]) if plan["moment"] else None)
    runpy.run_module("grpo_lab", run_name="__main__", alter_sys=True)


if __name__ == "__main__":
    main()
