"""The verb bench: what is measured."""

import json
from pathlib import Path

import pytest

import blockcache as bc
from blockcache.results.bench import FORMAT
from cli_inputs import COLUMNS, SMALL, STEPS

pytestmark = pytest.mark.usefixtures("in_an_empty_directory")


def test_bench_measures_every_candidate(measured):
    assert (measured["format"], measured["version"]) == ("blockcache.bench", 1)
    assert measured["shape"]["width"] == 16
    assert measured["schedule"]["stretched"]
    assert measured["unavailable"] == {"eager + torch.compile": "RuntimeError: no compiler here"}
    rows = {row["name"]: row for row in measured["rows"]}
    assert all(set(row) == COLUMNS for row in rows.values())
    assert list(rows) == [
        "eager, 1 thread",
        "BAC, patched",
        "full precision, loop",
        "BAC, loop",
        "full precision, onnx, 1 thread",
        "full precision, onnx unrolled, 1 thread",
        "BAC, onnx, 1 thread",
        "Uniform at equal FLOPs, onnx, 1 thread",
        "BAC, onnx, 1 thread, executed actions only",
    ]
    for name, row in rows.items():
        assert len(row["samples_ms"]) == 2
        assert 0 < row["p50_ms"] <= row["p95_ms"] <= row["p99_ms"]
        assert row["action_hz"] == pytest.approx(8 * row["chunk_hz"])
        assert row["gflops"] == pytest.approx(row["gflop"] / row["p50_ms"] * 1e3)
        if "BAC" not in name and "Uniform" not in name:
            assert row["max_difference"] < 1e-5, name
    with_full = [name for name, row in rows.items() if row["over_full"] is not None]
    assert with_full == [name for name in rows if "BAC" in name or "Uniform" in name]


def test_bench_quick(blockcache, monkeypatch):
    monkeypatch.setattr("blockcache.measure.machine.peak_gflops.__defaults__", (64, 0.05))
    monkeypatch.setattr("blockcache.measure.latency.REST", 0.0)
    out = blockcache("bench", *SMALL, "--quick", "--sampler", "dpmsolver++", "--json", "b.json", "--plot", "b.png")
    summary = json.loads(out.splitlines()[-1])
    assert json.loads(Path("b.json").read_text())["made_by"].startswith("blockcache ")
    rows = FORMAT.load("b.json")["rows"]
    assert list(summary) == [row["name"] for row in rows]
    assert len(rows) == 8
    assert all(set(row) == COLUMNS for row in rows)
    assert all(len(row["samples_ms"]) == 5 for row in rows)
    assert Path("b.png").read_bytes().startswith(b"\x89PNG")
    assert "over eager" in out


def test_bench_a_policy_and_schedule_of_one_s_own(blockcache, policy_directory, monkeypatch):
    monkeypatch.setattr("blockcache.measure.machine.peak_gflops.__defaults__", (64, 0.05))
    monkeypatch.setattr("blockcache.measure.latency.REST", 0.0)
    blockcache("calibrate", policy_directory, "--generations", 1)
    blockcache("solve", "recording.safetensors", "--method", "uniform", "-S", 4)
    options = ["--schedule", "schedule.json", "--threads", 1, "--batch", 2]
    blockcache("bench", policy_directory, *options, "--quick", "--json", "b.json")
    result = json.loads(Path("b.json").read_text())
    assert result["schedule"]["method"] == "uniform"
    shape = {"width": 16, "layers": 2, "heads": 2, "horizon": 6, "n_obs_steps": 2, "obs_dim": 5, "action_dim": 3}
    shape |= {"n_action_steps": 4, "sampler": "ddpm", "steps": STEPS, "batch": 2, "family": "dp-t", "hidden": 64}
    assert result["shape"] == {**shape, "tokens": 6, "cond_tokens": 3, "cond_dim": 5, "input_dim": 3}


def test_bench_without_causal_attention_computes_the_whole_chunk(blockcache, make_policy, monkeypatch):
    monkeypatch.setattr("blockcache.measure.machine.peak_gflops.__defaults__", (64, 0.05))
    monkeypatch.setattr("blockcache.measure.latency.REST", 0.0)
    monkeypatch.setattr("torch.compile", lambda model: model)
    bc.save_policy(make_policy(causal_attn=False), "policy")
    blockcache("bench", "policy", "--threads", 1, "--repeats", 5, "--json", "b.json")
    names = [row["name"] for row in json.loads(Path("b.json").read_text())["rows"]]
    assert "BAC, onnx, 1 thread" in names
    assert not any("executed actions only" in name for name in names)


def test_pictures_without_matplotlib_are_refused_before_anything_is_measured(refused, monkeypatch):
    monkeypatch.setattr("blockcache.extras.find_spec", lambda name: None)
    monkeypatch.setattr("blockcache.compare.bench.run_bench", lambda *args, **settings: pytest.fail("measured"))
    assert '"blockcache[plots]"' in refused("bench", *SMALL, "--plot", "b.png")
