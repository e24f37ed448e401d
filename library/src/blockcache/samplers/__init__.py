"""Samplers: settings, tables of coefficients, and the one step. Knows nothing of models.

`samplers.diffusers` makes samplers of diffusers' schedulers and back; it is imported where it is needed.
"""

from blockcache.samplers.base import SAMPLERS, ChosenSampler, SamplerConfig, fewer_steps, sampler_names, table
from blockcache.samplers.coefficients import Arithmetic, Coefficients, Guide, SamplerTable, step
from blockcache.samplers.diffusion import DDIM, DDPM, Diffusion, DPMSolver, Euler, SDEDPMSolver
from blockcache.samplers.fitted import Fitted

__all__ = [
    "DDIM",
    "DDPM",
    "SAMPLERS",
    "Arithmetic",
    "ChosenSampler",
    "Coefficients",
    "DPMSolver",
    "Diffusion",
    "Euler",
    "Fitted",
    "Guide",
    "SDEDPMSolver",
    "SamplerConfig",
    "SamplerTable",
    "fewer_steps",
    "sampler_names",
    "step",
    "table",
]
