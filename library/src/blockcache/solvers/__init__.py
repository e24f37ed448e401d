"""Where to compute: from recordings to schedules and rules. Arrays and values in, values out; no torch."""

from blockcache.solvers.bac import adaptive, bubbling_union, consecutive, uniform
from blockcache.solvers.recording import Recording
from blockcache.solvers.solve import METHODS, OBJECTIVES, PAPER_METHODS, most_changing, solve
from blockcache.solvers.teacache import TeaCacheRule, fit_teacache

__all__ = [
    "METHODS",
    "OBJECTIVES",
    "PAPER_METHODS",
    "Recording",
    "TeaCacheRule",
    "adaptive",
    "bubbling_union",
    "consecutive",
    "fit_teacache",
    "most_changing",
    "solve",
    "uniform",
]
