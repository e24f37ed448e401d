"""Latency, the machine, statistics, action errors: of plain callables and arrays. Knows nothing of policies."""
