"""Samplers: settings, tables of coefficients, and the one step. Knows nothing of models.

`samplers.diffusers` makes samplers of diffusers' schedulers and back; it is imported by who needs it.
"""

from blockcache.samplers.base import SAMPLERS, ChosenSampler, SamplerConfig, table
from blockcache.samplers.coefficients import Arithmetic, Coefficients, SamplerTable, step
from blockcache.samplers.diffusion import DDIM, DDPM, Diffusion
from blockcache.samplers.dpmsolver import DPMSolver, SDEDPMSolver
from blockcache.samplers.euler import Euler
from blockcache.samplers.fewer_steps import fewer_steps, sampler_names
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
    "SDEDPMSolver",
    "SamplerConfig",
    "SamplerTable",
    "fewer_steps",
    "sampler_names",
    "step",
    "table",
]
