"""The command line: every verb, errors as one line, and nothing heavy before it is needed."""

import json
import os
import subprocess
import sys
from contextlib import contextmanager
from pathlib import Path

import numpy as np
import pytest
import torch
from torch.utils.flop_counter import FlopCounterMode

import blockcache as bc
from blockcache import cli
from blockcache.cli import bench, demo, evaluate, schedules, suite, training
from blockcache.engines.compiled import compile_policy
from blockcache.engines.loop import Loop
from blockcache.experiments.bench import Shape, preset_for
from blockcache.experiments.savings import EncodedMemory, ProjectedMemory
from blockcache.plan import compile_plan
from blockcache.samplers import SamplerConfig
from blockcache.target import examine

VERBS = [command.name for module in (demo, schedules, bench, evaluate, suite, training) for command in module.COMMANDS]
STEPS = 20  # demo solves for S = 20
SMALL = ["--width", "16", "--layers", "1", "--steps", "4", "--threads", "1"]


@pytest.fixture(autouse=True)
def in_an_empty_directory(monkeypatch, tmp_path):
    """Defaults such as `schedule.json` are written here, and exports are kept here."""
    monkeypatch.setenv("BLOCKCACHE_CACHE", str(tmp_path / "cache"))
    monkeypatch.chdir(tmp_path)


@pytest.fixture
def policy(make_policy, tmp_path):
    """A tiny policy directory with observations in it."""
    directory = tmp_path / "policy"
    bc.save_policy(make_policy(sampler=SamplerConfig("ddpm", num_inference_steps=STEPS)), directory)
    observations = np.random.default_rng(0).standard_normal((8, 2, 5), dtype=np.float32)
    np.savez(directory / "observations.npz", obs=observations)
    return directory


@pytest.fixture
def blockcache(capsys):
    """Runs a verb in this process: its standard output."""

    def run(*words):
        capsys.readouterr()
        cli.main([str(word) for word in words])
        return capsys.readouterr().out

    return run


@pytest.fixture
def refused(capsys):
    """Runs a verb that must fail: the one line on standard error."""

    def run(*words):
        capsys.readouterr()
        with pytest.raises(SystemExit) as caught:
            cli.main([str(word) for word in words])
        assert caught.value.code == 2
        lines = capsys.readouterr().err.splitlines()
        (line,) = [line for line in lines if not is_progress(line)]
        assert line.startswith("error: ")
        assert "Traceback" not in line
        return line.removeprefix("error: ")

    return run


def is_progress(line):
    return not line.strip() or "it/s" in line or "%|" in line


def shell(*words, **settings):
    """Runs a verb in a process of its own."""
    command = [sys.executable, "-c", "import sys; from blockcache.cli import main; main(sys.argv[1:])"]
    return subprocess.run([*command, *map(str, words)], capture_output=True, text=True, timeout=120, **settings)


@contextmanager
def cut_short(path):
    """For a while the file has lost its second half."""
    whole = Path(path).read_bytes()
    Path(path).write_bytes(whole[: len(whole) // 2])
    yield
    Path(path).write_bytes(whole)


# -- help


@pytest.mark.parametrize("verb", VERBS)
@pytest.mark.parametrize("option", ["--help", "-h"])
def test_help_has_an_example(blockcache, verb, option):
    text = blockcache(verb, option)
    assert text.startswith(f"Usage: blockcache {verb}")
    assert "Example" in text
    assert f"  blockcache {verb} " in text or f"  blockcache {verb}\n" in text


@pytest.mark.parametrize("words", [["--help"], ["-h"], [], ["--debug"]], ids=str)
def test_without_a_verb_there_is_help(blockcache, words):
    text = blockcache(*words)
    assert "blockcache demo" in text
    assert all(f"\n  {verb} " in text for verb in VERBS)


def test_the_issue_s_verbs_are_there():
    assert {"demo", "calibrate", "solve", "show", "flops", "export", "bench", "performance", "eval"} <= set(VERBS)


def test_version(blockcache):
    assert blockcache("--version").strip() == f"blockcache, version {bc.__version__}"


@pytest.mark.parametrize(
    "words", [["--help"], ["show", "square_ph"], ["flops", "square_ph"], ["solve", "--help"]], ids=str
)
def test_what_needs_no_torch_does_not_load_it(words):
    """Torch takes seconds. Even `import blockcache` does without it until something of it is used."""
    code = (
        "import sys, blockcache, blockcache.cli\n"
        "blockcache.cli.main(sys.argv[1:])\n"
        "heavy = {'torch', 'diffusers', 'onnx', 'onnxruntime', 'matplotlib'} & set(sys.modules)\n"
        "assert not heavy, heavy\n"
    )
    done = subprocess.run([sys.executable, "-c", code, *words], capture_output=True, text=True, timeout=120)
    assert done.returncode == 0, done.stderr


def test_all_that_is_exported_is_there():
    assert all(getattr(bc, name) is not None for name in bc.__all__)
    assert set(bc.__all__) <= set(dir(bc))
    with pytest.raises(AttributeError, match="no attribute 'nothing'"):
        bc.nothing  # noqa: B018


# -- the flow


def test_from_a_policy_to_a_file_for_the_robot(blockcache, policy):
    said = blockcache("calibrate", policy, "--generations", 3)
    assert said.startswith("recording.safetensors: 6 blocks x 20 steps from 3 generations in ")
    said = blockcache("solve", "recording.safetensors", "-S", 5, "-n", 2)
    assert said.startswith("schedule.json: ")
    schedule = bc.Schedule.load("schedule.json")
    assert f"{schedule.computed} of 120 block computations" in said
    assert len(schedule.updates["layers.0.SA"]) == 5

    picture = blockcache("show", "schedule.json").splitlines()
    assert picture[0].startswith("bac, K = 20, S = 5, n = 2")
    rows = [line for line in picture if line.startswith("layers.")]
    for line, (name, steps) in zip(rows, schedule.updates.items(), strict=True):
        marks = "".join("#" if step in steps else "." for step in range(STEPS))
        assert line.split() == [name, marks, str(len(steps))]
    plan = blockcache("show", "schedule.json", "--plan").splitlines()
    assert plan[0].startswith("step   0: layers.0.SA layers.0.CA layers.0.FFN layers.1.SA")
    assert len(plan) == STEPS

    table = blockcache("flops", "schedule.json", "--policy", policy)
    assert "full precision" in table
    assert f"{schedule.reused_share:.1%}" in table

    for options in (["schedule.json"], ["schedule.json", "--actions-only"], []):
        assert blockcache("export", policy, *options).startswith("policy.onnx: ")
        runner = bc.open_export("policy.onnx", bc.load_policy(policy), threads=1)
        assert runner.header["output"] == ("action" if "--actions-only" in options else "chunk")
        assert (runner.header["schedule"]["layers.0.SA"] == list(range(STEPS))) == (not options)


def test_a_schedule_for_other_weights_needs_a_word(blockcache, refused, policy, make_policy, tmp_path):
    blockcache("calibrate", policy, "--generations", 1)
    blockcache("solve", "recording.safetensors", "-S", 5)
    other = make_policy(seed=1, sampler=SamplerConfig("ddpm", num_inference_steps=STEPS))
    bc.save_policy(other, tmp_path / "other")
    line = refused("export", tmp_path / "other", "schedule.json")
    assert "does not fit the policy, which has weights" in line
    assert not Path("policy.onnx").exists()
    assert blockcache("export", tmp_path / "other", "schedule.json", "--other-weights")


@pytest.mark.parametrize("name", bc.published_names())
def test_show_a_printed_schedule(blockcache, name):
    text = blockcache("show", name)
    assert f"from = paper, {name}" in text
    assert text.count("\nlayers.") == 24
    assert len(blockcache("show", name, "--plan").splitlines()) == 100


def test_twelve_schedules_are_printed():
    assert len(bc.published_names()) == 12


def test_flops_of_the_paper_s_shape(blockcache):
    text = blockcache("flops", "square_ph", "kitchen")
    assert "15.739" in text
    assert blockcache("flops", "--width", 16) != blockcache("flops")


def test_demo_on_a_policy_of_one_s_own(blockcache, policy):
    text = blockcache("demo", "--policy", policy, "--generations", 2, "--repeats", 1)
    lines = text.splitlines()
    assert "20 DDPM steps" in lines[0]
    assert "calibrated on 2 generations" in text
    for method, engine in (("full precision", "eager"), ("Uniform, S = 10", "patched"), ("BAC, S = 20", "onnx")):
        assert any(line.startswith(method) and f" {engine} " in line for line in lines)
    assert "Noise floor" in text


# -- the benchmark


@pytest.fixture(scope="module")
def measured(tmp_path_factory):
    """One small run of the whole benchmark; torch.compile is not available."""
    directory = tmp_path_factory.mktemp("bench")
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("BLOCKCACHE_CACHE", str(directory / "cache"))

        def compile_nothing(model):
            raise RuntimeError("no compiler here\nand more lines")

        patch.setattr("torch.compile", compile_nothing)
        patch.setattr("blockcache.experiments.machine.peak_gflops.__defaults__", (64, 0.05))
        patch.setattr("blockcache.experiments.latency.REST", 0.0)
        cli.main(["bench", *SMALL, "--repeats", "2", "--json", str(directory / "bench.json")])
    return json.loads((directory / "bench.json").read_text())


COLUMNS = {
    "name", "engine", "threads", "p50_ms", "p95_ms", "p99_ms", "chunk_hz", "action_hz", "speedup", "over_full", "gflop",
    "gflops", "of_peak", "max_difference", "samples_ms",
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
        "savings: + keys and values once",
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


def test_bench_tells_the_savings_flops_as_torch_counts_them(measured):
    shape = Shape(width=16, layers=1, steps=4)
    policy, target = shape.policy(), examine(shape.policy())
    matrices = compile_policy(target, "loop")
    plan = compile_plan(bc.Schedule.every_step(4, preset_for(shape).blocks))
    loops = [Loop(matrices, plan, memory) for memory in (EncodedMemory, ProjectedMemory, None, None)]
    loops.append(Loop(matrices.cut(policy.config.executed.stop), plan))
    real = []
    for loop in loops:
        with FlopCounterMode(display=False) as counter:
            loop(torch.zeros(1, 2, 66), policy.draw_noise(1))
        real.append(counter.get_total_flops())
    said = [row["gflop"] for row in measured["rows"] if row["name"].startswith("savings")]
    assert said == pytest.approx([count / 1e9 for count in real], rel=1e-12)


def test_bench_quick(blockcache, monkeypatch):
    monkeypatch.setattr("blockcache.experiments.machine.peak_gflops.__defaults__", (64, 0.05))
    monkeypatch.setattr("blockcache.experiments.latency.REST", 0.0)
    out = blockcache("bench", *SMALL, "--quick", "--sampler", "dpmsolver++", "--json", "b.json", "--plot", "deep/b.png")
    summary = json.loads(out.splitlines()[-1])
    rows = json.loads(Path("b.json").read_text())["rows"]
    assert list(summary) == [row["name"] for row in rows]
    assert len(rows) == 8
    assert all(set(row) == COLUMNS for row in rows)
    assert all(len(row["samples_ms"]) == 5 for row in rows)
    assert Path("deep/b.png").read_bytes().startswith(b"\x89PNG")
    assert "over eager" in out


def test_bench_a_policy_and_schedule_of_one_s_own(blockcache, policy, monkeypatch):
    monkeypatch.setattr("blockcache.experiments.machine.peak_gflops.__defaults__", (64, 0.05))
    monkeypatch.setattr("blockcache.experiments.latency.REST", 0.0)
    blockcache("calibrate", policy, "--generations", 1)
    blockcache("solve", "recording.safetensors", "--method", "uniform", "-S", 4)
    options = ["--policy", policy, "--schedule", "schedule.json", "--threads", 1, "--batch", 2]
    blockcache("bench", *options, "--quick", "--json", "b.json")
    result = json.loads(Path("b.json").read_text())
    assert result["schedule"]["method"] == "uniform"
    assert (result["shape"]["steps"], result["shape"]["batch"]) == (STEPS, 2)


def synthetic(bench_result):
    """A performance.json with made-up figures around a real benchmark."""
    points = [{"x": x, "computed": 24 * x, "ms": 3.0 + 0.5 * x} for x in (10, 20, 40)]
    foot = {
        "weights_mb": 36.0, "file_mb": 39.0, "export_s": 2.0, "calls": 30, "generations": 60, "p50_ms": 40.0,
        "p99_ms": 50.0, "peak_over_weights": 2.5, "load_s": 1.0, "peak_mb": 90.0, "growth_mb": 0.1,
    }  # fmt: skip
    engines = ("patched", "loop", "onnx_1", "onnx_n")
    return {
        "format": "blockcache.performance",
        "version": 1,
        "bench": bench_result,
        "shapes": [{"name": "T = 16", "ms": dict.fromkeys(engines, 5.0), "difference": dict.fromkeys(engines, 2e-6)}],
        "growth": {"steps": points, "updates": points},
        "footprint": {"8 x 256, T = 10": foot},
    }


def test_the_performance_page_is_made_from_its_figures(blockcache, measured):
    Path("docs").mkdir()
    Path("docs/performance.json").write_text(json.dumps(synthetic(measured)))
    assert blockcache("performance", "-o", "docs", "--render-only").strip() == "docs/performance.md"
    page = Path("docs/performance.md").read_text()
    for row in measured["rows"]:
        assert f"| {row['name'].removeprefix('savings: ')} | {row['p50_ms']:.1f} |" in page
    assert "Not available: eager + torch.compile (RuntimeError: no compiler here)." in page
    assert "| T = 16 | 5.0 | 5.0 | 5.0 | 5.0 | 2e-06 |" in page
    assert "| 8 x 256, T = 10 | 36.0 | 39.0 |" in page
    for picture in ("performance-bench.png", "performance-growth.png"):
        assert f"({picture})" in page
        assert Path("docs", picture).read_bytes().startswith(b"\x89PNG")


def test_the_performance_page_from_wrong_figures(refused, measured):
    assert refused("performance", "-o", "docs", "--render-only").startswith("no performance file at")
    Path("docs").mkdir()
    for changes, sentence in (({"format": "other"}, "is not a performance file"), ({"version": 2}, "format version 2")):
        Path("docs/performance.json").write_text(json.dumps({**synthetic(measured), **changes}))
        assert sentence in refused("performance", "-o", "docs", "--render-only")


def test_pictures_without_matplotlib_are_refused_before_anything_is_measured(refused, monkeypatch):
    monkeypatch.setattr("blockcache.report.performance.find_spec", lambda name: None)
    monkeypatch.setattr("blockcache.experiments.bench.run_bench", lambda *args, **settings: pytest.fail("measured"))
    for words in (["bench", *SMALL, "--plot", "b.png"], ["performance", "-o", "docs"]):
        assert 'pip install "blockcache[plots]"' in refused(*words)


# -- errors


@pytest.mark.parametrize(
    ("words", "sentence"),
    [
        ("nonsense", "No such command 'nonsense'"),
        ("show", "Missing argument 'SCHEDULE'"),
        ("show square_ph --nonsense", "No such option"),
        ("show nowhere.json", "no schedule 'nowhere.json': neither a file nor one of can_ph, lift_ph,"),
        ("show .", "cannot read the schedule ."),
        ("calibrate nowhere", "no policy 'nowhere': it is neither a directory nor one of the shipped policies ("),
        ("calibrate policy --generations 0", "Invalid value for '--generations'"),
        ("calibrate policy --observations nowhere.npz", "cannot read observations from nowhere.npz"),
        ("calibrate policy --seed x", "Invalid value for '--seed'"),
        ("solve nowhere.safetensors", "no recording at nowhere.safetensors"),
        ("flops --steps 50 square_ph", "the schedule is for 100 steps, the generation has 50"),
        ("flops --layers 0", "Invalid value for '--layers'"),
        ("flops square_ph --policy policy", "the schedule is for 100 steps, the generation has 20"),
        ("export policy square_ph", "does not fit the policy"),
        ("export nowhere", "no policy 'nowhere'"),
        ("bench --width 10", "n_emb must be even"),
        ("bench --horizon 4", "the executed slice ends at 9, behind the horizon 4"),
        ("bench --sampler euler", "sampler setting type"),
        ("bench --steps 101", "num_inference_steps"),
        ("bench --batch 0", "Invalid value for '--batch'"),
        ("demo --policy nowhere", "no policy 'nowhere'"),
        ("demo --policy policy --generations 8", "the policy brings 8 observations; 8 to calibrate on leave none"),
    ],
)  # fmt: skip
def test_errors_are_one_line(refused, policy, words, sentence):
    before = set(Path().rglob("*"))
    assert sentence in refused(*words.split())
    assert set(Path().rglob("*")) <= before | {Path("cache")}


def test_a_policy_without_observations_says_so(refused, policy):
    (policy / "observations.npz").unlink()
    for words in (["calibrate", policy], ["demo", "--policy", policy]):
        assert "brings no observations" in refused(*words)


@pytest.mark.parametrize(
    ("array", "sentence"),
    [
        ({"obs": np.zeros((4, 3, 5))}, "have shape (4, 3, 5), expected (N, 2, 5)"),
        ({"obs": np.zeros((0, 2, 5))}, "have shape (0, 2, 5), expected (N, 2, 5)"),
        ({"obs": np.full((4, 2, 5), "x")}, "are no numbers"),
        ({"obs": np.full((4, 2, 5), np.nan)}, "NaN or infinity"),
        ({"obs": np.array([{}])}, "cannot read observations"),
        ({"other": np.zeros((4, 2, 5))}, "cannot read observations"),
    ],
    ids=lambda value: "" if isinstance(value, dict) else value,
)
def test_observations_that_are_refused(refused, policy, array, sentence):
    np.savez("obs.npz", **array)
    assert sentence in refused("calibrate", policy, "--observations", "obs.npz")
    assert not Path("recording.safetensors").exists()


def test_damaged_files_are_one_line(blockcache, refused, policy):
    blockcache("calibrate", policy, "--generations", 1)
    blockcache("solve", "recording.safetensors", "-S", 5)
    for file, words in (
        (policy / "config.json", ["calibrate", policy]),
        (policy / "model.safetensors", ["calibrate", policy]),
        (policy / "observations.npz", ["calibrate", policy]),
        ("recording.safetensors", ["solve", "recording.safetensors"]),
        ("schedule.json", ["show", "schedule.json"]),
        ("schedule.json", ["export", policy, "schedule.json"]),
    ):
        with cut_short(file):
            line = refused(*words)
        assert str(file) in line
        assert "should not happen" not in line
    blockcache("show", "schedule.json")


@pytest.mark.parametrize(
    "words",
    [
        "calibrate policy --generations 1 -o file/x",
        "solve recording.safetensors -S 5 -o file/x",
        "export policy -o file/x",
        "bench --quick --json file/x",
        "bench --quick --plot file/x",
        "performance --render-only -o docs",
    ],
)
def test_an_unwritable_place_is_one_line(blockcache, refused, policy, measured, monkeypatch, words):
    monkeypatch.setattr("blockcache.experiments.machine.peak_gflops.__defaults__", (64, 0.05))
    monkeypatch.setattr("blockcache.experiments.latency.REST", 0.0)
    Path("file").write_text("not a directory")
    if words.startswith("solve"):
        blockcache("calibrate", policy, "--generations", 1)
    if words.startswith("performance"):
        Path("docs/performance-bench.png").mkdir(parents=True)  # a directory in the picture's place
        Path("docs/performance.json").write_text(json.dumps(synthetic(measured)))
    more = SMALL if words.startswith("bench") else []
    line = refused(*words.split(), *more)
    assert line.startswith("cannot write")
    assert line.endswith("; nothing was changed")
    assert Path("file").read_text() == "not a directory"


def test_debug_gives_the_traceback():
    for words in (["--debug", "show", "nowhere"], ["show", "nowhere", "--debug"]):
        done = shell(*words)
        assert done.returncode != 0
        assert done.stderr.startswith("Traceback")
        assert "FileError: no schedule 'nowhere'" in done.stderr


def test_without_debug_a_process_ends_with_2_and_one_line():
    done = shell("show", "nowhere")
    assert done.returncode == 2
    assert done.stdout == ""
    assert done.stderr.count("\n") == 1
    assert done.stderr.startswith("error: no schedule 'nowhere'")


def test_what_should_not_happen_is_one_line_too(refused, monkeypatch):
    monkeypatch.setattr("blockcache.schedule.Schedule.load", lambda path: 1 // 0)
    Path("schedule.json").write_text("{}")
    line = refused("show", "schedule.json")
    assert line.startswith("ZeroDivisionError: ")
    assert line.endswith("(this should not happen; run again with --debug)")


def test_an_interrupt_ends_with_130(monkeypatch, capsys):
    def interrupt(path):
        raise KeyboardInterrupt

    monkeypatch.setattr("blockcache.schedule.Schedule.load", interrupt)
    Path("schedule.json").write_text("{}")
    with pytest.raises(SystemExit) as caught:
        cli.main(["show", "schedule.json"])
    assert caught.value.code == 130
    assert capsys.readouterr().err.strip() == "interrupted"


def test_a_reader_that_goes_away_is_no_error():
    """As in `blockcache show square_ph --plan | head -1`."""
    read, write = os.pipe()
    os.close(read)
    code = "from blockcache.cli import main; main(['show', 'square_ph', '--plan'])"
    try:
        done = subprocess.run([sys.executable, "-c", code], stdout=write, stderr=subprocess.PIPE, text=True, timeout=60)
    finally:
        os.close(write)
    assert done.stderr == ""


@pytest.mark.parametrize(
    "name", ["bc.solvers.adaptive", "bc.solvers.fit_teacache", "bc.flops.generation", "bc.samplers.table"]
)
def test_modules_are_at_hand_after_a_plain_import(name):
    """In a process of its own: here something else has imported them already."""
    done = subprocess.run([sys.executable, "-c", f"import blockcache as bc; {name}"], capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
