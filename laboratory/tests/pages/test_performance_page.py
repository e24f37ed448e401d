"""The savings one by one in `bench`, and the page on performance that is made of its figures."""

import json
from pathlib import Path

import pytest

import blockcache as bc
from blockcache.report.markdown import render
from blockcache_lab.pages import performance
from blockcache_lab.studies.savings import add_savings
from cli_inputs import COLUMNS, run_benchmark
from performance_figures import synthetic
from repository import GENERATED

pytestmark = pytest.mark.usefixtures("in_an_empty_directory")


@pytest.fixture(scope="module")
def measured(tmp_path_factory):
    """With the rows that the laboratory brings."""
    return run_benchmark(tmp_path_factory.mktemp("savings"), savings=add_savings)


def test_bench_measures_the_savings_one_by_one(measured):
    rows = {row["name"]: row for row in measured["rows"]}
    assert all(set(row) == COLUMNS for row in rows.values())
    assert [name for name in rows if not name.startswith("savings: ")] == list(rows)[:9]
    assert list(rows)[9:] == [
        "savings: conditions encoded at every step",
        "savings: + conditions encoded once",
        "savings: + keys, values and queries folded once",
        "savings: + constant sampler",
        "savings: + executed actions only",
    ]
    for name, row in list(rows.items())[9:]:
        assert len(row["samples_ms"]) == 2
        assert 0 < row["p50_ms"] <= row["p95_ms"] <= row["p99_ms"]
        assert row["action_hz"] == pytest.approx(8 * row["chunk_hz"])
        assert row["gflops"] == pytest.approx(row["gflop"] / row["p50_ms"] * 1e3)
        assert row["max_difference"] < 1e-5, name
        assert row["over_full"] is None


def test_savings_without_causal_attention_compute_the_whole_chunk(blockcache, make_policy, monkeypatch):
    """Through the entry point, as it is installed."""
    monkeypatch.setattr("blockcache.measure.machine.peak_gflops.__defaults__", (64, 0.05))
    monkeypatch.setattr("blockcache.measure.latency.REST", 0.0)
    monkeypatch.setattr("torch.compile", lambda model: model)
    bc.save_policy(make_policy(causal_attn=False), "policy")
    blockcache("bench", "policy", "--threads", 1, "--repeats", 5, "--json", "b.json")
    names = [row["name"] for row in json.loads(Path("b.json").read_text())["rows"]]
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
    assert '"blockcache[plots]"' in refused("paper", "performance", "-o", "docs")


def test_the_published_page_is_what_the_code_makes_of_the_published_figures():
    """docs/generated/results.md has its own test."""
    made = render(performance.page(json.loads((GENERATED / "performance.json").read_text())))
    assert made == (GENERATED / "performance.md").read_text()
