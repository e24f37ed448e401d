"""No action that is not finite, and none that came out of something that was not: the same outcome in every engine."""

import math
import re

import numpy as np
import pytest
import torch
from conftest import tiny_policy

import blockcache as bc
import blockcache_runtime as deploy
import foreign_policy
import toy_family
from blockcache.errors import EngineError, NonFiniteError, ObservationError
from blockcache.schedule import Schedule
from engine_comparison import block_names
from struck_program import plainly

pytestmark = pytest.mark.usefixtures("exports_stay_here")
ENGINES = ("patched", "loop", "onnx")
WRONG = (math.nan, math.inf, -math.inf, 1e25, -1e19)


def accelerated(policy, engine, schedule=None):
    return bc.accelerate(policy, schedule, engine, threads=1)


def own():
    return tiny_policy(), torch.zeros(2, 2, 5)


def foreign():
    return foreign_policy.Policy(), {"obs": torch.zeros(2, foreign_policy.SEEN, foreign_policy.OBS)}


def inputs(obs):
    return obs["obs"] if isinstance(obs, dict) else obs


def held(value, limit):
    return f"values beyond {re.escape(limit)}" if math.isfinite(value) else "NaN or infinity"


@pytest.mark.parametrize("make", [own, foreign])
def test_the_observation_is_blamed_for_itself(make):
    policy, obs = make()
    for engine in ENGINES:
        with accelerated(policy, engine) as fast:
            for value in WRONG:
                inputs(obs)[1, 0, 3] = value
                with pytest.raises(
                    ObservationError, match=f"^the observation holds {held(value, '1e+18')}; check the sens"
                ):
                    fast.predict_action(obs)
            assert fast.stats().generations == 0


def test_noise_is_blamed_for_itself(tmp_path):
    policy, obs = own()
    noise = policy.draw_noise(2)
    bc.export_policy(policy, None, tmp_path / "policy.onnx")
    opened = deploy.open_export(tmp_path / "policy.onnx", threads=1)

    def refused(predict_action):
        for value in (*WRONG, 1e7):
            noise[1, 0, 2, 1] = value
            with pytest.raises(ObservationError, match=f"^noise holds {held(value, '1e+06')}; draw_noise makes it"):
                predict_action(obs, noise=noise)

    refused(policy.predict_action)
    refused(opened.predict_action)
    for engine in ENGINES:
        with accelerated(policy, engine) as fast:
            refused(fast.predict_action)


def test_a_foreign_policys_noise_is_blamed_for_itself():
    class Takes(foreign_policy.Policy):
        def predict_action(self, obs_dict, noise=None):
            return super().predict_action(obs_dict)

    _, obs = foreign()
    noise = torch.full((1, 7, 3), torch.nan)
    with accelerated(Takes(), "patched") as fast:
        for call in (lambda: fast.predict_action(obs, noise), lambda: fast.predict_action(obs, noise=noise)):
            with pytest.raises(ObservationError, match=r"^noise holds NaN"):
                call()


def overflowing():
    """What a block adds is 1e26, the norm behind it makes zeros of that, and the head something plausible."""
    policy, obs = own()
    with torch.no_grad():
        policy.model.decoder.layers[1].linear1.bias.fill_(1e13)
        policy.model.decoder.layers[1].linear2.weight.fill_(1e13)
    return policy, obs


@pytest.mark.parametrize("form", ["full", "schedule", "teacache"])
def test_what_overflows_on_the_way_is_refused_in_every_engine(form, tmp_path, random_updates):
    policy, obs = overflowing()
    strategy = {
        "full": None,
        "schedule": Schedule(6, random_updates(block_names(policy), 6)),
        "teacache": bc.TeaCacheRule((1.0, 0.0), 0.1, 6),
    }[form]
    for engine in ENGINES if form != "teacache" else ["patched"]:
        with (
            accelerated(policy, engine, strategy) as fast,
            pytest.raises(NonFiniteError, match="observation reaches 0"),
        ):
            fast.predict_action(obs)
    if form != "teacache":
        bc.export_policy(policy, strategy, tmp_path / "policy.onnx")
        opened = deploy.open_export(tmp_path / "policy.onnx", threads=1)
        hidden = plainly(opened, {"obs": obs.numpy(), "noise": opened.draw_noise(2)})
        assert np.isfinite(hidden["action"]).all(), "ONNX Runtime shows it in the action: another example is needed"
        with pytest.raises(NonFiniteError, match="no action is given"):
            opened.predict_action(obs)
        with pytest.raises(NonFiniteError, match="no action is given"):
            bc.open_export(tmp_path / "policy.onnx", threads=1).predict_action(obs)


def test_an_observation_that_only_the_policy_finds_too_large(monkeypatch):
    """Within the limit at the door, beyond it behind the gates of the toy family."""
    monkeypatch.setattr("blockcache.models.registry._families", lambda: [("toy-flow", lambda: toy_family.claim)])
    policy = toy_family.FlowPolicy()
    shapes = {"state": toy_family.STATE, "words": toy_family.WORDS, "pictures": toy_family.PICTURES}
    obs = {name: torch.ones(1, *shape) for name, shape in shapes.items()} | {"state": torch.full((1, 1, 4), 3e17)}
    for engine in ENGINES:
        with (
            accelerated(policy, engine),
            pytest.raises(NonFiniteError, match=r"the observation reaches 3e\+17: check the"),
        ):
            policy.chunk(obs)


def test_an_action_that_is_not_finite_is_refused_whatever_the_way(monkeypatch, tmp_path):
    """Behind everything that is watched stands what makes robot units of the sample."""
    monkeypatch.setattr("blockcache.models.modules.check_action_scale", lambda scale: None)
    monkeypatch.setattr("blockcache.models.dpt.port.check_action_scale", lambda scale: None)
    policy, obs = own()
    policy.normalizer.action.scale[1] = 1e-17
    policy.normalizer.action.offset[1] = 100.0
    for engine in ENGINES:
        with accelerated(policy, engine) as fast, pytest.raises(NonFiniteError, match="no action is given"):
            fast.predict_action(obs)


# -- autocast


def test_autocast_is_refused_or_obeyed(engine, policy, observe, run, tmp_path):
    sentence = 'torch.autocast is on, .* leave autocast, or use engine="patched"'
    with torch.autocast("cpu"):
        expected = run(policy, observe())
        with pytest.raises(EngineError, match=sentence):
            accelerated(policy, engine)
        with pytest.raises(EngineError, match=sentence):
            bc.export_policy(policy, None, tmp_path / "policy.onnx")
        with accelerated(policy, "auto") as fast:
            assert fast.engine == "patched"
            assert torch.equal(run(policy, observe()), expected)
    with accelerated(policy, engine):
        plain = run(policy, observe())
        with torch.autocast("cpu"), pytest.raises(EngineError, match=sentence):
            run(policy, observe())
        with torch.autocast("cpu", enabled=False):
            assert torch.equal(run(policy, observe()), plain)
    assert not torch.allclose(expected, plain, atol=1e-4), "autocast changes nothing here: another example is needed"
