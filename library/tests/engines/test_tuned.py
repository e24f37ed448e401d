"""What `tune` wrote for a policy, in use: in place, in a file, and through every verb; for a policy of other code too."""

import json
from pathlib import Path

import numpy as np
import pytest
import torch

import blockcache as bc
import foreign_policy
from blockcache.compare.candidates import Calibrations
from blockcache.compare.methods import parse_method
from blockcache.errors import FileError, PolicyError, SamplerError, ScheduleError
from blockcache.models.registry import port_of
from dit_policies import tiny_dit, tiny_observation
from tuned_directory import write_tuned

pytestmark = pytest.mark.usefixtures("exports_stay_here")


def foreign():
    policy = foreign_policy.Policy()
    obs = torch.randn(2, foreign_policy.SEEN, foreign_policy.OBS, generator=torch.Generator().manual_seed(1))
    return policy, {"obs": obs}


def own(make_policy):
    return make_policy(), torch.randn(2, 2, 5, generator=torch.Generator().manual_seed(1))


KINDS = ("foreign", "own", "dit")


@pytest.fixture(params=KINDS)
def policy_and_obs(request, make_policy):
    if request.param == "dit":
        return tiny_dit(), tiny_observation(2)
    return foreign() if request.param == "foreign" else own(make_policy)


def acted(policy, obs):
    torch.manual_seed(7)
    return policy.predict_action(obs)["action"]


@pytest.mark.parametrize("engine", ["patched", "loop", "onnx"])
def test_a_policy_is_accelerated_with_what_was_tuned_for_it(policy_and_obs, tmp_path, engine):
    policy, obs = policy_and_obs
    before, few = acted(policy, obs), write_tuned(policy, tmp_path / "tuned")
    other = port_of(policy).with_sampler(few)
    with bc.accelerate(other, bc.Schedule.load(tmp_path / "tuned/schedule.json"), engine="patched"):
        expected = acted(other.policy, obs)
    assert not torch.allclose(expected, before, atol=1e-3)
    with bc.accelerate(policy, engine=engine, tuned=tmp_path / "tuned") as fast:
        torch.testing.assert_close(acted(policy, obs), expected, rtol=1e-5, atol=1e-5)  # in place
        torch.testing.assert_close(acted(fast, obs), expected, rtol=1e-5, atol=1e-5)
        assert bc.handle_of(policy) is fast
        assert fast.policy is policy
        assert fast.stats().reused_share == pytest.approx(1 / 3)
    assert torch.equal(acted(policy, obs), before)
    with pytest.raises(bc.BlockcacheError, match="is not accelerated"):
        bc.handle_of(policy)


def test_a_file_is_written_with_what_was_tuned(policy_and_obs, tmp_path):
    policy, obs = policy_and_obs
    write_tuned(policy, tmp_path / "tuned")
    bc.export_policy(policy, None, tmp_path / "policy.onnx", tuned=tmp_path / "tuned")
    with bc.accelerate(policy, engine="patched", tuned=tmp_path / "tuned") as fast:
        expected = acted(fast, obs)
    torch.manual_seed(7)
    found = bc.open_export(tmp_path / "policy.onnx").predict_action(obs)["action"]
    torch.testing.assert_close(found, expected, rtol=1e-5, atol=1e-5)


def test_what_was_not_tuned_for_the_policy_is_refused(tmp_path, make_policy):
    policy = make_policy()
    for refused in (
        lambda **how: bc.accelerate(policy, **how),
        lambda **how: bc.export_policy(policy, None, tmp_path / "x.onnx", **how),
    ):
        with pytest.raises(FileError, match=r"has no tuning.json; name a directory that 'blockcache tune' wrote"):
            refused(tuned=tmp_path)
        write_tuned(make_policy(seed=1), tmp_path / "other")
        with pytest.raises(SamplerError, match="was chosen for another policy"):
            refused(tuned=tmp_path / "other")
    full = bc.Schedule.every_step(6, [block.name for block in port_of(policy).adapter.blocks])
    for both in (
        lambda: bc.accelerate(policy, full, tuned=tmp_path / "other"),
        lambda: bc.export_policy(policy, full, tmp_path / "x.onnx", tuned=tmp_path / "other"),
    ):
        with pytest.raises(ScheduleError, match="give either tuned or a schedule"):
            both()
    with pytest.raises(bc.BlockcacheError, match="is not accelerated"):
        bc.handle_of(policy)


# ---- fewer actions executed of each chunk


@pytest.mark.parametrize("engine", ["patched", "loop", "onnx"])
@pytest.mark.parametrize("kind", ["own", "dit"])
def test_fewer_actions_are_executed_as_tuned(make_policy, tmp_path, engine, kind):
    policy, obs = own(make_policy) if kind == "own" else (tiny_dit(), tiny_observation(2))
    for name, count in (("whole", None), ("half", 2)):
        write_tuned(policy, tmp_path / name, replan=count)
    for output in ("action", "action_pred"):
        found = {}
        for name in ("whole", "half"):
            torch.manual_seed(7)
            with bc.accelerate(policy, engine=engine, tuned=tmp_path / name) as fast:
                found[name] = fast.predict_action(obs)[output]
        count = 2 if output == "action" else policy.horizon
        assert found["half"].shape[1] == count
        assert output == "action_pred" or found["whole"].shape[1] > 2
        torch.testing.assert_close(found["half"], found["whole"][:, :count], rtol=0, atol=0)
    assert policy.n_action_steps > 2


def test_a_file_executes_fewer_actions_as_tuned(make_policy, tmp_path):
    policy, obs = own(make_policy)
    write_tuned(policy, tmp_path / "tuned", replan=3)
    bc.export_policy(policy, None, tmp_path / "policy.onnx", tuned=tmp_path / "tuned")
    torch.manual_seed(7)
    found = bc.open_export(tmp_path / "policy.onnx")
    assert found.exported.n_action_steps == 3
    with bc.accelerate(policy, engine="patched", tuned=tmp_path / "tuned") as fast:
        expected = acted(fast, obs)
    torch.manual_seed(7)
    torch.testing.assert_close(found.predict_action(obs)["action"], expected, rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("engine", ["patched", "onnx", "a file"])
def test_what_a_guard_falls_back_to_executes_as_many(make_policy, tmp_path, engine):
    policy, obs = own(make_policy)
    usual = np.random.default_rng(0).standard_normal((64, 2, 5)).astype(np.float32)
    obs[1] += 50
    write_tuned(policy, tmp_path / "tuned", replan=2)
    how = {"tuned": tmp_path / "tuned", "guard": "full", "observations": usual}
    if engine == "a file":
        bc.export_policy(policy, None, tmp_path / "policy.onnx", **how)
        found = bc.open_export(tmp_path / "policy.onnx", threads=1).predict_action(obs)["action"]
        assert found.shape == (2, 2, 3)
        return
    expected = policy.predict_action(obs[1:], generator=torch.Generator().manual_seed(1))["action"]
    with bc.accelerate(policy, engine=engine, **how) as fast:
        alone = fast.predict_action(obs[1:], generator=torch.Generator().manual_seed(1))["action"]
        assert fast.predict_action(obs)["action"].shape == (2, 2, 3)
        assert fast.watch.counts["outside"] == 2
    torch.testing.assert_close(alone, expected[:, :2], rtol=0, atol=0)


def test_a_policy_of_other_code_says_itself_how_many_it_executes(tmp_path):
    policy, obs = foreign()
    write_tuned(policy, tmp_path / "tuned", replan=2)
    uses = (
        lambda: bc.accelerate(policy, engine="patched", tuned=tmp_path / "tuned"),
        lambda: bc.export_policy(policy, None, tmp_path / "x.onnx", tuned=tmp_path / "tuned"),
    )
    for use in uses:
        with pytest.raises(
            PolicyError, match=r"executes 3 actions .* tuned to execute 2; .*: set its n_action_steps to 2"
        ):
            use()
    policy.n_action_steps = 2
    with uses[0]() as fast:
        assert acted(fast, obs).shape[1] == 2
    uses[1]()
    assert bc.open_export(tmp_path / "x.onnx").exported.n_action_steps == 2


@pytest.mark.parametrize(
    ("replan", "said"),
    [
        (6, "replan=6 executes so many actions of each chunk, and the horizon leaves 5; take that many at most"),
        (0, "tuning.json is garbled .*1 or more.*got 0.*; run 'blockcache tune' again"),
        ("2", "tuning.json is garbled .*whole number"),
    ],
)
def test_more_actions_than_the_horizon_leaves_are_refused(make_policy, tmp_path, replan, said):
    policy = make_policy()
    write_tuned(policy, tmp_path / "tuned", replan=replan)
    calibrations = Calibrations(port_of(policy), np.zeros((4, 2, 5), dtype=np.float32), progress=False)
    for use in (
        lambda: bc.accelerate(policy, tuned=tmp_path / "tuned"),
        lambda: bc.export_policy(policy, None, tmp_path / "x.onnx", tuned=tmp_path / "tuned"),
        lambda: calibrations.candidate(parse_method(f"tuned:{tmp_path / 'tuned'}")),
    ):
        with pytest.raises(bc.BlockcacheError, match=said):
            use()
    with pytest.raises(bc.BlockcacheError, match="is not accelerated"):
        bc.handle_of(policy)


# ---- through the verbs, on a policy of other code

ENTRY = "foreign_policy:Policy"


@pytest.fixture
def tuned(in_an_empty_directory, monkeypatch):
    monkeypatch.setattr("blockcache.measure.machine.peak_gflops.__defaults__", (64, 0.05))
    monkeypatch.setattr("blockcache.measure.latency.REST", 0.0)
    write_tuned(foreign_policy.Policy(), Path("tuned"))
    shape = (60, foreign_policy.SEEN, foreign_policy.OBS)
    np.savez("seen.npz", obs=np.random.default_rng(0).standard_normal(shape).astype(np.float32))
    return "tuned"


def test_export_takes_it(tuned, blockcache, refused):
    blockcache("export", ENTRY, "--tuned", tuned)
    runner = bc.open_export("policy.onnx", threads=1)
    assert set(map(tuple, runner.header["schedule"].values())) == {(0, 1)}
    assert "leave out SCHEDULE" in refused("export", ENTRY, "tuned/schedule.json", "--tuned", tuned)
    assert "has no tuning.json" in refused("export", ENTRY, "--tuned", ".")


def test_bench_takes_it(tuned, blockcache, refused):
    blockcache("bench", ENTRY, "--tuned", tuned, "--quick", "--repeats", 2, "--threads", 1, "--json", "bench.json")
    found = json.loads(Path("bench.json").read_text())
    assert found["shape"]["steps"] == 3
    assert {"tuned, patched", "tuned, onnx, 1 thread"} <= {row["name"] for row in found["rows"]}
    assert "--tuned needs a POLICY" in refused("bench", "--tuned", tuned)


def test_check_takes_it(tuned, blockcache):
    amount = ["--count", 8, "--samples", 4, "--generations", 2, "--engine", "loop"]
    blockcache("check", ENTRY, f"tuned:{tuned}", "--observations", "seen.npz", *amount, "-o", "check.json")
    found = json.loads(Path("check.json").read_text())
    assert found["method"]["sampler"]["num_inference_steps"] == 3
    assert found["setting"]["command"].startswith(f"blockcache check {ENTRY} tuned:tuned --observations seen.npz")
    live = bc.check(
        foreign_policy.Policy(),
        f"tuned:{tuned}",
        np.load("seen.npz")["obs"],
        count=8,
        samples=4,
        generations=2,
        engine="loop",
        progress=False,
    )
    assert live.distances.energy.mean == pytest.approx(found["distances"]["energy"]["mean"])
