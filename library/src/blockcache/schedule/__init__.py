"""Schedules, what they cost, what reuse means, and the plans they become. Values only; no torch."""

from blockcache.schedule.plan import Plan, compile_plan
from blockcache.schedule.reuse import Reuse
from blockcache.schedule.schedule import Schedule, Strategy, check_updates, generation_flops

__all__ = ["Plan", "Reuse", "Schedule", "Strategy", "check_updates", "compile_plan", "generation_flops"]
