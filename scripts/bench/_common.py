"""What the benchmarks share: options, measuring, the table, memory of a child process. Models and batches: _models.py."""

from __future__ import annotations

import argparse
import json
import os
import platform
import statistics
import subprocess
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

from grpo_lab.cli.options import quiet_libraries

REPOSITORY = Path(__file__).resolve().parents[2]


def parser(description: str | None) -> argparse.ArgumentParser:
    """Options of every benchmark: --json, --rounds, --tiny. Also quiets the libraries, so call it before they load."""
    quiet_libraries()
    made = argparse.ArgumentParser(description=description, formatter_class=argparse.ArgumentDefaultsHelpFormatter)
    made.add_argument("--json", type=Path, help="write settings and every sample there")
    made.add_argument("--rounds", type=int, default=3, help="measured repetitions of every contender, interleaved")
    made.add_argument("--tiny", action="store_true", help="seconds instead of minutes: shows that it runs, no numbers")
    return made


# -- measuring -------------------------------------------------------------------------------------------------------


def interleave(contenders: Mapping[str, Callable[[], dict[str, float]]], rounds: int, warm: int = 1) -> dict[str, Any]:
    """Call every contender once a round, in turn, every second round backwards; `warm` rounds first, not counted.

    A contender returns its quantities by name; all samples come back as {contender: {quantity: [one a round]}}.
    """
    samples: dict[str, Any] = {name: {} for name in contenders}
    for index in range(-warm, rounds):
        for name in list(contenders)[:: -1 if index % 2 else 1]:
            for quantity, value in contenders[name]().items():
                if index >= 0:
                    samples[name].setdefault(quantity, []).append(value)
    return samples


def seconds(part: Callable[[], Any]) -> float:
    """Wall-clock seconds of one call; on a GPU all its work included."""
    _wait_for_gpu()
    start = time.perf_counter()
    part()
    _wait_for_gpu()
    return time.perf_counter() - start


def _wait_for_gpu() -> None:
    torch = sys.modules.get("torch")
    if torch is not None and torch.cuda.is_available():
        torch.cuda.synchronize()


def ratio(over: Sequence[float], under: Sequence[float]) -> float:
    """Median over rounds of a ratio taken within each round, so that a machine's drift cancels."""
    return statistics.median(a / b for a, b in zip(over, under, strict=True))


def report(header: Sequence[str], rows: Sequence[Sequence[Any]], options: argparse.Namespace, data: Any) -> None:
    """Print a table; with --json write the settings, the machine and `data`."""
    texts = [list(header)] + [[f"{cell:.4g}" if isinstance(cell, float) else str(cell) for cell in row] for row in rows]
    widths = [max(map(len, column)) for column in zip(*texts, strict=True)]
    for row in texts:
        print(row[0].ljust(widths[0]), *(cell.rjust(width) for cell, width in zip(row[1:], widths[1:], strict=True)))
    if options.json:
        settings = {key: str(value) if isinstance(value, Path) else value for key, value in vars(options).items()}
        content = {"settings": settings, "machine": machine(), "table": [header, *rows], "data": data}
        options.json.write_text(json.dumps(content, indent=1))
        print(f"written to {options.json}")


def matmul_rate(dtype: str, size: int = 4096, repeats: int = 5) -> float:
    """FLOP/s that this machine's square matrix product reaches in `dtype`, the best of `repeats`."""
    import torch

    device = "cuda" if torch.cuda.is_available() else "cpu"
    one, other = (torch.randn(size, size, device=device).to(getattr(torch, dtype)) for _ in range(2))
    return 2 * size**3 / min(seconds(lambda: one @ other) for _ in range(repeats + 1))


def machine() -> dict[str, Any]:
    """What the numbers depend on beside the code."""
    from importlib.metadata import version

    info = Path("/proc/cpuinfo").read_text() if Path("/proc/cpuinfo").exists() else ""
    models = [line.partition(":")[2].strip() for line in info.splitlines() if line.startswith("model name")]
    commit = subprocess.run(["git", "describe", "--always", "--dirty"], cwd=REPOSITORY, capture_output=True, text=True)
    return {
        "cpu": f"{len(os.sched_getaffinity(0))} x {models[0] if models else platform.processor()}",
        "load": os.getloadavg()[0],
        "threads": os.environ.get("OMP_NUM_THREADS", "default"),
        "python": platform.python_version(),
        **{package: version(package) for package in ("torch", "transformers")},
        "commit": commit.stdout.strip(),
        "date": time.strftime("%Y-%m-%d %H:%M"),
    }


# -- memory of a process ---------------------------------------------------------------------------------------------


def peak_above(work: Callable[[], Any]) -> float:
    """MiB by which `work` raises this process's (or the GPU's) memory at its peak; call it in a process of its own.

    On Linux the peak is the kernel's high-water mark, set back just before; elsewhere getrusage's, which remembers more.
    """
    import resource

    import torch

    if torch.cuda.is_available():
        torch.cuda.reset_peak_memory_stats()
        before = torch.cuda.memory_allocated()
        work()
        return (torch.cuda.max_memory_allocated() - before) / 2**20
    mark = Path("/proc/self/clear_refs")
    if mark.exists():
        mark.write_text("5")
        before = _status("VmRSS")
        work()
        return (_status("VmHWM") - before) / 2**10
    unit = 2**20 if sys.platform == "darwin" else 2**10
    before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    work()
    return (resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before) / unit


def _status(field: str) -> int:
    lines = Path("/proc/self/status").read_text().splitlines()
    return next(int(line.split()[1]) for line in lines if line.startswith(field))


def in_child(script: str, arguments: Mapping[str, Any]) -> dict[str, Any]:
    """Run `script --child JSON` in a process of its own and read the JSON of its last line; {"error": ...} when it dies."""
    command = [sys.executable, script, "--child", json.dumps(arguments)]
    result = subprocess.run(command, capture_output=True, text=True)
    if result.returncode:
        last = (result.stderr.strip().splitlines() or ["killed"])[-1]
        return {"error": f"exit {result.returncode}: {last[:150]}"}
    return json.loads(result.stdout.strip().splitlines()[-1])
