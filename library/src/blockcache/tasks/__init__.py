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
from blockcache.tasks.clock import Clock, ClockedRollout, clocked_rollout
from blockcache.tasks.rollout import Rollout, rollout

__all__ = [
    "Clock",
    "ClockedRollout",
    "Rollout",
    "Task",
    "TaskEntry",
    "TaskSpec",
    "clocked_rollout",
    "expert_factory",
    "make_task",
    "rollout",
    "task_names",
    "task_spec",
]
