"""Simulators behind one small protocol, and rollouts of any callable in them."""

from blockcache.tasks.base import (
    Task,
    TaskEntry,
    TaskSpec,
    expert_factory,
    make_task,
    task_names,
    task_spec,
)
from blockcache.tasks.rollout import Rollout, rollout

__all__ = [
    "Rollout",
    "Task",
    "TaskEntry",
    "TaskSpec",
    "expert_factory",
    "make_task",
    "rollout",
    "task_names",
    "task_spec",
]
