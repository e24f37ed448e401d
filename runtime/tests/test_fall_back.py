"""An export whose guard has what is outside answered in full precision: two graphs over one set of weights."""

from unittest.mock import Mock

import numpy as np
import onnx
import pytest
import torch

import blockcache as bc
import foreign_policy
from blockcache.compare.parity import check_export, save_reference
from blockcache.engines.build import tuned_port
from blockcache.errors import EngineError, FileError, ScheduleError
from blockcache.models.registry import port_of
from blockcache_runtime import Player, open_export
from blockcache_runtime.chunks import Previous
from blockcache_runtime.providers import CPU
from blockcache_runtime.serve.policies import ServedExport
from blockcache_runtime.serve.wire import pack, unpack
from clocked_player import Clock, Worker
from engine_comparison import BLOCKS
from image_policies import image_policy, observed
from onnx_files import hashed
from served_toy import served
from tuned_directory import write_tuned

STEPS, FAR = 6, 100.0


def seen(count, seed=0):
    return np.random.default_rng(seed).normal(size=(count, 2, 5)).astype(np.float32)


@pytest.fixture(scope="module")
def files(make_policy, random_updates, tmp_path_factory):
    """The policy as it is, under a schedule, and under the schedule with a guard that falls back."""
    place, policy = tmp_path_factory.mktemp("fall-back"), make_policy()
    schedule = bc.Schedule(STEPS, random_updates(BLOCKS, STEPS))
    bc.export_policy(policy, None, place / "own.onnx", rtc=True)
    bc.export_policy(policy, schedule, place / "fast.onnx", rtc=True)
    bc.export_policy(policy, schedule, place / "both.onnx", rtc=True, guard="full", observations=seen(64))
    return {name: place / f"{name}.onnx" for name in ("own", "fast", "both")}


@pytest.fixture(scope="module")
def opened(files):
    return {name: open_export(path, threads=1) for name, path in files.items()}


@pytest.mark.parametrize("told", [None, Previous(np.ones((3, 3)), delay=2)])
def test_inside_as_before_outside_in_full_precision_sample_by_sample(opened, told):
    obs, noise = seen(3, seed=1), opened["fast"].draw_noise(3, np.random.default_rng(0))
    obs[1] += FAR
    fast, own, both = (
        opened[name].predict_action(obs, noise=noise, previous=told)["action"] for name in ("fast", "own", "both")
    )
    assert np.abs(fast[1] - own[1]).max() > 1e-3, "they do not differ, so nothing is tested"
    np.testing.assert_array_equal(both[[0, 2]], fast[[0, 2]])
    np.testing.assert_allclose(both[1], own[1], atol=1e-6)
    alone = opened["both"].predict_action(obs[1:2], noise=noise[:, 1:2], previous=told)["action"]
    np.testing.assert_allclose(alone[0], own[1], atol=1e-6)


def test_full_precision_with_another_sampler_begins_with_the_same_noise(make_policy, tmp_path):
    """And two Scans stand in one file, where the tuned sampler computes every block."""
    policy, place = make_policy(), tmp_path / "tuned"
    write_tuned(policy, place)
    (place / "schedule.json").unlink()
    bc.export_policy(policy, None, tmp_path / "both.onnx", tuned=place, guard="full", observations=seen(64))
    bc.export_policy(policy, None, tmp_path / "own.onnx")
    both, own = (open_export(tmp_path / f"{name}.onnx", threads=1) for name in ("both", "own"))
    obs = seen(1, seed=1) + FAR
    few, many = (one.draw_noise(1, np.random.default_rng(0)) for one in (both, own))
    assert len(few) < len(many)
    drawn = np.random.default_rng(0)  # the few are drawn first, then as many as the policy takes
    both.draw_noise(1, drawn)
    noise = np.concatenate([few, drawn.standard_normal(many.shape, dtype=np.float32)[len(few) :]])
    np.testing.assert_allclose(
        both.predict_action(obs, seed=0)["action"], own.predict_action(obs, noise=noise)["action"], atol=1e-6
    )


@pytest.fixture
def strange(make_policy, tmp_path):
    """A tuned policy behind its port, and its file: for its guard, all that tests make up lies outside."""
    policy, place = make_policy(), tmp_path / "tuned"
    write_tuned(policy, place)
    path, usual = tmp_path / "strange.onnx", seen(64) + FAR
    bc.export_policy(policy, None, path, tuned=place, guard="full", observations=usual)
    return tuned_port(place, port_of(policy))[0], path


def test_a_comparison_is_with_the_file_s_own_answers(strange, caplog):
    """Full precision would draw noise that nobody recorded, and be compared with the answers of the schedule."""
    port, path = strange
    policy = open_export(path, threads=1, providers=[CPU])
    assert policy.parity.largest == 0
    assert check_export(path, port, count=2).agrees
    save_reference(path, port, count=2)
    policy = open_export(path, threads=1, providers=[CPU])
    assert policy.parity.count == 2
    assert policy.watch.counts == {"judged": 0, "outside": 0, "repeated": 0}
    assert not caplog.records  # nothing stands still


def test_providers_are_compared_in_full_precision_too(strange, monkeypatch):
    from blockcache_runtime import export as module

    asked, plain = [], module.run_session

    def wrong(session, outputs, feed):
        found = plain(session, outputs, feed)
        asked.extend(name for name in outputs if name == "full_action")
        if "full_action" in outputs and len(asked) > 1:  # the first call is the CPU's
            found[0] = found[0] * 1.01
        return found

    monkeypatch.setattr(module, "run_session", wrong)
    with pytest.raises(EngineError, match=r"strange\.onnx in full precision does NOT agree"):
        open_export(strange[1], threads=1, providers=[CPU])


def test_every_weight_is_in_the_file_once(files):
    sizes = {name: path.stat().st_size for name, path in files.items()}
    held = sum(4 * int(np.prod(one.dims)) for one in onnx.load(files["own"]).graph.initializer)
    assert sizes["both"] < sizes["fast"] + sizes["own"] - 0.8 * held


def test_cameras(random_updates, tmp_path):
    policy = image_policy()
    names = [block.name for block in port_of(policy).adapter.blocks]
    steps = len(port_of(policy).timesteps)
    schedule = bc.Schedule(steps, random_updates(names, steps))
    usual = {name: value.numpy() for name, value in observed(batch=40).items()}
    bc.export_policy(policy, schedule, tmp_path / "both.onnx", guard="full", observations=usual)
    bc.export_policy(policy, None, tmp_path / "own.onnx")
    both, own = (open_export(tmp_path / f"{name}.onnx", threads=1) for name in ("both", "own"))
    odd = {name: value[:1] for name, value in usual.items()} | {"hand": usual["hand"][:1] + 100 * FAR}
    noise = both.draw_noise(1, np.random.default_rng(0))
    for _ in range(2):  # the second time features are remembered
        found = both.predict_action(odd, noise=noise)
        assert found["guard_score"][0] > 1
        np.testing.assert_allclose(found["action"], own.predict_action(odd, noise=noise)["action"], atol=1e-5)


def test_a_player_and_a_server_fall_back(opened):
    policy = open_export(opened["both"].path, threads=1)
    watcher, clock = Mock(), Clock()
    worker = Worker(clock, lambda: 0.0)  # under the test's clock: a loop that spins would make every action late
    with Player(policy, rate_hz=10, replan=1, seed=0, watcher=watcher, clock=clock, worker=worker) as player:
        player.observe(np.full(5, FAR, np.float32))
        assert player.next_action() is not None
        assert player.counters["guard_outside"] == 1
        player.reset()
        assert player.counters["guard_outside"] == 0
        assert policy.watch.counts["outside"] == 1
    assert watcher.planned.call_args.args[3]["guard_score"] > 1
    ran, run = [], policy.run_checked
    policy.run_checked = lambda *given, full=False: ran.append(full) or run(*given, full=full)
    with served(ServedExport(policy)) as server:
        from websockets.sync.client import connect

        assert ran.count(True) == 1, "full precision was not warmed up before the port opened"
        with connect(f"ws://127.0.0.1:{server.port}", compression=None) as connection:
            connection.recv(timeout=10)
            for value, full in ((0.0, 1), (FAR, 2)):
                connection.send(pack({"obs": np.full(5, value, np.float32), "reset": True}, bytes_keys=True))
                assert unpack(connection.recv(timeout=10), 10**6)["actions"].shape[1] == 3
                assert ran.count(True) == full
        assert server.metrics.values["guard_total", "outside"] == 1
        with (
            connect(f"ws://127.0.0.1:{server.port}", compression=None) as one,
            connect(f"ws://127.0.0.1:{server.port}", compression=None) as other,
        ):
            for connection, expected in ((one, 0), (other, 0), (one, 1)):  # two robots that start at the same pose
                if not expected:
                    connection.recv(timeout=10)
                connection.send(pack({"obs": np.full(5, 0.5, np.float32)}, bytes_keys=True))
                connection.recv(timeout=10)
                assert server.metrics.values["guard_total", "repeated"] == expected


def test_full_precision_is_warmed_up_once_and_not_timed_with_the_chunks(files):
    policy = open_export(files["both"], threads=1)
    ran, run = [], policy.run_checked
    policy.run_checked = lambda *given, full=False: ran.append(full) or run(*given, full=full)
    with Player(policy, rate_hz=10, replan=1):
        assert ran == [True, False, False, False]


def test_what_is_refused(make_policy, files, tmp_path):
    with pytest.raises(ScheduleError, match="full precision, which this file is already"):
        bc.export_policy(make_policy(), None, tmp_path / "own.onnx", guard="full", observations=seen(64))
    model = onnx.load(files["both"])
    (output,) = (one for one in model.graph.output if one.name == "full_action")
    model.graph.output.remove(output)
    del model.metadata_props[-1]
    (tmp_path / "damaged.onnx").write_bytes(hashed(model))
    with pytest.raises(FileError, match="other inputs or outputs than its header"):
        open_export(tmp_path / "damaged.onnx", threads=1)
    del model.graph.output[:]
    model.graph.output.extend(one for one in onnx.load(files["fast"]).graph.output)
    (tmp_path / "none.onnx").write_bytes(hashed(model))
    with pytest.raises(FileError):
        open_export(tmp_path / "none.onnx", threads=1)


@pytest.mark.parametrize("engine", ["patched", "loop", "onnx"])
def test_accelerate_falls_back_to_the_policy_itself(make_policy, random_updates, exports_stay_here, engine):
    policy, schedule = make_policy(), bc.Schedule(STEPS, random_updates(BLOCKS, STEPS))
    obs = torch.from_numpy(seen(3, seed=1))
    obs[1] += FAR

    def asked(entry, rows=slice(None)):
        return entry(obs[rows], generator=torch.Generator().manual_seed(0))["action"]

    own = asked(policy.predict_action, slice(1, 2))
    with bc.accelerate(policy, schedule, engine, threads=1) as fast:
        plain = asked(fast.predict_action)
    with bc.accelerate(policy, schedule, engine, threads=1, guard="full", observations=seen(64)) as guarded:
        alone, mixed = asked(guarded.predict_action, slice(1, 2)), asked(guarded.predict_action)
        assert guarded.watch.counts == {"judged": 4, "outside": 2, "repeated": 1}
        with pytest.raises(bc.errors.EngineError, match="give a generator, not noise"):
            guarded.predict_action(obs[:1], noise=policy.draw_noise(1))  # which is not outside: at the first call
        guarded.predict_action(obs[:1] + 0.01, noise=None, previous=None)
    torch.testing.assert_close(alone, own, rtol=0, atol=0)
    torch.testing.assert_close(mixed[[0, 2]], plain[[0, 2]], rtol=0, atol=0)
    assert (mixed[1] - plain[1]).abs().max() > 1e-3
    torch.testing.assert_close(asked(policy.predict_action, slice(1, 2)), own, rtol=0, atol=0)  # undone
    with bc.accelerate(policy, schedule, engine, threads=1, guard="count", observations=seen(64)) as counting:
        torch.testing.assert_close(asked(counting.predict_action), plain, rtol=0, atol=0)
        assert counting.watch.counts["outside"] == 1


class ForeignPolicy(foreign_policy.Policy):
    """Takes a number behind its observation."""

    def predict_action(self, obs_dict, factor=1.0):
        return {name: factor * value for name, value in super().predict_action(obs_dict).items()}


def test_a_policy_of_other_code_gets_all_of_its_arguments():
    usual = np.random.default_rng(0).normal(size=(64, foreign_policy.SEEN, foreign_policy.OBS)).astype(np.float32)
    odd, policy = {"obs": torch.from_numpy(usual[:1] + FAR)}, ForeignPolicy()
    answers = []
    with bc.accelerate(policy, None, "patched", guard="full", observations={"obs": usual}) as guarded:
        for given in ((odd,), (odd, 2.0)):
            torch.manual_seed(0)
            answers.append(policy.predict_action(*given)["action"])
        assert guarded.watch.counts["outside"] == 2
        with pytest.raises(bc.errors.EngineError, match="the policy itself takes no previous"):
            policy.predict_action({"obs": torch.from_numpy(usual[:1])}, previous=Previous(np.ones((3, 3)), 1))
    torch.testing.assert_close(answers[1], 2 * answers[0])


def test_a_guard_that_cannot_fall_back_with_the_chunk_before_is_refused_at_once():
    usual = np.random.default_rng(0).normal(size=(64, foreign_policy.SEEN, foreign_policy.OBS)).astype(np.float32)
    policy = foreign_policy.Policy()
    with pytest.raises(bc.errors.EngineError, match="the policy itself takes no previous"):
        bc.accelerate(policy, None, "loop", rtc=True, guard="full", observations={"obs": usual})
    with bc.accelerate(policy, None, "loop", rtc=True, guard="warn", observations={"obs": usual}):
        pass
