"""The verbs bench and performance: what is measured, and the page made from it."""

import json
from pathlib import Path

import pytest

import blockcache as bc
from blockcache.results.bench import FORMAT
from cli_inputs import SMALL, STEPS, synthetic

pytestmark = pytest.mark.usefixtures("in_an_empty_directory")
COLUMNS = {
    "name", "engine", "threads", "p50_ms", "p95_ms", "p99_ms", "chunk_hz", "action_hz", "speedup", "over_full", "gflop",
    "gflops", "of_peak", "max_difference", "saving", "limit", "samples_ms",
}  # fmt: skip


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
        "savings: conditions encoded at every step",
        "savings: + conditions encoded once",
        "savings: + keys, values and queries folded once",
        "savings: + constant sampler",
        "savings: + executed actions only",
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
    assert "savings: + constant sampler" in names
    assert not any("executed actions only" in name for name in names)


def test_the_performance_page_is_made_from_its_figures(blockcache, measured):
    Path("docs").mkdir()
    Path("docs/performance.json").write_text(json.dumps(synthetic(measured)))
    assert blockcache("paper", "performance", "-o", "docs", "--render-only").strip() == "docs/performance.md"
    page = Path("docs/performance.md").read_text()
    for row in measured["rows"]:
        assert f"| {row['name'].removeprefix('savings: ')} | {row['p50_ms']:.1f} |" in page
    assert "Not available: eager + torch.compile (RuntimeError: no compiler here)." in page
    assert "| T = 16 | 5.0 | 5.0 | 5.0 | 5.0 | 2e-06 |" in page
    assert "| 8 x 256, T = 10 | 36.0 | 39.0 |" in page
    assert "| with action costs | 40.0 | 900 |" in page
    older = {key: value for key, value in synthetic(measured).items() if key != "calibration"}
    Path("docs/performance.json").write_text(json.dumps(older))
    blockcache("paper", "performance", "-o", "docs", "--render-only")
    assert "with action costs" not in Path("docs/performance.md").read_text()
    assert "(performance-bench.png)" in page
    assert Path("docs", "performance-bench.png").read_bytes().startswith(b"\x89PNG")


def test_the_performance_page_from_wrong_figures(refused, measured):
    assert refused("paper", "performance", "-o", "docs", "--render-only").startswith("no performance file at")
    Path("docs").mkdir()
    for changes, sentence in (({"format": "other"}, "is not a performance file"), ({"version": 2}, "format version 2")):
        Path("docs/performance.json").write_text(json.dumps({**synthetic(measured), **changes}))
        assert sentence in refused("paper", "performance", "-o", "docs", "--render-only")


def test_pictures_without_matplotlib_are_refused_before_anything_is_measured(refused, monkeypatch):
    monkeypatch.setattr("blockcache.extras.find_spec", lambda name: None)
    monkeypatch.setattr("blockcache.compare.bench.run_bench", lambda *args, **settings: pytest.fail("measured"))
    for words in (["bench", *SMALL, "--plot", "b.png"], ["paper", "performance", "-o", "docs"]):
        assert '"blockcache[plots]"' in refused(*words)
