"""Policies of our own: DP-T, its sampler loop, and the directories they are kept in."""

from blockcache.models.dpt.checkpoint import load_policy, save_policy, shipped_policies
from blockcache.models.dpt.policy import DiffusionTransformerPolicy, DPTConfig

__all__ = ["DPTConfig", "DiffusionTransformerPolicy", "load_policy", "save_policy", "shipped_policies"]
