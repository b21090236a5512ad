"""Rollout workers by hand: vLLM servers with a config's settings, for trainings on this or other machines."""

from __future__ import annotations

import contextlib
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from types import FrameType, TracebackType

import httpx
import torch

from grpo_lab.config import Config
from grpo_lab.console import Console
from grpo_lab.errors import ConfigError, RunError
from grpo_lab.hub import resolve_model
from grpo_lab.rollout import guard
from grpo_lab.rollout.engines import EngineSpec
from grpo_lab.rollout.engines.vllm_server import require_vllm, server_options
from grpo_lab.rollout.server import machine_shares, server_command, server_environment
from grpo_lab.rollout.vllm_options import command_line
from grpo_lab.storage.scratch import write_whole

_LOOK_S = 0.5


@dataclass(frozen=True)
class Place:
    """Where workers listen and say so: `count` of them from `port` on (0: free ports), each with its part of the machine.

    With `announce`, a worker that is up has a file HOST-PORT.url there, which holds its address; the folder gets the logs of
    several workers too, else the current folder.
    """

    host: str = "127.0.0.1"
    port: int = 8000
    count: int = 1
    announce: Path | None = None

    def ports(self) -> list[int]:
        """ConfigError when one is taken."""
        with contextlib.ExitStack() as held:
            wanted = [self.port + index if self.port else 0 for index in range(self.count)]
            return [self._probe(port, held) for port in wanted]

    def _probe(self, port: int, held: contextlib.ExitStack) -> int:
        probe = held.enter_context(socket.socket())
        probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        try:
            probe.bind((self.host, port))
        except OSError as error:
            raise ConfigError(
                f"--host {self.host} --port {port}: cannot listen there ({error.strerror}); choose another "
                "port, or an address of this machine"
            ) from None
        return int(probe.getsockname()[1])

    @property
    def name(self) -> str:
        """What other machines call this one."""
        return socket.gethostname() if self.host in ("0.0.0.0", "::") else self.host


class _Server:
    """One vLLM server under guard.py; its output goes to `log`, or to the terminal."""

    def __init__(self, command: Sequence[str], environment: Mapping[str, str], url: str, log: Path | None) -> None:
        self.url, self.log, self.is_up = url, log, False
        with open(log, "ab") if log else contextlib.nullcontext() as output:
            self._process = subprocess.Popen(
                [sys.executable, "-P", guard.__file__, *command],
                stdin=subprocess.PIPE,
                stdout=output,
                stderr=subprocess.STDOUT if log else None,
                env=environment,
                start_new_session=True,  # Ctrl-C in a terminal comes to this process alone
            )

    @property
    def status(self) -> int | None:
        """Its exit status, None while it runs."""
        return self._process.poll()

    def comes_up(self) -> bool:
        """Whether it answers now and did not before."""
        try:
            answers = not self.is_up and httpx.get(f"{self.url}/health", timeout=2, trust_env=False).is_success
        except httpx.HTTPError:
            answers = False
        self.is_up |= answers
        return answers

    def ask_to_end(self) -> None:
        """Let it end; at once while it loads, since vLLM takes a polite end for an error then."""
        assert self._process.stdin is not None
        with contextlib.suppress(OSError):
            if not self.is_up:
                self._process.stdin.write(b"k")
            self._process.stdin.close()

    def wait(self) -> None:
        self._process.wait()


def serve(config: Config, place: Place) -> None:
    """Run the servers until SIGINT or SIGTERM comes.

    ConfigError when vLLM is missing, a port is taken or there are too few GPUs; RunError when the last server ends by itself.
    """
    require_vllm("grpo-lab worker")
    ports, shares = place.ports(), machine_shares(place.count, config.rollout.worker_gpus, learners=0)
    spec, console = EngineSpec(resolve_model(config.model), config.model, config.rollout), Console()
    options, folder = command_line(server_options(spec, torch.cuda.is_available())), place.announce or Path()
    if place.announce:
        place.announce.mkdir(parents=True, exist_ok=True)
    console.say(
        f"worker     {config.model.place}, {config.model.dtype}, up to {spec.max_model_len} tokens; Ctrl-C stops it"
    )
    for number in (signal.SIGTERM, signal.SIGINT):
        signal.signal(number, _stop)
    servers: list[_Server] = []
    try:
        for port, share in zip(ports, shares, strict=True):
            command = server_command(options, ["--host", place.host, "--port", str(port)])
            log = folder / f"worker-{place.name}-{port}.log" if place.count > 1 else None
            environment = server_environment(config.model.lora_rank > 0, share)
            servers.append(_Server(command, environment, f"http://{place.name}:{port}", log))
        with Announced(place.announce) as announced:
            _watch(servers, console, announced)
    except _Stopped:
        return
    finally:
        for server in servers:
            server.ask_to_end()
        for server in servers:
            server.wait()


def _watch(servers: list[_Server], console: Console, announced: Announced) -> None:
    """Say what comes up and what ends; RunError when nothing is left."""
    start, running = time.monotonic(), list(servers)
    while running:
        for server in list(running):
            if server.status is not None:
                running.remove(server)
                announced.withdraw(server.url)
                where = f"its output is in {server.log}" if server.log else "its output above says why"
                console.say(f"warning    worker {server.url} ended with status {server.status}; {where}")
            elif server.comes_up():
                announced.add(server.url)
                console.say(f"worker     {server.url} is up after {time.monotonic() - start:.0f} s")
                if all(each.is_up for each in servers):
                    urls = ",".join(each.url for each in servers)
                    console.say(f"attach     grpo-lab train ... --set 'rollout.urls=[{urls}]'")
        time.sleep(_LOOK_S)
    raise RunError("no worker runs any more")


class Announced:
    """Files that hold the addresses of the workers that are up, in a folder or nowhere; none is left behind."""

    def __init__(self, folder: Path | None) -> None:
        self._folder = folder
        self._files: dict[str, Path] = {}

    def add(self, url: str) -> None:
        """Whole or not at all: others may be reading."""
        if self._folder:
            file = self._folder / f"{url.removeprefix('http://').replace(':', '-')}.url"
            write_whole(file, url + "\n")
            self._files[url] = file

    def withdraw(self, url: str) -> None:
        if url in self._files:
            self._files.pop(url).unlink(missing_ok=True)

    def __enter__(self) -> Announced:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        for url in list(self._files):
            self.withdraw(url)


class _Stopped(Exception):
    """SIGINT or SIGTERM came."""


def _stop(number: int, frame: FrameType | None) -> None:
    for again in (signal.SIGTERM, signal.SIGINT):
        signal.signal(again, signal.SIG_IGN)  # the servers' own end takes a moment, and has a limit
    raise _Stopped
