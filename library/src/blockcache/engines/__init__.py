"""Engines execute a plan: patched (the reference), loop and onnx."""

from blockcache.engines.accelerate import accelerate, handle_of
from blockcache.engines.export import export_policy, open_export
from blockcache.engines.handle import Acceleration, Stats

__all__ = ["Acceleration", "Stats", "accelerate", "export_policy", "handle_of", "open_export"]
