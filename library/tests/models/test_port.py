"""What is seen of a policy: copies, workers, hashes of weights, compiled modules, modes that do nothing."""

import copy
import pickle
import sys

import numpy as np
import pytest
import torch
from torch import nn

import blockcache as bc
import foreign_policy
import toy_family
from blockcache.errors import PolicyError
from blockcache.models import identity
from blockcache.models.loading import load_policy
from blockcache.models.modules import ModeCheck
from blockcache.models.registry import port_of
from blockcache.samplers import DDIM, Euler, SDEDPMSolver
from toy_evaluation import METHODS, ready

pytestmark = pytest.mark.usefixtures("exports_stay_here")

COPIES = {
    "deepcopy": copy.deepcopy,
    "pickle": lambda port: pickle.loads(pickle.dumps(port)),
    "copy": lambda port: port.copy(),
}


@pytest.fixture
def hashes(monkeypatch):
    """Counts how often weights are hashed."""
    counted = []
    real = identity.weights_hash
    monkeypatch.setattr(identity, "weights_hash", lambda module: counted.append(1) or real(module))
    return counted


@pytest.fixture(params=["ours", "foreign"])
def any_policy(request, make_policy):
    return make_policy() if request.param == "ours" else foreign_policy.Policy()


def observation(policy):
    return {"obs": torch.randn(2, policy.n_obs_steps, policy.obs_dim, generator=torch.Generator().manual_seed(0))}


def act(policy):
    torch.manual_seed(0)
    return policy.predict_action(observation(policy))["action"]


# -- copies and workers


@pytest.mark.parametrize("way", COPIES)
def test_a_copy_is_independent_and_knows_its_hash(any_policy, way, hashes):
    port = port_of(any_policy)
    unhashed = COPIES[way](port)
    assert hashes == [], "nobody needed it"
    expected, fingerprint = act(any_policy), port.fingerprint
    copied = COPIES[way](port)
    assert copied.fingerprint == fingerprint
    assert copied.with_sampler(DDIM(num_inference_steps=3)).weights == fingerprint.weights
    assert hashes == [1]
    assert unhashed.fingerprint == fingerprint
    assert hashes == [1, 1]
    assert type(copied) is type(port)
    assert copied.adapter.denoiser is copied.policy.model is not port.policy.model
    with bc.accelerate(
        copied.policy, bc.Schedule(len(port.timesteps), {b: [0] for b in fingerprint.blocks}), "patched"
    ):
        assert not torch.equal(act(copied.policy), expected)
        assert torch.equal(act(any_policy), expected)
    assert torch.equal(act(copied.policy), expected)


@pytest.mark.parametrize("way", COPIES)
@pytest.mark.parametrize("engine", ["patched", "loop", "onnx"])
def test_an_accelerated_one_cannot_be_copied(any_policy, way, engine):
    port = port_of(any_policy)
    with bc.accelerate(port, engine=engine, threads=1), pytest.raises(PolicyError, match=r"call disable\(\) first"):
        COPIES[way](port)
    COPIES[way](port)


# -- the hash


def test_weights_are_hashed_once_for_each_policy_in_a_whole_evaluation(make_policy, tmp_path, hashes):
    methods = (*METHODS, "ddim-3+bac:S=2,n=1", "bac:S=2,n=1")
    evaluation = ready(make_policy(), tmp_path / "state", methods=methods)
    evaluation.check_output(tmp_path / "none.json")
    evaluation.run(progress=False)
    assert hashes == [1]
    ready(make_policy(seed=1), tmp_path / "state", methods=methods).run(progress=False)
    assert hashes == [1, 1]


def test_a_port_that_is_held_notices_other_weights(make_policy, observe, run, hashes):
    """An export is found on disk by this hash: one of older weights would be opened in silence."""
    port, policy = port_of(make_policy()), make_policy(seed=1)
    first = port.fingerprint
    with bc.accelerate(port, engine="onnx", threads=1):
        assert port.fingerprint is not None
    assert hashes == [1]
    port.policy.load_state_dict(policy.state_dict())
    with bc.accelerate(port, engine="onnx", threads=1):
        assert torch.allclose(run(port.policy, observe()), run(policy, observe()), atol=1e-5)
    assert port.fingerprint == port_of(policy).fingerprint != first


# -- samplers of a foreign policy


@pytest.mark.parametrize(
    "sampler",
    [
        DDIM(num_inference_steps=4, eta=0.5),
        SDEDPMSolver(num_inference_steps=4),
        DDIM(timesteps=[70, 57.5, 20, 0]),
        Euler(num_inference_steps=4),
    ],
    ids=lambda sampler: f"{sampler.type} {sampler.timesteps}",
)
def test_another_sampler_is_known_in_every_engine(sampler):
    """Also one that diffusers does not have: the policy's own loop then runs our table."""
    port = port_of(foreign_policy.Policy())
    before = act(port.policy)
    other = port.with_sampler(sampler)
    assert other.sampler == sampler
    assert other.fingerprint.sampler == sampler.to_dict()
    assert len(other.timesteps) == 4
    expected = act(other.policy)
    for engine in ("patched", "loop", "onnx"):
        with bc.accelerate(other, engine=engine, threads=1):
            assert torch.allclose(act(other.policy), expected, atol=1e-5), engine
    assert torch.equal(act(port.policy), before)
    assert port.with_sampler(sampler).copy().sampler == sampler


# -- what cannot be used as it is


@pytest.mark.parametrize(
    ("make", "way_out"),
    [
        (lambda policy: setattr(policy, "model", torch.compile(policy.model)), "policy.model = policy.model._orig_mod"),
        (lambda policy: policy.model.compile(), "policy.model._compiled_call_impl = None"),
        (
            lambda policy: setattr(policy.model, "decoder", torch.compile(policy.model.decoder)),
            "policy.model.decoder = policy.model.decoder._orig_mod",
        ),
        (
            lambda policy: policy.model.decoder.layers.__setitem__(1, torch.compile(policy.model.decoder.layers[1])),
            "policy.model.decoder.layers.1 = policy.model.decoder.layers.1._orig_mod",
        ),
    ],
    ids=["the model", "in place", "a stack", "a layer"],
)
def test_a_compiled_model_is_refused_with_the_way_out(any_policy, make, way_out):
    expected = act(any_policy)
    make(any_policy)
    for use in (bc.accelerate, lambda policy: bc.calibrate(policy, [observation(policy)]), load_policy):
        with pytest.raises(PolicyError, match=r"was compiled by torch\.compile") as caught:
            use(any_policy)
        assert way_out in str(caught.value)
    exec(way_out.replace("layers.1", "layers[1]"), {"policy": any_policy})
    with bc.accelerate(any_policy, engine="patched"):
        assert torch.equal(act(any_policy), expected)


def test_a_compiled_entry_is_refused_by_every_engine_with_the_way_out(any_policy):
    """It used to be sent to the patched engine, which refuses it as well."""
    any_policy.predict_action = torch.compile(any_policy.predict_action)
    for engine in ("patched", "loop", "onnx", "auto"):
        with pytest.raises(PolicyError, match=r"policy.predict_action was compiled by torch\.compile") as caught:
            bc.accelerate(any_policy, engine=engine)
        assert "(del policy.predict_action)" in str(caught.value)
        assert "engine=" not in str(caught.value)
    del any_policy.predict_action
    bc.accelerate(any_policy, engine="patched").disable()


def test_an_entry_that_its_class_compiles_is_refused():
    class Compiled(foreign_policy.Policy):
        predict_action = torch.compile(foreign_policy.Policy.predict_action)

    with pytest.raises(PolicyError, match=r"use the original .without the decorator"):
        bc.accelerate(Compiled().eval(), engine="loop")


def test_a_policy_compiled_as_a_whole_is_refused_with_the_way_out(any_policy):
    with pytest.raises(PolicyError, match=r"policy = policy\._orig_mod"):
        bc.accelerate(torch.compile(any_policy))


def test_an_object_is_loaded_as_it_is(any_policy):
    assert load_policy(any_policy) is any_policy
    with pytest.raises(PolicyError, match="is no diffusion policy that blockcache knows"):
        load_policy(nn.Linear(2, 2))


def test_a_python_entry_makes_the_policy(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "path", [*sys.path])
    (tmp_path / "their_module.py").write_text(
        "from foreign_policy import Policy as make\nnumber = 3\ndef needs(path): pass\ndef other(): return 3\n"
    )
    (tmp_path / "their_broken_module.py").write_text("1 / 0\n")
    assert isinstance(load_policy("their_module:make"), foreign_policy.Policy)
    for entry, sentence in (
        ("no_such_module:make", r"no policy 'no_such_module:make': there is no module 'no_such_module'"),
        ("their_module:nothing", r"\(AttributeError: .*\); expected module:function, importable here"),
        ("their_broken_module:make", r"\(ZeroDivisionError: division by zero\); expected module:function"),
        ("their_module:number", r"their_module:number failed \(TypeError: .*not callable\); it must return a policy"),
        ("their_module:needs", r"failed \(TypeError: .*argument.*\); it must return a policy"),
        ("their_module:other", "int is no diffusion policy that blockcache knows"),
    ):
        with pytest.raises(PolicyError, match=sentence) as caught:
            load_policy(entry)
        assert "\n" not in str(caught.value)


def test_a_foreign_policy_is_not_saved(tmp_path):
    with pytest.raises(PolicyError) as caught:
        bc.save_policy(foreign_policy.Policy(), tmp_path / "policy")
    assert str(caught.value).startswith(
        "only this package's own policies can be saved as a directory, got Policy; keep your own"
    )
    assert "\n" not in str(caught.value)
    assert not (tmp_path / "policy").exists()


def test_sizes_of_numpy_are_sizes():
    policy = foreign_policy.Policy()
    policy.n_action_steps, policy.horizon = np.int64(policy.n_action_steps), np.int32(policy.horizon)
    port = port_of(policy)
    assert (port.n_action_steps, port.executed) == (3, (1, 4))
    assert {type(size) for size in (port.n_action_steps, port.horizon, *port.executed)} == {int}
    policy.n_action_steps = True
    with pytest.raises(PolicyError, match=r"Policy does not say its n_action_steps, .*; set policy\.n_action_steps"):
        port_of(policy).n_action_steps  # noqa: B018


@pytest.mark.parametrize(
    ("returned", "got"), [(torch.zeros(1, 3, 3), "got Tensor"), ({"actions": 3, "x": 0}, "got dict with actions, x")]
)
def test_what_is_no_action_is_said(returned, got):
    port = port_of(foreign_policy.Policy())
    with pytest.raises(PolicyError, match=f"Policy.predict_action must return a mapping with 'action', {got}"):
        port.action_of(returned)


# -- modes


class Noisy(nn.Module):
    def forward(self, x):
        return x + self._noise(x)

    @torch.no_grad()
    def _noise(self, x):
        return torch.randn_like(x) if self.training else 0


class Within(nn.Module):
    def forward(self, x):
        return [nn.functional.dropout(item, training=self.training) for item in x]


class AsProperty(nn.Module):
    @property
    def strength(self):
        return 1.0 if self.training else 0.0


class Plain(nn.Module):
    def forward(self, x):
        return 2 * x


@pytest.mark.parametrize(
    "module",
    [
        nn.Dropout(0.1),
        nn.MultiheadAttention(4, 2, dropout=0.1),
        nn.LSTM(2, 2, num_layers=2, dropout=0.1),
        nn.BatchNorm1d(2),
        nn.InstanceNorm1d(2, track_running_stats=True),
        nn.RReLU(),
        Noisy(),
        Within(),
        AsProperty(),
    ],
    ids=lambda module: type(module).__name__,
)
def test_a_module_whose_mode_does_something_is_named(module):
    policy = nn.Sequential(nn.Linear(2, 2), module)
    with pytest.raises(PolicyError) as caught:
        ModeCheck(policy).check()
    kind = type(module).__name__
    assert str(caught.value) == f"the policy is in train mode, as 1 ({kind}) shows; call policy.eval() first"
    ModeCheck(policy.eval()).check()


@pytest.mark.parametrize(
    "module",
    [
        nn.Linear(2, 2),
        nn.LayerNorm(2),
        nn.Dropout(0.0),
        nn.MultiheadAttention(4, 2),
        nn.LSTM(2, 2),
        nn.BatchNorm1d(2, track_running_stats=False),
        nn.InstanceNorm1d(2),
        nn.ParameterDict({"scale": torch.ones(1)}),
        Plain(),
    ],
    ids=lambda module: type(module).__name__,
)
def test_a_module_whose_mode_does_nothing_is_ignored(module):
    policy = nn.Sequential(module)
    ModeCheck(policy).check()
    assert module.training  # so there was something to ignore
    with pytest.raises(PolicyError, match=r"as 1 \(Dropout\) shows"):  # what stands beside it is not
        ModeCheck(policy.append(nn.Dropout(0.5))).check()


def test_a_normaliser_left_in_train_mode_harms_nobody(any_policy):
    """As the public code leaves it after `load_state_dict`."""
    expected = act(any_policy)
    any_policy.normalizer.train()
    any_policy.training = True
    for engine in ("patched", "loop", "onnx"):
        with bc.accelerate(any_policy, engine=engine, threads=1):
            assert torch.allclose(act(any_policy), expected, atol=1e-5)


# -- a family of another package


def test_noise_is_handed_to_any_policy_that_takes_it(monkeypatch):
    """Calibration draws each sample's own, so that parts of any size give the same recording."""

    class Given(toy_family.FlowPolicy):
        def chunk(self, obs, noise=None):
            with monkeypatch.context() as patch:
                if noise is not None:
                    patch.setattr(torch, "randn", lambda *shape, **how: noise[0])
                return super().chunk(obs)

    monkeypatch.setattr(toy_family.FlowPort, "takes_noise", True)
    port = toy_family.claim(Given())
    sizes = {"state": toy_family.STATE, "words": toy_family.WORDS, "pictures": toy_family.PICTURES}
    obs = {name: torch.randn(3, *shape) for name, shape in sizes.items()}
    whole = bc.calibrate(port, [obs], progress=False)
    monkeypatch.setattr("blockcache.attach.recorder.FEATURE_BYTES", 1)
    in_parts = bc.calibrate(port, [obs], progress=False)
    for name, matrices in whole.matrices.items():
        assert matrices == pytest.approx(in_parts.matrices[name], abs=1e-5)
