"""What is watched in a generation, and what that costs: toy programs and modules of which one step is struck."""

import math

import numpy as np
import pytest
import torch
from torch import nn

import blockcache as bc
import blockcache_runtime as deploy
import foreign_policy
from blockcache.attach.generation import LargestNorm
from blockcache.engines.build import Build
from blockcache.engines.loop import Loop
from blockcache.engines.onnx import export
from blockcache.engines.onnx_graph import build_graph
from blockcache.errors import NonFiniteError
from blockcache.fingerprint import Fingerprint
from blockcache.models.registry import port_of
from blockcache.samplers import DDPM, table
from blockcache.schedule import Schedule
from engine_comparison import block_names
from onnx_files import nodes
from struck_program import STEPS, TOKENS, WIDTH, plainly, struck

pytestmark = pytest.mark.usefixtures("exports_stay_here")


# -- by arithmetic: one step is struck, and the sampler's clip makes a plausible action of it


@pytest.mark.parametrize(
    ("step", "value"),
    [(0, 1e25), (12, math.inf), (STEPS - 1, 1e25), (STEPS - 1, math.nan), (7, 1.0)],
)
@pytest.mark.parametrize("place", ["stream", "output"])
def test_every_step_is_looked_at(place, step, value, tmp_path):
    obs = {"obs": torch.zeros(2, 1, 1)}
    noise = torch.randn(STEPS, 2, TOKENS, WIDTH, generator=torch.Generator().manual_seed(0))
    build = struck(place, step, value)
    loop = Loop(build.program, build.plan, build.sampler)
    runs = [lambda: loop(obs, noise)]
    for unrolled in (False, True):
        export(build, Fingerprint(), tmp_path / "struck.onnx", unrolled)
        opened = deploy.open_export(tmp_path / "struck.onnx", threads=1)
        runs.append(lambda opened=opened: opened.predict_action(obs["obs"], noise=noise))
        if value == 1e25:  # what makes it dangerous
            feed = {"obs": obs["obs"].numpy(), "noise": noise.numpy()}
            assert np.abs(plainly(opened, feed)["action"]).max() < 10
    for run in runs:
        if value == 1.0:
            assert set(run()) == {"action", "action_pred"}
        else:
            with pytest.raises(NonFiniteError, match="no action is given"):
                run()


class Strikes(nn.Module):
    """A linear map whose n-th output is struck."""

    def __init__(self, linear, call, value):
        super().__init__()
        self.weight, self.bias, self.call, self.value = linear.weight, linear.bias, call, value
        self.out_features, self.in_features, self.calls = *linear.weight.shape, 0

    def forward(self, x):
        self.calls += 1
        out = nn.functional.linear(x, self.weight, self.bias)
        return out + self.value if self.calls == self.call + 1 else out


@pytest.mark.parametrize("value", [math.inf, 1e25])
@pytest.mark.parametrize("step", [0, 2, foreign_policy.STEPS - 1])
@pytest.mark.parametrize("place", ["stream", "output"])
def test_patched_looks_at_every_step(place, step, value):
    policy = foreign_policy.Policy()
    if place == "stream":
        layer = policy.model.decoder.layers[-1]
        layer.linear2 = Strikes(layer.linear2, step, value)
    else:
        policy.model.head = Strikes(policy.model.head, step, value)
    obs = {"obs": torch.zeros(1, foreign_policy.SEEN, foreign_policy.OBS)}
    with bc.accelerate(policy, engine="patched") as fast:
        with pytest.raises(
            NonFiniteError, match=r"the observation reaches 0: check the sensor, or the policy's weights"
        ):
            fast.predict_action(obs)
        assert fast.stats().generations == 0
        assert fast.predict_action(obs)["action"].isfinite().all()  # the next one is not struck


# -- its cost


@pytest.mark.parametrize("steps", [1, 26])
def test_few_nodes_watch(make_policy, steps):
    """One for every stream of a schedule, one for all outputs, one for the actions and one for what these found; the step
    that full precision repeats has three of its own."""
    policy = make_policy(sampler=DDPM(num_inference_steps=steps))
    for full in (False, True):
        updates = {name: range(steps) if full else [0] for name in block_names(policy)}
        build = Build(port_of(policy).program(), Schedule(steps, updates), table(policy.sampler))
        graph = build_graph(build.program, build.plan, build.sampler, {}).graph
        measured = [node.op_type for node in nodes(graph)].count("ReduceL2")
        assert measured == (5 if full or steps == 1 else steps + 3)


def test_a_watch_holds_little_and_forgets_nothing(monkeypatch):
    monkeypatch.setattr("blockcache.attach.generation.HELD_BYTES", 100)
    for value in (math.nan, math.inf, 3.0):
        watch = LargestNorm()
        watch.see(torch.full((2, 4), value))
        for _ in range(40):
            watch.see(torch.ones(3, 2, 5))
            assert watch._bytes <= 100 + 3 * 2 * 5 * 4
        assert math.isnan(value) == math.isnan(watch.largest())
        assert math.isnan(value) or float(watch.largest()) == 2 * value


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16, torch.float64])
def test_other_precisions_are_measured_without_an_overflow_of_our_own(dtype):
    watch = LargestNorm()
    watch.see(torch.full((1, 4), 6e4, dtype=dtype))  # its square is infinite in half precision
    assert float(watch.largest()) == pytest.approx(1.2e5, rel=1e-2)
