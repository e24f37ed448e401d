"""A foreign policy is compared with its own loop at every start: in which calls, what is refused, what it costs."""

import logging
import os
import subprocess
import sys
import time

import pytest
import torch

import blockcache as bc
import foreign_policy
from blockcache.engines import rehearsal
from blockcache.errors import EngineError, ObservationError
from blockcache.models.dpt.policy import DiffusionTransformerPolicy
from blockcache.models.registry import port_of
from foreign_policy import Policy
from repository import HELPERS

pytestmark = pytest.mark.usefixtures("exports_stay_here")


@pytest.fixture
def rehearsed(monkeypatch):
    """Counts the generations of a policy's own that were compared."""
    counted, real = [], rehearsal._own_answer
    monkeypatch.setattr(rehearsal, "_own_answer", lambda *args: counted.append(1) or real(*args))
    return counted


def enable(policy, engine="loop"):
    bc.accelerate(policy, engine=engine, threads=1).disable()


CALLS = [1, 1, 1]  # a first one, a second one, and one of two observations with a longer history


def test_it_is_compared_at_every_start_unless_the_user_trusts_it(rehearsed, tmp_path):
    policy = Policy()
    with bc.accelerate(policy, engine="loop") as fast:
        assert rehearsed == CALLS
        assert 0 < fast.rehearsal_seconds < 60
        assert fast.stats().notes == ()
    enable(policy)
    enable(policy, "onnx")
    assert rehearsed == 3 * CALLS
    for engine in ("loop", "onnx", "patched"):
        with bc.accelerate(policy, engine=engine, threads=1, trust=True) as fast:
            assert fast.rehearsal_seconds == 0
    bc.export_policy(policy, None, tmp_path / "trusted.onnx", trust=True)
    assert rehearsed == 3 * CALLS
    bc.export_policy(policy, None, tmp_path / "compared.onnx")
    assert rehearsed == 4 * CALLS


HELPER = "def settled(chunk):\n    return chunk{change}\n"
THEIRS = """
import foreign_policy, their_helper

class Mine(foreign_policy.Policy):
    def predict_action(self, obs_dict):
        found = super().predict_action(obs_dict)
        return {name: their_helper.settled(value) for name, value in found.items()}
"""
USER = """
import sys
import blockcache as bc
from blockcache.errors import EngineError
from their_policy import Mine

try:
    with bc.accelerate(Mine(), engine=sys.argv[1], threads=1):
        print("accelerated")
except EngineError as error:
    print(error)
try:
    bc.export_policy(Mine(), None, sys.argv[2])
    print("exported")
except EngineError as error:
    print(error)
"""


def test_a_helper_module_that_changed_between_two_processes_is_found_out(engine, tmp_path):
    """The policy's own files are the same; a module that its code calls is another one."""
    paths = os.pathsep.join([str(tmp_path), *sys.path, str(HELPERS)])
    environment = {**os.environ, "PYTHONPATH": paths, "PYTHONDONTWRITEBYTECODE": "1"}
    (tmp_path / "their_policy.py").write_text(THEIRS)
    said = []
    for change in ("", " + 6.87"):
        (tmp_path / "their_helper.py").write_text(HELPER.format(change=change))
        command = [sys.executable, "-c", USER, engine, str(tmp_path / "policy.onnx")]
        ran = subprocess.run(command, env=environment, check=True, capture_output=True, text=True)
        said.append(ran.stdout.splitlines())
    assert said[0] == ["accelerated", "exported"]
    assert ["its actions differ from the engine's" in line for line in said[1]] == [True, True]


class Remembering(Policy):
    """Blends each chunk with the one before."""

    def __init__(self, memory=None):
        super().__init__()
        self.memory = memory

    def predict_action(self, obs_dict):
        found = super().predict_action(obs_dict)
        before, self.memory = self.memory, found["action_pred"]
        if before is not None and before.shape == self.memory.shape:
            found["action"] = 0.5 * (found["action"] + before[:, : self.n_action_steps])
        return found


class RememberingInAList(Policy):
    def __init__(self):
        super().__init__()
        self.register_buffer("calls", torch.zeros(1))
        self.memory = {"chunks": []}

    def predict_action(self, obs_dict):
        found = super().predict_action(obs_dict)
        self.memory["chunks"].append(found["action"])
        self.calls += 1
        return {**found, "action": found["action"] + (len(self.memory["chunks"]) > 1)}


class LastMoments(Policy):
    def predict_action(self, obs_dict):
        return super().predict_action({"obs": obs_dict["obs"][:, -self.n_obs_steps :]})


class Squeezing(Policy):
    def predict_action(self, obs_dict):
        return {name: value.squeeze(0) for name, value in super().predict_action(obs_dict).items()}


class FirstOfTheBatch(Policy):
    def predict_action(self, obs_dict):
        found = super().predict_action(obs_dict)
        return {name: value[:1].expand_as(value) for name, value in found.items()}


class OtherChunk(Policy):
    """What is executed is the public code's, the whole chunk is not."""

    def predict_action(self, obs_dict):
        found = super().predict_action(obs_dict)
        return {**found, "action_pred": 2 * found["action_pred"]}


class Telling(Policy):
    def predict_action(self, obs_dict):
        found = super().predict_action(obs_dict)
        return {**found, "value": found["action"].mean()}


REFUSED = {
    Remembering: "with the same noise in the second of two calls",
    RememberingInAList: "with the same noise in the second of two calls",
    LastMoments: "with two observations of a history longer than n_obs_steps",
    Squeezing: r"its actions have shape \(3, 3\), the engine's \(1, 3, 3\)",
    OtherChunk: "its action_pred differ from the engine's by up to",
    Telling: "which returns value besides, and the engine does not",
    FirstOfTheBatch: "with two observations of a history longer than n_obs_steps",
}


@pytest.mark.parametrize("kind", REFUSED)
def test_what_one_call_does_not_show_is_found_out(engine, kind):
    with pytest.raises(EngineError, match=REFUSED[kind]):
        enable(kind(), engine)


@pytest.mark.parametrize("kind", REFUSED)
def test_auto_runs_such_a_policy_as_it_is(kind, rehearsed):
    policy, twin = kind(), kind()
    obs = torch.randn(1, foreign_policy.SEEN + 1, foreign_policy.OBS)
    with bc.accelerate(policy) as fast:
        assert fast.engine == "patched"
        assert [note.split(":")[0] for note in fast.stats().notes] == ["not onnx", "not loop"]
        assert len(rehearsed) <= len(CALLS)  # not once more for the other engine, which would run the same program
        for seed in range(3):
            torch.manual_seed(seed)
            found = policy.predict_action({"obs": obs})["action"]
            torch.manual_seed(seed)
            assert torch.equal(found, twin.predict_action({"obs": obs})["action"])


def test_a_file_needs_to_hold_actions_only(tmp_path):
    bc.export_policy(Telling(), None, tmp_path / "policy.onnx")
    with pytest.raises(EngineError, match="its action_pred differ"):
        bc.export_policy(OtherChunk(), None, tmp_path / "other.onnx")


def test_a_policy_remembers_nothing_of_the_comparison():
    told = torch.ones(1)
    for memory in (None, told):
        policy = Remembering(memory)
        with pytest.raises(EngineError):
            enable(policy)
        assert policy.memory is memory
    policy = RememberingInAList()
    counter, chunks = policy.calls, policy.memory["chunks"]
    with pytest.raises(EngineError):
        enable(policy)
    assert policy.calls is counter
    assert counter.item() == 0
    assert policy.memory == {"chunks": []}
    assert policy.memory["chunks"] is chunks


class ExactHistory(Policy):
    def predict_action(self, obs_dict):
        assert obs_dict["obs"].shape[1] == self.n_obs_steps
        return super().predict_action(obs_dict)


def test_an_engine_refuses_a_history_that_its_policy_refuses(engine):
    obs = torch.zeros(1, foreign_policy.SEEN + 1, foreign_policy.OBS)
    policy = ExactHistory()
    with bc.accelerate(policy, engine=engine, threads=1):
        policy.predict_action({"obs": obs[:, 1:]})
        with pytest.raises(
            ObservationError, match="has 3 moments, of which this engine takes 2, and the policy itself"
        ):
            policy.predict_action({"obs": obs})
    policy = Policy()  # which looks at the first ones
    expected = seeded(policy, obs)
    with bc.accelerate(policy, engine=engine, threads=1):
        torch.testing.assert_close(seeded(policy, obs), expected, rtol=1e-4, atol=1e-5)


def seeded(policy, obs):
    torch.manual_seed(0)
    return policy.predict_action({"obs": obs})["action"]


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


def test_a_hook_that_changes_the_output_is_found_out(engine):
    policy = Policy()
    enable(policy, engine)
    policy.model.register_forward_hook(lambda module, args, output: output + 1)
    with pytest.raises(EngineError, match="its actions differ from the engine's"):
        enable(policy, engine)


class Ours(DiffusionTransformerPolicy):
    """One of ours with a loop of its own."""

    def predict_action(self, obs, *, generator=None, noise=None):
        return super().predict_action(obs, generator=generator, noise=noise)


def test_our_own_policies_need_no_comparison_unless_their_code_is_changed(policy, rehearsed):
    enable(policy)
    assert rehearsed == []
    policy.__class__ = Ours
    enable(policy)
    assert rehearsed == CALLS


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
