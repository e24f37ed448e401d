"""Every file that a run leaves behind: rollouts, timings, tunings, checks, analyses. Values and formats, no torch."""
