"""The laboratory: the paper's suites, analyses and pages, training, and simulators beyond Push-T."""
