"""Samplers: settings, tables of coefficients, and the one step. Knows nothing of models."""

from blockcache.samplers.base import SAMPLERS, SamplerConfig, table
from blockcache.samplers.chosen import ChosenSampler
from blockcache.samplers.coefficients import Coefficients, SamplerTable
from blockcache.samplers.ddim import DDIM
from blockcache.samplers.ddpm import DDPM
from blockcache.samplers.diffusers import from_diffusers, to_diffusers
from blockcache.samplers.diffusion import Diffusion
from blockcache.samplers.dpmsolver import DPMSolver
from blockcache.samplers.euler import Euler
from blockcache.samplers.fewer_steps import fewer_steps, sampler_names
from blockcache.samplers.fitted import Fitted
from blockcache.samplers.sde_dpmsolver import SDEDPMSolver
from blockcache.samplers.step import Arithmetic, NumpyArithmetic, step

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
    "NumpyArithmetic",
    "SDEDPMSolver",
    "SamplerConfig",
    "SamplerTable",
    "fewer_steps",
    "from_diffusers",
    "sampler_names",
    "step",
    "table",
    "to_diffusers",
]
