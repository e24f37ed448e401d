"""The laboratory's files as the report's page sees them: what the entry points `blockcache.files` name. No torch."""

from __future__ import annotations

from blockcache.report.overview.sources import Brought
from blockcache_lab.analysis.file import Analysis
from blockcache_lab.pages import performance
from blockcache_lab.pages.analysis import brought
from blockcache_lab.studies.distances import FrontierDistances


def read_analysis(path: str) -> Brought:
    """The file of an analysis."""
    return brought(Analysis.load(path))


def read_distances(path: str) -> Brought:
    """The file of a suite's distances, of which the page shows the energy beyond spread."""
    found = FrontierDistances.load(path)
    shifts = {name: one.distances.beyond_spread.mean for name, one in found.methods.items()}
    return Brought("distances", "", found.policy, "blockcache paper distances POLICY", found, shifts=shifts)


def read_performance(path: str) -> Brought:
    """The file of `paper performance`, of which the page shows the benchmark."""
    found = performance.FORMAT.load(path)
    return Brought("performance", "", None, "blockcache paper performance", found, bench=found["bench"])
