"""The paper's suites, benchmarks and other whole comparisons. Knows nothing of plots."""
