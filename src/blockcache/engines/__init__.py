"""Engines execute a plan: patched (the reference), loop and onnx."""

from blockcache.engines.accelerate import Acceleration, accelerate
from blockcache.engines.stats import Stats

__all__ = ["Acceleration", "Stats", "accelerate"]
