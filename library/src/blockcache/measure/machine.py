"""What this machine is and how fast it can be: the yardstick behind every figure of a benchmark."""

from __future__ import annotations

import os
import platform
import time
from pathlib import Path
from typing import Any

from blockcache.extras import installed_version
from blockcache_runtime.cores import cores


def describe() -> dict[str, Any]:
    """Processor, cores, system, and versions of what is measured with."""
    return {
        "processor": _processor(),
        "cores": cores(),
        "system": platform.platform(terse=True),
        "python": platform.python_version(),
        "torch": installed_version("torch"),
        "onnxruntime": installed_version("onnxruntime"),
        "diffusers": installed_version("diffusers"),
        "load_average": list(os.getloadavg()) if hasattr(os, "getloadavg") else None,
    }


def peak_gflops(threads: int, size: int = 1024, seconds: float = 1.0) -> float:
    """The best rate of a large float32 matrix product: a peak that small products cannot reach."""
    import torch  # here: describing a machine needs no torch

    before = torch.get_num_threads()
    torch.set_num_threads(threads)
    try:
        a, b = torch.randn(size, size), torch.randn(size, size)
        best, started = float("inf"), time.perf_counter()
        while time.perf_counter() - started < seconds:
            now = time.perf_counter()
            a @ b
            best = min(best, time.perf_counter() - now)
    finally:
        torch.set_num_threads(before)
    return 2 * size**3 / best / 1e9


def _processor() -> str:
    info = Path("/proc/cpuinfo")
    if info.exists():
        for line in info.read_text().splitlines():
            if line.startswith("model name"):
                return line.partition(":")[2].strip()
    return platform.processor()
