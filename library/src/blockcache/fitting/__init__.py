"""Samplers of few steps for one policy: placed where they do best, or fitted through the generation."""

from blockcache.fitting.clouds import Clouds
from blockcache.fitting.descent import Effort, fit, fit_sampler
from blockcache.fitting.placement import place, place_steps

__all__ = ["Clouds", "Effort", "fit", "fit_sampler", "place", "place_steps"]
