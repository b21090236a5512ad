"""A rollout worker by hand: vLLM's server with this run's settings, for trainings on this or another machine."""

from __future__ import annotations

import os
import socket
from typing import NoReturn

from grpo_lab.config import Config
from grpo_lab.console import Console
from grpo_lab.errors import ConfigError
from grpo_lab.hub import resolve_model
from grpo_lab.rollout.engines import EngineSpec
from grpo_lab.rollout.engines.vllm_server import require_vllm, server_options
from grpo_lab.rollout.server import server_command, server_environment
from grpo_lab.rollout.vllm_options import command_line


def serve(config: Config, host: str, port: int) -> NoReturn:
    """Become the server. ConfigError when vLLM is missing or the port is taken."""
    require_vllm("grpo-lab worker")
    with socket.socket() as probe:
        probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        try:
            probe.bind((host, port))
        except OSError as error:
            raise ConfigError(
                f"--host {host} --port {port}: cannot listen there ({error.strerror}); choose another "
                "port, or an address of this machine"
            ) from None
    spec = EngineSpec(resolve_model(config.model), config.model, config.rollout)
    name = socket.gethostname() if host in ("0.0.0.0", "::") else host
    console = Console()
    console.say(
        f"worker     {config.model.name}, {config.model.dtype}, up to {spec.max_model_len} tokens; Ctrl-C stops it"
    )
    console.say(f"attach     once http://{name}:{port}/health answers (half a minute on a CPU):")
    console.say(f"           grpo-lab train ... --set 'rollout.urls=[http://{name}:{port}]'")
    command = server_command(command_line(server_options(spec)), ["--host", host, "--port", str(port)])
    os.execvpe(command[0], command, server_environment(config.model.lora_rank > 0, {}))
