"""A foreign policy is compared with its own loop once: what is remembered, and what makes it happen again."""

import logging
import os
import shutil
import subprocess
import sys
import time
from importlib import util

import pytest
import torch
from diffusers import DDIMScheduler
from torch import nn

import blockcache as bc
import foreign_policy
from blockcache.engines import rehearsal
from blockcache.errors import EngineError
from blockcache.models.dpt.policy import DiffusionTransformerPolicy
from blockcache.models.registry import port_of
from foreign_policy import COSINE, Policy
from repository import HELPERS

pytestmark = pytest.mark.usefixtures("exports_stay_here")


@pytest.fixture
def rehearsed(monkeypatch):
    """Counts the generations of a policy's own that were compared."""
    counted, real = [], rehearsal._own_actions
    monkeypatch.setattr(rehearsal, "_own_actions", lambda *args: counted.append(1) or real(*args))
    return counted


def enable(policy, engine="loop"):
    bc.accelerate(policy, engine=engine, threads=1).disable()


def test_it_is_compared_once_and_remembered(rehearsed, tmp_path):
    policy = Policy()
    enable(policy)
    enable(policy)
    enable(policy, "onnx")
    enable(Policy())  # the same weights, another object
    torch.manual_seed(0)
    policy.predict_action({"obs": torch.zeros(1, foreign_policy.SEEN, foreign_policy.OBS)})
    enable(policy)  # its scheduler has a state now
    assert rehearsed == [1]
    (kept,) = (tmp_path / "cache").glob("*.agrees")
    assert kept.stat().st_size == 0
    kept.unlink()
    enable(policy)
    assert rehearsed == [1, 1]


def test_another_process_remembers_it_too(tmp_path):
    """Under the same name, however that process orders its sets."""
    enable(Policy())
    (kept,) = (tmp_path / "cache").glob("*.agrees")
    program = (
        "import foreign_policy, blockcache as bc\n"
        "from blockcache.engines import rehearsal\n"
        "rehearsal._own_actions = None  # not to be called\n"
        "bc.accelerate(foreign_policy.Policy(), engine='loop')\n"
    )
    paths = os.pathsep.join([*sys.path, str(HELPERS)])
    environment = {**os.environ, "PYTHONHASHSEED": "7", "PYTHONPATH": paths}
    subprocess.run([sys.executable, "-c", program], env=environment, check=True)
    assert [*(tmp_path / "cache").glob("*.agrees")] == [kept]


def _weights(policy):
    with torch.no_grad():
        policy.model.head.bias.add_(1)


def _hidden_tensor(policy):
    policy.shift = torch.zeros(3)


def _module(policy):
    policy.extra = nn.Identity()


@pytest.mark.parametrize(
    "change",
    [
        _weights,
        _hidden_tensor,
        _module,
        lambda policy: setattr(policy, "num_inference_steps", 4),
        lambda policy: setattr(policy, "noise_scheduler", DDIMScheduler(20, **COSINE)),
        lambda policy: setattr(policy, "n_action_steps", 2),
        lambda policy: setattr(policy, "relative", False),
        lambda policy: setattr(policy.model, "temperature", 1.0),
        lambda policy: setattr(policy, "reward", max),
        lambda policy: setattr(policy, "limits", {"arm": [0, 1.0]}),
    ],
    ids=["weights", "tensor", "module", "steps", "scheduler", "actions", "flag", "deep flag", "function", "mapping"],
)
def test_another_policy_is_another_matter(rehearsed, change):
    enable(Policy())
    for expected in ([1, 1], [1, 1]):
        policy = Policy()
        change(policy)
        enable(policy)
        assert rehearsed == expected


class Shifting(Policy):
    """Its actions are the public code's, unless somebody asks for more."""

    relative = False

    def predict_action(self, obs_dict):
        found = super().predict_action(obs_dict)
        return {name: value.cumsum(dim=1) for name, value in found.items()} if self.relative else found


def test_a_setting_that_changes_the_actions_is_found_out(engine):
    policy = Shifting()
    enable(policy, engine)
    policy.relative = True
    with pytest.raises(EngineError, match="its actions differ from the engine's"):
        enable(policy, engine)
    policy.relative = False
    enable(policy, engine)


@pytest.mark.parametrize(
    "change",
    [
        lambda policy: policy.model.register_forward_hook(lambda module, args, output: output),
        lambda policy: policy.model.head.register_forward_pre_hook(lambda module, args: None),
        lambda policy: vars(policy.normalizer).update(forward=lambda: None),
        lambda policy: setattr(policy, "helper", object()),
        lambda policy: setattr(policy, "inner", (lambda x: lambda: x)(3)),
        lambda policy: setattr(policy, "parts", [nn.Linear(1, 1)]),
    ],
    ids=["hook", "pre-hook", "forward", "object", "closure", "unregistered module"],
)
def test_what_cannot_be_told_is_compared_every_time(rehearsed, change, tmp_path):
    policy = Policy()
    change(policy)
    enable(policy)
    enable(policy)
    assert rehearsed == [1, 1]
    assert list((tmp_path / "cache").glob("*.agrees")) == []


def test_a_hook_that_changes_the_output_is_found_out(engine):
    policy = Policy()
    enable(policy, engine)
    policy.model.register_forward_hook(lambda module, args, output: output + 1)
    with pytest.raises(EngineError, match="its actions differ from the engine's"):
        enable(policy, engine)


def test_changed_code_is_compared_again(rehearsed, tmp_path, monkeypatch):
    """Also where only a base class or a helper beside it changed: the whole file counts."""

    def load(text):
        source = tmp_path / f"their_policy_{len(rehearsed)}.py"
        shutil.copy(foreign_policy.__file__, source)
        source.write_text(source.read_text() + text)
        spec = util.spec_from_file_location("their_policy", source)
        module = util.module_from_spec(spec)
        monkeypatch.setitem(sys.modules, "their_policy", module)
        spec.loader.exec_module(module)
        return type("Mine", (module.Policy,), {"__module__": __name__})()

    enable(load(""))
    enable(load(""))
    assert rehearsed == [1]
    enable(load("\n# another state of the code\n"))
    assert rehearsed == [1, 1]


def test_what_was_refused_is_not_remembered(rehearsed):
    policy = Shifting()
    policy.relative = True
    for _ in range(2):
        with pytest.raises(EngineError):
            enable(policy)
    assert rehearsed == [1, 1]


class Ours(DiffusionTransformerPolicy):
    """One of ours with a loop of its own."""

    def predict_action(self, obs, *, generator=None, noise=None):
        return super().predict_action(obs, generator=generator, noise=noise)


def test_our_own_policies_need_no_comparison_unless_their_code_is_changed(policy, rehearsed):
    enable(policy)
    assert rehearsed == []
    policy.__class__ = Ours
    enable(policy)
    enable(policy)
    assert rehearsed == [1]


# -- what a user sees meanwhile


def test_a_bar_shows_only_where_it_takes_long(capsys, monkeypatch):
    monkeypatch.setattr(sys.stderr, "isatty", lambda: True, raising=False)
    enable(Policy())
    assert capsys.readouterr().err == ""
    policy = Policy()
    policy.model.register_forward_hook(lambda *args: time.sleep(0.3))  # five steps
    enable(policy)
    assert "comparing with the policy's own loop" in capsys.readouterr().err


def test_auto_says_once_why_it_passed_an_engine_over(caplog, monkeypatch):
    monkeypatch.setattr(sys.modules["blockcache.engines.accelerate"], "_told", set())
    policy = Policy()
    del policy.obs_dim
    with caplog.at_level(logging.WARNING, logger="blockcache"):
        for _ in range(2):
            with bc.accelerate(policy) as fast:
                assert fast.engine == "patched"
                notes = fast.stats().notes
    said = [record.getMessage() for record in caplog.records]
    assert said == list(notes)
    assert [note.split(":")[0] for note in notes] == ["not onnx", "not loop"]
    assert all("does not support a policy without obs_dim" in note for note in notes)
    caplog.clear()
    with bc.accelerate(policy, engine="patched") as fast, caplog.at_level(logging.WARNING, logger="blockcache"):
        assert fast.stats().notes == ()
    with bc.accelerate(Policy()) as fast:
        assert fast.engine == "onnx"
    assert caplog.records == []


def test_the_generators_are_as_they_were():
    torch.manual_seed(3)
    expected = torch.randn(4)
    torch.manual_seed(3)
    enable(Policy())
    assert torch.equal(torch.randn(4), expected)
    assert port_of(Policy()).trusted is False
