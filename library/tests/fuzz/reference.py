"""DP-T under block caching, once more: written from the paper's method and the samplers' equations, in numpy, float64.

Shares no code with blockcache and is in no hurry. It is given a policy's tensors and settings as plain values, the update
steps of each block, and the noise.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
from scipy.special import erf

Array = Any
Weights = Mapping[str, Array]


def generate(
    weights: Weights, config: Mapping[str, Any], updates: Mapping[str, Sequence[int]], obs: Array, noise: Array
) -> Array:
    """The whole chunk (B, horizon, A) in robot units; noise (1 + draws, B, horizon, D) in the order of execution."""
    seen = obs * weights["normalizer.params_dict.obs.scale"] + weights["normalizer.params_dict.obs.offset"]
    observed, cached = config["n_obs_steps"], {}
    sampler = Sampler(config["sampler"])
    x, drawn = noise[0], iter(noise[1:])
    for number, t in enumerate(sampler.timesteps):
        x = _inpaint(x, seen, observed, config)
        output = denoiser(weights, config, updates, cached, number, x, t, seen)
        x = sampler.step(number, x, output, next(drawn) if sampler.draws(number) else None)
    assert next(drawn, None) is None, "noise is left over"
    x = _inpaint(x, seen, observed, config)[..., : config["action_dim"]]
    return (x - weights["normalizer.params_dict.action.offset"]) / weights["normalizer.params_dict.action.scale"]


def _inpaint(x: Array, seen: Array, observed: int, config: Mapping[str, Any]) -> Array:
    """The encoder-only form sees its observations as a part of the sample that is known."""
    if config["obs_as_cond"]:
        return x
    x = x.copy()
    x[:, :observed, config["action_dim"] :] = seen
    return x


# -- the denoiser


def denoiser(
    w: Weights,
    config: Mapping[str, Any],
    updates: Mapping[str, Sequence[int]],
    cached: dict[str, Array],
    number: int,
    x: Array,
    t: float,
    seen: Array,
) -> Array:
    """One step; what a block adds is taken from `cached` where `number` is none of its update steps."""
    heads, batch = config["n_head"], len(x)
    time = np.repeat(_embedding(t, config["n_emb"])[None, None], batch, axis=0)
    stream = _linear(x, w, "model.input_emb")
    if not config["time_as_cond"]:
        stream = np.concatenate([time, stream], axis=1)
    stream = stream + w["model.pos_emb"]
    tokens = stream.shape[1]
    causal = np.arange(tokens)[None, :] > np.arange(tokens)[:, None] if config["causal_attn"] else None
    if not config["time_as_cond"]:
        for layer in range(config["n_layer"]):
            name = f"model.encoder.layers.{layer}"
            normed = (("SA", "norm1"), ("FFN", "norm2"))
            for kind, norm in normed:
                block = f"layers.{layer}.{kind}"
                if number in updates[block]:
                    inner = _norm(stream, w, f"{name}.{norm}")
                    attends = kind == "SA"
                    cached[block] = (
                        _attention(inner, inner, w, f"{name}.self_attn", heads, causal)
                        if attends
                        else _feed_forward(inner, w, name)
                    )
                stream = stream + cached[block]
        return _linear(_norm(stream, w, "model.ln_f"), w, "model.head")[:, 1:]
    memory = time
    if config["obs_as_cond"]:
        memory = np.concatenate([time, _linear(seen, w, "model.cond_obs_emb")], axis=1)
    memory = memory + w["model.cond_pos_emb"]
    memory = _encode(memory, w, config)
    hidden = None
    if config["causal_attn"] and config["obs_as_cond"]:  # an action sees the time, and observations up to its own step
        hidden = np.arange(memory.shape[1])[None, :] - 1 > np.arange(tokens)[:, None]
    for layer in range(config["n_layer"]):
        name = f"model.decoder.layers.{layer}"
        for kind, norm in (("SA", "norm1"), ("CA", "norm2"), ("FFN", "norm3")):
            block = f"layers.{layer}.{kind}"
            if number in updates[block]:
                inner = _norm(stream, w, f"{name}.{norm}")
                if kind == "SA":
                    cached[block] = _attention(inner, inner, w, f"{name}.self_attn", heads, causal)
                elif kind == "CA":
                    cached[block] = _attention(inner, memory, w, f"{name}.multihead_attn", heads, hidden)
                else:
                    cached[block] = _feed_forward(inner, w, name)
            stream = stream + cached[block]
    return _linear(_norm(stream, w, "model.ln_f"), w, "model.head")


def _encode(memory: Array, w: Weights, config: Mapping[str, Any]) -> Array:
    if config["n_cond_layers"] == 0:
        inner = _linear(memory, w, "model.encoder.0")
        return _linear(inner * np.tanh(np.logaddexp(0, inner)), w, "model.encoder.2")  # Mish
    for layer in range(config["n_cond_layers"]):
        name = f"model.encoder.layers.{layer}"
        inner = _norm(memory, w, f"{name}.norm1")
        memory = memory + _attention(inner, inner, w, f"{name}.self_attn", config["n_head"], None)
        memory = memory + _feed_forward(_norm(memory, w, f"{name}.norm2"), w, name)
    return memory


def _embedding(t: float, width: int) -> Array:
    half = width // 2
    angle = t * np.exp(-math.log(10_000) * np.arange(half) / (half - 1))
    return np.concatenate([np.sin(angle), np.cos(angle)])


def _linear(x: Array, w: Weights, name: str) -> Array:
    return x @ w[f"{name}.weight"].T + w[f"{name}.bias"]


def _norm(x: Array, w: Weights, name: str) -> Array:
    centred = x - x.mean(axis=-1, keepdims=True)
    spread = np.sqrt((centred**2).mean(axis=-1, keepdims=True) + 1e-5)
    return centred / spread * w[f"{name}.weight"] + w[f"{name}.bias"]


def _feed_forward(x: Array, w: Weights, name: str) -> Array:
    inner = _linear(x, w, f"{name}.linear1")
    return _linear(inner * 0.5 * (1 + erf(inner / math.sqrt(2))), w, f"{name}.linear2")


def _attention(x: Array, memory: Array, w: Weights, name: str, heads: int, hidden: Array) -> Array:
    """One head after the other; `hidden` (tokens, memory) says what a token does not see."""
    width = x.shape[-1]
    size = width // heads
    q, k, v = (
        source @ w[f"{name}.in_proj_weight"][part * width : (part + 1) * width].T
        + w[f"{name}.in_proj_bias"][part * width : (part + 1) * width]
        for part, source in enumerate((x, memory, memory))
    )
    found = []
    for head in range(heads):
        own = slice(head * size, (head + 1) * size)
        scores = q[..., own] @ k[..., own].transpose(0, 2, 1) / math.sqrt(size)
        if hidden is not None:
            scores = np.where(hidden, -np.inf, scores)
        weight = np.exp(scores - scores.max(axis=-1, keepdims=True))
        found.append(weight / weight.sum(axis=-1, keepdims=True) @ v[..., own])
    return _linear(np.concatenate(found, axis=-1), w, f"{name}.out_proj")


# -- samplers


class Sampler:
    """One generation's steps, from the settings of a policy's config (names as in diffusers)."""

    def __init__(self, settings: Mapping[str, Any]) -> None:
        self.s, self.kind, self.count = settings, settings["type"], settings["num_inference_steps"]
        self.placed = settings.get("timesteps") is not None
        self.x0_before: Array = None
        if self.kind == "euler":
            self.timesteps = list(settings["timesteps"]) if self.placed else [k / self.count for k in range(self.count)]
            return
        self.train = settings["num_train_timesteps"]
        self.timesteps = list(settings["timesteps"]) if self.placed else self._spaced()
        # the samplers' noise levels are those of diffusers: kept in single precision, whatever is computed with them
        alphas = np.float32(1) - self._betas().astype(np.float32)
        self.power = np.cumprod(alphas.astype(np.float64)).astype(np.float32).astype(np.float64)

    def draws(self, number: int) -> bool:
        if self.kind == "ddpm":
            return self.timesteps[number] > 0
        return self.kind == "sde-dpmsolver++" or (self.kind == "ddim" and self.s["eta"] > 0)

    def step(self, number: int, x: Array, output: Array, noise: Array) -> Array:
        t = self.timesteps[number]
        if self.kind == "euler":
            return x + ([*self.timesteps, 1.0][number + 1] - t) * output
        signal, spread = math.sqrt(self._power(t)), math.sqrt(1 - self._power(t))
        if self.s["prediction_type"] == "epsilon":
            x0, eps = (x - spread * output) / signal, output
        elif self.s["prediction_type"] == "sample":
            x0, eps = output, (x - signal * output) / spread
        else:
            x0, eps = signal * x - spread * output, signal * output + spread * x
        if self.s["clip_sample"]:
            x0 = np.clip(x0, -self.s["clip_sample_range"], self.s["clip_sample_range"])
        after = getattr(self, {"ddpm": "_ddpm", "ddim": "_ddim"}.get(self.kind, "_dpm"))(number, x, x0, eps, noise)
        self.x0_before = x0
        return after

    def _ddpm(self, number: int, x: Array, x0: Array, eps: Array, noise: Array) -> Array:
        now = self._power(self.timesteps[number])
        after = self._power(self.timesteps[number + 1]) if number + 1 < self.count else 1.0
        beta = 1 - now / after
        mean = math.sqrt(after) * beta / (1 - now) * x0 + math.sqrt(now / after) * (1 - after) / (1 - now) * x
        if noise is None:
            return mean
        small = max((1 - after) / (1 - now) * beta, 1e-20)
        return mean + math.sqrt(beta if self.s["variance_type"] == "fixed_large" else small) * noise

    def _ddim(self, number: int, x: Array, x0: Array, eps: Array, noise: Array) -> Array:
        now, clean = self._power(self.timesteps[number]), 1.0 if self.s["set_alpha_to_one"] else self.power[0]
        if self.placed:
            after = self._power(self.timesteps[number + 1]) if number + 1 < self.count else clean
        else:  # diffusers goes on by a fixed stride, wherever the next timestep is
            target = int(self.timesteps[number]) - self.train // self.count
            after = self.power[target] if target >= 0 else clean
        std = self.s["eta"] * math.sqrt((1 - after) / (1 - now) * (1 - now / after))
        mean = math.sqrt(after) * x0 + math.sqrt(max(1 - after - std**2, 0.0)) * eps
        return mean if noise is None else mean + std * noise

    def _dpm(self, number: int, x: Array, x0: Array, eps: Array, noise: Array) -> Array:
        last = number == self.count - 1
        levels = [self._level(t) for t in self.timesteps]
        ends = (1.0, 0.0) if self.s["final_sigmas_type"] == "zero" else self._level(0)
        (signal, spread), (signal_after, spread_after) = levels[number], [*levels, ends][number + 1]
        h = math.inf if spread_after == 0 else math.log(signal_after / spread_after) - math.log(signal / spread)
        stochastic = self.kind == "sde-dpmsolver++"
        gain = signal_after * (1 - math.exp(-2 * h if stochastic else -h))
        found = spread_after / spread * (math.exp(-h) if stochastic else 1.0) * x + gain * x0
        short = self.s["final_sigmas_type"] == "zero" or (self.s["lower_order_final"] and self.count < 15)
        if self.s["solver_order"] == 2 and number > 0 and not (last and short):
            before = levels[number - 1]
            before_h = math.log(signal / spread) - math.log(before[0] / before[1])
            found = found + 0.5 * gain * (x0 - self.x0_before) * h / before_h  # 0 for a last step from t = 0 to t = 0
        return found + spread_after * math.sqrt(1 - math.exp(-2 * h)) * noise if stochastic else found

    def _level(self, t: float) -> tuple[float, float]:
        return math.sqrt(self._power(t)), math.sqrt(1 - self._power(t))

    def _power(self, t: float) -> float:
        """The share of the signal's variance; between two training steps the log of signal over noise is a line."""
        low = math.floor(t)
        if t == low:
            return float(self.power[low])
        ends = [math.log(self.power[place] / (1 - self.power[place])) for place in (low, low + 1)]
        return 1 / (1 + math.exp(-(ends[0] + (t - low) * (ends[1] - ends[0]))))

    def _betas(self) -> Array:
        if self.s["beta_schedule"] == "squaredcos_cap_v2":
            bar = np.cos((np.arange(self.train + 1) / self.train + 0.008) / 1.008 * np.pi / 2) ** 2
            return np.minimum(1 - bar[1:] / bar[:-1], 0.999)
        power = 0.5 if self.s["beta_schedule"] == "scaled_linear" else 1.0
        return np.linspace(self.s["beta_start"] ** power, self.s["beta_end"] ** power, self.train) ** (1 / power)

    def _spaced(self) -> list[float]:
        count, more = self.count, int("solver" in self.kind)  # the solvers lay out one point more, the lowest
        if self.s["timestep_spacing"] == "trailing":
            return [round(self.train - k * self.train / count) - 1 for k in range(count)]
        if self.s["timestep_spacing"] == "linspace":
            return [float(t) for t in np.linspace(0, self.train - 1, count + more).round()[::-1][:count]]
        stride = self.train // (count + more)
        return [(count + more - 1 - k) * stride + self.s["steps_offset"] for k in range(count)]


def bubbling_union(updates: Mapping[str, Sequence[int]], upstream: Sequence[str]) -> dict[str, tuple[int, ...]]:
    """C(u) takes in the update steps of every FFN strictly after u."""
    names, found = list(updates), {}
    for place, name in enumerate(names):
        behind = [updates[other] for other in names[place + 1 :] if other.endswith("FFN")] if name in upstream else []
        found[name] = tuple(sorted({*updates[name], *(step for steps in behind for step in steps)}))
    return found
