"""Policies, engines, tasks and statistics put together: what is measured, and the files it is written to."""
