"""Where to compute: from recordings to schedules and rules. Arrays and values in, values out; no torch."""

from blockcache.schedule.union import bubbling_union
from blockcache.solvers.acs import adaptive, consecutive, uniform
from blockcache.solvers.recording import Recording
from blockcache.solvers.solve import METHODS, OBJECTIVES, PAPER_METHODS, most_changing, solve
from blockcache.solvers.teacache import Rule, fit_teacache

__all__ = [
    "METHODS",
    "OBJECTIVES",
    "PAPER_METHODS",
    "Recording",
    "Rule",
    "adaptive",
    "bubbling_union",
    "consecutive",
    "fit_teacache",
    "most_changing",
    "solve",
    "uniform",
]
