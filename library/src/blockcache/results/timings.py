"""How long each method takes for one chunk, all timed in turn in one run. A frozen value with a JSON file format.

Apart from the results, because two runs never agree on it. Knows nothing of torch or of how methods are timed.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Annotated, Any

import numpy as np

from blockcache.files import Count, Fields, Format, JsonFile, Limit, dict_of
from blockcache.fingerprint import Fingerprint
from blockcache.measure.latency import Latency

MACHINE = Fields({"processor": str, "cores": Count}, {"load_average": list[float] | None}, others=True)
PERCENTILES = (50, 95, 99)
_SECONDS = Annotated[float, Limit(1e-9)]
_TIMED = Fields({"seconds": Annotated[list[_SECONDS], Limit(1)]}, {f"p{percent}": _SECONDS for percent in PERCENTILES})


@dataclass(frozen=True, eq=False)
class Timings(JsonFile):
    """Seconds per chunk of several methods.

    The file has their percentiles beside them, for people.

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

    FORMAT = Format(
        "blockcache.timings",
        "timings file",
        {"policy": Fingerprint, "machine": MACHINE, "setting": str, "methods": dict_of(_TIMED)},
        again="time the methods again",
    )

    def content(self) -> dict[str, Any]:
        methods = {
            name: {f"p{percent}": latency.percentile(percent) for percent in PERCENTILES}
            | {"seconds": latency.seconds.tolist()}
            for name, latency in self.seconds.items()
        }
        about = {"policy": self.policy.to_dict(), "machine": self.machine, "setting": self.setting}
        return {**about, "methods": methods}

    @classmethod
    def of_content(cls, content: dict[str, Any]) -> Timings:
        seconds = {name: Latency(np.asarray(item["seconds"])) for name, item in content.pop("methods").items()}
        if len({len(item.seconds) for item in seconds.values()}) > 1:
            raise ValueError("all methods are timed in the same rounds, got different numbers of them")
        return cls(**content, seconds=seconds)

    @property
    def rounds(self) -> int:
        """How often each method was timed."""
        return len(next(iter(self.seconds.values())).seconds)

    def ms(self, method: str) -> float | None:
        """A method's median in milliseconds; None where it was not timed."""
        return self.seconds[method].p50 * 1e3 if method in self.seconds else None

    def over(self, method: str, baseline: str) -> float | None:
        """How many times faster than the baseline, in the same rounds."""
        if method not in self.seconds or baseline not in self.seconds:
            return None
        return self.seconds[method].over(self.seconds[baseline])
