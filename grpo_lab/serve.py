"""A rollout worker by hand: vLLM's server with this run's settings, for trainings on this or another machine."""

from __future__ import annotations

import signal
import socket
import subprocess
import sys
import time
from types import FrameType

import httpx

from grpo_lab.config import Config
from grpo_lab.console import Console
from grpo_lab.errors import ConfigError, RunError
from grpo_lab.hub import resolve_model
from grpo_lab.rollout import guard
from grpo_lab.rollout.engines import EngineSpec
from grpo_lab.rollout.engines.vllm_server import require_vllm, server_options
from grpo_lab.rollout.server import server_command, server_environment
from grpo_lab.rollout.vllm_options import command_line

_LOOK_S = 0.5


def serve(config: Config, host: str, port: int) -> None:
    """Run the server until SIGINT or SIGTERM comes.

    ConfigError when vLLM is missing or the port is taken, RunError when the server ends by itself.
    """
    require_vllm("grpo-lab worker")
    _require_free(host, port)
    spec = EngineSpec(resolve_model(config.model), config.model, config.rollout)
    console = Console()
    console.say(
        f"worker     {config.model.name}, {config.model.dtype}, up to {spec.max_model_len} tokens; Ctrl-C stops it"
    )
    command = server_command(command_line(server_options(spec)), ["--host", host, "--port", str(port)])
    server = subprocess.Popen(
        [sys.executable, "-P", guard.__file__, *command],
        stdin=subprocess.PIPE,
        env=server_environment(config.model.lora_rank > 0, {}),
        start_new_session=True,  # Ctrl-C in a terminal comes to this process alone
    )
    assert server.stdin is not None
    for number in (signal.SIGTERM, signal.SIGINT):
        signal.signal(number, _stop)
    start, is_up = time.monotonic(), False
    try:
        while server.poll() is None:
            if not is_up and _answers(host, port):
                is_up = True
                _announce(console, host, port, time.monotonic() - start)
            time.sleep(_LOOK_S)
    except _Stopped:
        if not is_up:
            server.stdin.write(b"k")  # while it loads, vLLM takes a polite end for an error
        server.stdin.close()
        server.wait()
        return
    raise RunError(f"the worker's server ended with status {server.returncode}; its output above says why")


class _Stopped(Exception):
    """SIGINT or SIGTERM came."""


def _stop(number: int, frame: FrameType | None) -> None:
    for again in (signal.SIGTERM, signal.SIGINT):
        signal.signal(again, signal.SIG_IGN)  # the server's own end takes a moment, and has a limit
    raise _Stopped


def _require_free(host: str, port: int) -> None:
    with socket.socket() as probe:
        probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        try:
            probe.bind((host, port))
        except OSError as error:
            raise ConfigError(
                f"--host {host} --port {port}: cannot listen there ({error.strerror}); choose another "
                "port, or an address of this machine"
            ) from None


def _answers(host: str, port: int) -> bool:
    """Whether the server is up here."""
    try:
        return httpx.get(f"http://{host}:{port}/health", timeout=2, trust_env=False).is_success
    except httpx.HTTPError:
        return False


def _announce(console: Console, host: str, port: int, seconds: float) -> None:
    name = socket.gethostname() if host in ("0.0.0.0", "::") else host
    console.say(f"worker     up after {seconds:.0f} s; attach it:")
    console.say(f"           grpo-lab train ... --set 'rollout.urls=[http://{name}:{port}]'")
