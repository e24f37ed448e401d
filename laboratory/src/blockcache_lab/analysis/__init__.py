"""Why caching works and where it hurts: measurements as plain values. Knows nothing of plots."""
