"""Several learner processes on one machine, started by torch's own launcher."""

import os
import sys
from collections.abc import Sequence
from typing import NoReturn

_SHUTDOWN_S = 3600  # a step and its checkpoint may take long; the launcher's default kills after 30 s


def launch(processes: int, arguments: Sequence[str]) -> NoReturn:
    """Become the launcher of `processes` times `grpo-lab` with these arguments."""
    launcher = ["-m", "torch.distributed.run", "--standalone", "--nproc-per-node", str(processes)]
    patience = ["--shutdown-timeout", str(_SHUTDOWN_S), "--signals-to-handle", "SIGTERM,SIGINT,SIGUSR1"]
    environment = {**os.environ, "OMP_NUM_THREADS": os.environ.get("OMP_NUM_THREADS", str(_threads(processes)))}
    os.execvpe(sys.executable, [sys.executable, *launcher, *patience, "-m", "grpo_lab", *arguments], environment)


def _threads(processes: int) -> int:
    """Cores for each process, so that they do not wait for each other's threads."""
    return max(1, len(os.sched_getaffinity(0)) // processes)
