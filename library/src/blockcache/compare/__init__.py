"""Methods by name, made ready for a policy and compared in paired rollouts. Knows nothing of plots."""
