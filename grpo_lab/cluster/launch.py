"""Several learner processes on one machine or more, started and watched by torch's own launcher."""

import logging
import os
import sys
from collections.abc import Sequence

from torch.distributed.elastic.multiprocessing.api import SignalException
from torch.distributed.elastic.multiprocessing.errors import ChildFailedError
from torch.distributed.launcher.api import LaunchConfig, elastic_launch

_SHUTDOWN_S = 3600  # a step and its checkpoint may take long; the launcher's default kills after 30 s


def launch(processes: int, arguments: Sequence[str], nodes: int = 1, rendezvous: str = "localhost:0") -> int:
    """Run `grpo-lab` with these arguments as `processes` ranks; the exit status of the first that failed, else 0.

    What rank 0 has to say it says itself. A stop signal is passed on, and waited for until the step is saved. The same call on
    each of several `nodes` makes one run; they meet at `rendezvous`, host:port of one of them.
    """
    logging.getLogger("torch.distributed.elastic").setLevel(logging.CRITICAL)
    os.environ.setdefault("OMP_NUM_THREADS", str(_threads(processes)))
    config = LaunchConfig(
        min_nodes=nodes,
        max_nodes=nodes,
        nproc_per_node=processes,
        run_id="grpo_lab",
        rdzv_backend="c10d",
        rdzv_endpoint=rendezvous,
        max_restarts=0,
        signals_to_handle="SIGTERM,SIGINT,SIGUSR1",
        shutdown_timeout=_SHUTDOWN_S,
    )
    try:
        elastic_launch(config, sys.executable)("-m", "grpo_lab", *arguments)
    except ChildFailedError as error:
        return abs(error.get_first_failure()[1].exitcode) or 1
    except SignalException:
        return 0
    return 0


def _threads(processes: int) -> int:
    """Cores for each process, so that they do not wait for each other's threads."""
    return max(1, len(os.sched_getaffinity(0)) // processes)
