"""Samplers as tables of coefficients. Knows nothing of models."""

from blockcache.samplers.core import SamplerConfig, SamplerTable, step, table

__all__ = ["SamplerConfig", "SamplerTable", "step", "table"]
