"""How long each method takes for one chunk, all timed in turn in one run. A frozen value with a JSON file format.

Apart from the results, because two runs never agree on it. Knows nothing of torch or of how methods are timed.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Annotated, Any

import numpy as np

from blockcache.files import Count, Fields, Format, Limit, PathLike, dict_of
from blockcache.fingerprint import Fingerprint
from blockcache.measure.latency import Latency

MACHINE = Fields({"processor": str, "cores": Count}, {"load_average": list[float] | None}, others=True)
PERCENTILES = (50, 95, 99)
_SECONDS = Annotated[float, Limit(1e-9)]
_TIMED = Fields({"seconds": Annotated[list[_SECONDS], Limit(1)]}, {f"p{percent}": _SECONDS for percent in PERCENTILES})
FORMAT = Format(
    "blockcache.timings",
    "timings file",
    {"policy": Fingerprint, "machine": MACHINE, "setting": str, "methods": dict_of(_TIMED)},
    again="time the methods again",
)


@dataclass(frozen=True, eq=False)
class Timings:
    """Seconds per chunk of several methods.

    Args:
        policy: Whose methods they are.
        machine: What they were timed on.
        setting: How they were timed, in words.
        seconds: By method, all of one interleaved run.
    """

    policy: Fingerprint
    machine: Mapping[str, Any]
    setting: str
    seconds: Mapping[str, Latency]

    def save(self, path: PathLike) -> None:
        """Write the JSON file, atomically."""
        methods = {
            name: {f"p{percent}": latency.percentile(percent) for percent in PERCENTILES}
            | {"seconds": latency.seconds.tolist()}
            for name, latency in self.seconds.items()
        }
        about = {"policy": self.policy.to_dict(), "machine": self.machine, "setting": self.setting}
        FORMAT.save(path, {**about, "methods": methods})

    @classmethod
    def load(cls, path: PathLike) -> Timings:
        """Read a file that `save` wrote; methods of different rounds are refused."""
        value = FORMAT.load(path)
        with FORMAT.reading(path):
            seconds = {name: Latency(np.asarray(item["seconds"])) for name, item in value["methods"].items()}
            if len({len(item.seconds) for item in seconds.values()}) > 1:
                raise ValueError("all methods are timed in the same rounds, got different numbers of them")
            return cls(value["policy"], value["machine"], value["setting"], seconds)

    def ms(self, method: str) -> float | None:
        """A method's median in milliseconds; None where it was not timed."""
        return self.seconds[method].p50 * 1e3 if method in self.seconds else None

    def over(self, method: str, baseline: str) -> float | None:
        """How many times faster than the baseline, in the same rounds."""
        if method not in self.seconds or baseline not in self.seconds:
            return None
        return self.seconds[method].over(self.seconds[baseline])
