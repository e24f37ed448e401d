"""Figures and pages, from results files only. Knows nothing of torch."""
