"""What a foreign policy is given: the same answers and the same sentences in every engine."""

import numpy as np
import pytest
import torch

import blockcache as bc
from blockcache.errors import ObservationError
from foreign_policy import OBS, SEEN, Policy, act

pytestmark = [
    pytest.mark.usefixtures("exports_stay_here"),
    pytest.mark.filterwarnings("ignore:Using a non-tuple sequence"),  # what torch says of tensor["obs"]
]

ENGINES = ("patched", "loop", "onnx")


@pytest.fixture(params=ENGINES)
def engine(request):
    return request.param


class Public(Policy):
    """Checks its observation first, as the public code does."""

    def predict_action(self, obs_dict):
        assert "obs" in obs_dict
        return super().predict_action(obs_dict)


def observed(batch=2, steps=SEEN):
    return torch.randn(batch, steps, OBS, generator=torch.Generator().manual_seed(0))


def test_of_a_longer_history_the_first_moments_count(engine):
    """As in the public code, whose robots hand over all that they have."""
    policy, longer = Policy(), {"obs": observed(steps=SEEN + 3)}
    expected = act(policy, longer)
    assert torch.equal(expected, act(policy, {"obs": longer["obs"][:, :SEEN]}))
    with bc.accelerate(policy, engine=engine, threads=1):
        assert torch.allclose(act(policy, longer), expected, atol=1e-5)
    with bc.accelerate(policy, engine=engine, threads=1):
        assert not torch.allclose(act(policy, {"obs": longer["obs"][:, -SEEN:]}), expected, atol=1e-2)


class WithBonus(Policy):
    """Reads more than it says, if it is given more."""

    def predict_action(self, obs_dict):
        found = super().predict_action(obs_dict)
        return {name: value + obs_dict.get("bonus", 0) for name, value in found.items()}


@pytest.mark.parametrize("engine", ["loop", "onnx"])
def test_what_is_beside_the_observation_is_not_passed_over(engine):
    """Foreign code may read it, and was compared without it."""
    policy, given = WithBonus(), {"obs": observed(), "bonus": 1.0}
    plain, more = act(policy, {"obs": observed()}), act(policy, given)
    assert not torch.allclose(plain, more)
    with bc.accelerate(policy, engine=engine, threads=1):
        with pytest.raises(ObservationError, match=r"holds bonus besides obs.*leave it out, or use engine=\"patched\""):
            act(policy, given)
        assert torch.allclose(act(policy, {"obs": observed()}), plain, atol=1e-5)
    with bc.accelerate(policy, engine="patched"):
        assert torch.equal(act(policy, given), more)


@pytest.mark.parametrize("make", [Policy, Public], ids=["bare", "as the public code"])
@pytest.mark.parametrize(
    ("given", "got"),
    [
        (observed(), "got Tensor"),
        (observed().numpy(), "got ndarray"),
        ({"obs": {"obs": observed()}}, "got dict {'obs': 'dict'}"),
        ({"obs": {"image": observed(), "agent_pos": observed()}}, "got dict {'obs': 'dict'}"),
        ({"state": observed()}, "got dict {'state': 'Tensor'}"),
        (None, "got NoneType"),
        ([observed()], "got list"),
    ],
    ids=["tensor", "array", "nested", "nested images", "another name", "nothing", "list"],
)
def test_anything_but_a_mapping_of_tensors_is_refused_with_one_sentence(engine, make, given, got):
    policy = make()
    with bc.accelerate(policy, engine=engine, threads=1):
        right = act(policy, {"obs": observed()})
        with pytest.raises(ObservationError) as caught:
            act(policy, given)
        said = str(caught.value)
        name = type(policy).__name__
        assert said.startswith(f"{name} takes a mapping of tensors such as {{'obs': (batch, n_obs_steps, obs_dim)}}, ")
        assert got in said
        assert "\n" not in said
        assert torch.equal(act(policy, {"obs": observed()}), right)


def test_an_error_of_its_own_stays_its_own():
    class Tired(Policy):
        def predict_action(self, obs_dict):
            raise RuntimeError("no more today")

    with bc.accelerate(Tired(), engine="patched") as fast, pytest.raises(RuntimeError, match="no more today"):
        act(fast, {"obs": observed()})


def test_calibration_says_the_same():
    with pytest.raises(ObservationError, match=r"Policy takes a mapping of tensors such as .*, got Tensor"):
        bc.calibrate(Policy(), [observed()], progress=False)
    with pytest.raises(ObservationError, match=r"got dict {'obs': 'dict'}"):
        bc.calibrate(Policy(), [{"obs": {"obs": observed()}}], progress=False)


def test_arrays_are_taken_by_the_engines_that_replace_it():
    policy = Policy()
    expected = act(policy, {"obs": observed()})
    for engine in ("loop", "onnx"):
        with bc.accelerate(policy, engine=engine, threads=1):
            found = act(policy, {"obs": observed().numpy().astype(np.float64)})
            assert torch.allclose(found, expected, atol=1e-5)
