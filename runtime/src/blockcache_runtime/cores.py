"""How many cores there are to use. Knows nothing of torch."""

from __future__ import annotations

import os


def cores() -> int:
    """Those that this process may run on, where the system says so; a container often has fewer than the machine."""
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
