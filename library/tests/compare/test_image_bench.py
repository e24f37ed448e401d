"""The benchmark of a camera policy: the encoder by itself, its share, and the ceiling that it sets."""

import json

import pytest
import torch

from blockcache.compare.bench import run_bench
from blockcache.compare.candidates import Candidate
from blockcache.models.loading import save_policy
from blockcache.models.registry import port_of
from blockcache.report.bench import encoder_ceilings
from blockcache.results.bench import FORMAT
from blockcache.schedule import Schedule, generation_flops
from image_policies import BLOCKS, REDUCED, PublicImagePolicy, image_policy, observed, strange

pytestmark = pytest.mark.usefixtures("exports_stay_here")


@pytest.fixture
def quick(monkeypatch):
    monkeypatch.setattr("blockcache.measure.machine.peak_gflops.__defaults__", (64, 0.05))
    monkeypatch.setattr("blockcache.measure.latency.REST", 0.0)


def bench(policy, obs):
    return run_bench(port_of(policy), REDUCED, obs, {}, threads=1, repeats=3, quick=True, progress=False)


@pytest.mark.parametrize("make", [image_policy, lambda: PublicImagePolicy(image_policy())], ids=["ours", "public"])
def test_the_encoder_is_timed_by_itself_in_every_engine(make, quick):
    found = bench(make(), observed(batch=1, dtype=torch.float32))
    rows = {row.name: row for row in found.rows}
    assert [(item.engine, item.threads) for item in found.encoder] == [("eager", 1), ("loop", 1), ("onnx", 1)]
    eager, loop, onnx = found.encoder
    assert set(eager.shares) == {"eager, 1 thread", "BAC, patched"}
    assert set(loop.shares) == {"full precision, loop", "BAC, loop"}
    assert {name for name in onnx.shares if "BAC" in name} == {
        "BAC, onnx, 1 thread",
        "BAC, onnx, 1 thread, executed actions only",
    }
    for item in found.encoder:
        assert item.gflop == pytest.approx(port_of(make()).encoder_flops / 1e9)
        assert item.ceiling == pytest.approx(rows[found.eager].p50_ms / item.p50_ms)
        for name, share in item.shares.items():
            assert share == pytest.approx(item.p50_ms / rows[name].p50_ms)
    for name, row in rows.items():
        if "BAC" not in name and "Uniform" not in name:
            assert row.max_difference < 1e-5


def test_behind_an_encoder_that_nobody_knows_it_is_timed_in_torch(quick):
    found = bench(strange(), observed(batch=1, dtype=torch.float32))
    (alone,) = found.encoder
    assert (alone.engine, alone.gflop) == ("eager", 0.0)
    assert {"BAC, onnx, 1 thread", "BAC, loop", "BAC, patched"} <= set(alone.shares)


def test_without_cameras_nothing_is_said(quick, make_policy, observe, tmp_path):
    found = bench(make_policy(), observe())
    assert found.encoder == []
    FORMAT.save(tmp_path / "bench.json", found.to_dict())
    assert "encoder" not in json.loads((tmp_path / "bench.json").read_text())


def test_the_encoder_s_flops_count_once_in_a_generation():
    port = port_of(image_policy())
    blocks, every = port.adapter.blocks, port.adapter.every_step
    assert port.encoder_flops == port.program().encoder_flops > 0
    for strategy in (None, REDUCED, Schedule(6, dict.fromkeys(BLOCKS, (0,)))):
        assert Candidate(strategy, "loop").flops(port, 0.0) == port.encoder_flops + generation_flops(
            blocks, every, 6, strategy
        )
    assert port_of(PublicImagePolicy(image_policy())).encoder_flops == port.encoder_flops
    assert port_of(strange()).encoder_flops == 0  # nobody knows


def test_bench_says_the_ceiling(quick, blockcache, in_an_empty_directory, tmp_path):
    save_policy(image_policy(), tmp_path / "policy")
    said = blockcache("bench", "policy", "--quick", "--repeats", 2, "--threads", 1, "--json", "bench.json")
    written = json.loads((tmp_path / "bench.json").read_text())
    FORMAT.load(tmp_path / "bench.json")
    (onnx,) = [item for item in written["encoder"] if item["engine"] == "onnx"]
    line = encoder_ceilings(written).text.splitlines()[-1]
    assert line.startswith(f"The encoder in onnx, 1 thread: {onnx['p50_ms']:.1f} ms (")
    assert f"at most {onnx['ceiling']:.1f}x as fast as eager, 1 thread" in line
    assert "however fast the denoiser" in " ".join(said.split())
