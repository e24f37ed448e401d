"""Simulators behind one small protocol, and rollouts of any callable in them."""

from blockcache.tasks.base import Task, TaskSpec, make_task, task_names, task_spec

__all__ = ["Task", "TaskSpec", "make_task", "task_names", "task_spec"]
