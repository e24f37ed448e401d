"""Blocks, schedules, what they cost, what reuse means, and the plans they become. Values only; no torch."""

from blockcache.schedule.block import Block
from blockcache.schedule.plan import Plan, compile_plan
from blockcache.schedule.reuse import Reuse, Strategy
from blockcache.schedule.schedule import Schedule, check_updates

__all__ = ["Block", "Plan", "Reuse", "Schedule", "Strategy", "check_updates", "compile_plan"]
