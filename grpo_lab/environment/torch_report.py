"""What torch sees, as JSON on standard output. Run as a process of its own, by its file's name: an import that hangs or
crashes stays there, and so does the memory that looking at a GPU takes."""

from __future__ import annotations

import ctypes
import json
import warnings
from typing import Any


def report() -> dict[str, Any]:
    """torch's build, whether CUDA works and why not, the driver's CUDA version (12040 = 12.4), the visible GPUs in bytes."""
    import torch

    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        usable = torch.cuda.is_available()
    return {
        "version": torch.__version__,
        "cuda": torch.version.cuda,
        "hip": torch.version.hip,
        "usable": usable,
        "reason": " ".join(str(caught[0].message).split())[:200] if caught else "",
        "driver": _driver(),
        "gpus": [_gpu(index) for index in range(torch.cuda.device_count())] if usable else [],
    }


def _gpu(index: int) -> dict[str, Any]:
    import torch

    free, total = torch.cuda.mem_get_info(index)
    name, capability = torch.cuda.get_device_name(index), torch.cuda.get_device_capability(index)
    return {"name": name, "free": free, "total": total, "capability": capability}


def _driver() -> int:
    """The newest CUDA that NVIDIA's driver here can run, 0 without a driver."""
    version = ctypes.c_int(0)
    try:
        ctypes.CDLL("libcuda.so.1").cuDriverGetVersion(ctypes.byref(version))
    except (OSError, AttributeError):
        return 0
    return version.value


if __name__ == "__main__":
    print(json.dumps(report()))
