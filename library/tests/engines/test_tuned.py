"""What `tune` wrote for a policy, in use: in place, in a file, and through every verb; for a policy of other code too."""

import json
from pathlib import Path

import numpy as np
import pytest
import torch

import blockcache as bc
import foreign_policy
from blockcache.errors import FileError, SamplerError, ScheduleError
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
