"""Why caching works and where it hurts: measurements as plain values. Knows nothing of plots."""

from blockcache.analysis.caching_error import CachingError, caching_error

__all__ = ["CachingError", "caching_error"]
