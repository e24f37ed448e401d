"""Schedules, what they cost, what reuse means, and the plans they become. Values only; no torch."""

from blockcache.schedule.plan import Plan, Reuse, compile_plan
from blockcache.schedule.schedule import Schedule, Strategy, generation_flops

__all__ = ["Plan", "Reuse", "Schedule", "Strategy", "compile_plan", "generation_flops"]
