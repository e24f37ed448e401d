"""What a server counts, and how Prometheus reads it. Knows nothing of policies and sockets."""

from __future__ import annotations

from bisect import bisect_left
from collections import Counter

BOUNDS = (0.001, 0.002, 0.005, 0.01, 0.02, 0.05, 0.1, 0.2, 0.5, 1.0, 2.0, 5.0)
"""Of the histograms, in seconds."""
HELP = {
    "connections": "Clients that are connected.",
    "waiting": "Requests that wait for the policy.",
    "connections_total": "Clients that ever connected.",
    "requests_total": "Observations that were answered with actions.",
    "refused_total": "Messages and connections that were refused, by reason.",
    "batches_total": "Runs of the policy; several clients may share one.",
    "guard_total": "Observations that the export's guard judged, found outside of the calibration, or repeated.",
    "recorded_total": "Observations that the log has taken.",
    "dropped_total": "Observations that the log has lost, since the disk was too slow or full, or their form another.",
    "policy_seconds": "Time that the policy took for one run.",
    "request_seconds": "Time from a whole request to its reply.",
}


class Histogram:
    """How many durations were at most as long as each of the bounds."""

    def __init__(self) -> None:
        self.counts = [0] * (len(BOUNDS) + 1)
        self.total = 0.0

    def add(self, seconds: float) -> None:
        """Count one duration."""
        self.counts[bisect_left(BOUNDS, seconds)] += 1
        self.total += seconds


class Metrics:
    """Counters, gauges and histograms by name; those with a reason are kept by it."""

    def __init__(self) -> None:
        self.values: Counter[tuple[str, str]] = Counter()
        self.histograms = {"policy_seconds": Histogram(), "request_seconds": Histogram()}

    def count(self, name: str, by: int = 1, reason: str = "") -> None:
        """Add to a counter, or to a gauge, which may go down."""
        self.values[name, reason] += by

    def text(self) -> str:
        """In Prometheus' text format."""
        lines = []
        for name, words in HELP.items():
            if name in self.histograms:
                lines += _histogram(name, words, self.histograms[name])
                continue
            kind = "counter" if name.endswith("_total") else "gauge"
            lines += [f"# HELP blockcache_{name} {words}", f"# TYPE blockcache_{name} {kind}"]
            found = {reason: value for (key, reason), value in self.values.items() if key == name} or {"": 0}
            for reason, value in sorted(found.items()):
                label = f'{{reason="{reason}"}}' if reason else ""
                lines.append(f"blockcache_{name}{label} {value}")
        return "\n".join(lines) + "\n"


def _histogram(name: str, words: str, histogram: Histogram) -> list[str]:
    lines = [f"# HELP blockcache_{name} {words}", f"# TYPE blockcache_{name} histogram"]
    below = 0
    for bound, count in zip((*map(str, BOUNDS), "+Inf"), histogram.counts, strict=True):
        below += count
        lines.append(f'blockcache_{name}_bucket{{le="{bound}"}} {below}')
    return [*lines, f"blockcache_{name}_sum {histogram.total:.6f}", f"blockcache_{name}_count {below}"]
