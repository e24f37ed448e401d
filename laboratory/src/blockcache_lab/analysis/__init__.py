"""Why caching works and where it hurts: measurements as plain values. Knows nothing of plots.

What needs torch is imported when it is first asked for, so that pages can be made of a file without it.
"""

from importlib import import_module
from typing import TYPE_CHECKING, Any

from blockcache.results.analysis import Analysis
from blockcache.results.analysis_section import AnalysisError, Section
from blockcache.results.analysis_sections import SECTIONS

if TYPE_CHECKING:
    from blockcache_lab.analysis.caching import CachingError, caching_error

__all__ = ["SECTIONS", "Analysis", "AnalysisError", "CachingError", "Section", "caching_error"]

_HOMES = {"CachingError": "caching", "caching_error": "caching"}


def __getattr__(name: str) -> Any:
    if name not in _HOMES:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    value = globals()[name] = getattr(import_module(f"{__name__}.{_HOMES[name]}"), name)
    return value
