"""The onnx engine's cache of exports, and the libraries and threads it takes."""

import os
import subprocess
import sys
import tempfile
import types
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace

import onnx
import pytest
import torch

import blockcache as bc
from blockcache import cache as exports
from blockcache.cache import cache_directory
from blockcache.engines import onnx as engine
from blockcache.engines.build import build
from blockcache.errors import EngineError, FileError, StaleError
from blockcache.models.registry import port_of
from blockcache.samplers import DDPM
from blockcache_runtime import open_export
from blockcache_runtime import session as session_module
from blockcache_runtime.session import MINIMUM
from onnx_files import BLOCKS, hashed, header, with_header
from repository import ROOT

CACHE, ENGINE, SESSION = "blockcache.cache", "blockcache.engines.onnx", "blockcache_runtime.session"


pytestmark = pytest.mark.usefixtures("exports_stay_here")


# -- the cache


def act(policy, observe):
    return policy.predict_action(observe(), generator=torch.Generator().manual_seed(0))["action"]


def kept_in(directory):
    """All that is there, without the lock."""
    return [path for path in directory.iterdir() if path.name != ".lock"]


def forbid(*args):
    raise AssertionError("this should have come from the cache")


def test_an_export_is_made_once(policy, make_policy, schedule, observe, exports_stay_here, monkeypatch):
    with bc.accelerate(policy, schedule, engine="onnx", threads=1):
        expected = act(policy, observe)
    (kept,) = kept_in(exports_stay_here)
    monkeypatch.setattr(f"{ENGINE}._file", forbid)
    same = bc.Schedule(6, schedule.updates, origin={"method": "the same, by another way"})
    for again in (policy, make_policy()):
        with bc.accelerate(again, same, engine="onnx", threads=1):
            assert torch.equal(act(again, observe), expected)
    assert kept_in(exports_stay_here) == [kept]


@pytest.mark.parametrize(
    "changes",
    [{"seed": 1}, {"n_action_steps": 3}, {"sampler": DDPM(num_inference_steps=6, clip_sample=False)}],
    ids=str,
)
def test_another_policy_has_another_export(policy, make_policy, schedule, observe, exports_stay_here, changes):
    with bc.accelerate(policy, schedule, engine="onnx", threads=1):
        act(policy, observe)
    other = make_policy(**changes)
    with bc.accelerate(other, schedule, engine="patched"):
        expected = act(other, observe)
    with bc.accelerate(other, schedule, engine="onnx", threads=1):
        torch.testing.assert_close(act(other, observe), expected, atol=1e-5, rtol=0)
    assert len(kept_in(exports_stay_here)) == 2


def test_numbers_that_no_fingerprint_holds_count_too(make_policy, observe, exports_stay_here):
    for eps in (1e-5, 0.1):
        policy = make_policy()
        for module in policy.modules():
            if isinstance(module, torch.nn.LayerNorm):
                module.eps = eps
        expected = act(policy, observe)
        with bc.accelerate(policy, engine="onnx", threads=1):
            torch.testing.assert_close(act(policy, observe), expected, atol=1e-5, rtol=0)
    assert len(kept_in(exports_stay_here)) == 2


def test_masks_and_code_count_too(policy, make_policy, schedule, monkeypatch):
    """A foreign policy may hold its mask outside its state, and an older state of our code may have written the file."""
    port, other = port_of(policy), make_policy()
    other.model.memory_mask.zero_()
    mine = build(port, schedule, "onnx")
    masked = replace(mine, program=build(port_of(other), schedule, "onnx").program)
    digests = {engine._digest(one, port.fingerprint) for one in (mine, masked, mine)}
    monkeypatch.setattr(f"{ENGINE}.source_hash", lambda family: "older")
    digests.add(engine._digest(mine, port.fingerprint))
    assert len(digests) == 3


def test_the_code_that_counts_is_ours_and_the_family_s(tmp_path):
    ours = exports.source_hash(str(tmp_path / "family.py"))
    exports.source_hash.cache_clear()
    assert exports.source_hash(str(tmp_path / "family.py")) == ours
    (tmp_path / "family.py").write_text("blocks = 3")
    exports.source_hash.cache_clear()
    assert exports.source_hash(str(tmp_path / "family.py")) != ours


def test_another_schedule_or_output_has_another_export(policy, schedule, exports_stay_here):
    for followed in (schedule, None):
        for output in ("chunk", "action"):
            bc.accelerate(policy, followed, engine="onnx", output=output, threads=1).disable()
    assert len(kept_in(exports_stay_here)) == 4


def test_exports_of_no_use_for_longest_are_deleted_when_the_cache_is_full(policy, exports_stay_here, monkeypatch):
    def use(*updates):
        """The cache's files, with one for a schedule of these updates among them."""
        schedule = bc.Schedule(6, dict.fromkeys(BLOCKS, updates))
        bc.accelerate(policy, schedule, engine="onnx", threads=1).disable()
        return {path.name for path in kept_in(exports_stay_here) if path.is_file()}

    first = use(0, 2)
    second = use(0, 3) - first
    (exports_stay_here / "mine.onnx").write_bytes(b"not to be touched")
    (exports_stay_here / ("0" * 32 + ".onnx")).mkdir()  # in the way of nothing
    for age, name in enumerate(("mine.onnx", *first, *second)):
        os.utime(exports_stay_here / name, (age, age))
    use(0, 2)  # made first, but of use since
    monkeypatch.setattr(
        f"{CACHE}.CACHE_BYTES", 1.2 * sum((exports_stay_here / name).stat().st_size for name in first | second)
    )
    kept = use(0, 4)
    assert {"mine.onnx"} | first < kept
    assert not second & kept
    assert len(kept) == 3
    monkeypatch.setattr(f"{CACHE}.CACHE_BYTES", 0)
    assert len(use(0, 5)) == 2  # the newest stays, however large


def flip(path, position):
    data = bytearray(path.read_bytes())
    data[position] ^= 1
    path.write_bytes(data)


def without_header(path):
    model = onnx.load(path)
    del model.metadata_props[:]
    path.write_bytes(hashed(model))


def with_loop(path):
    model = onnx.load(path)
    model.graph.node.append(onnx.helper.make_node("Loop", ["a"], ["b"]))
    path.write_bytes(hashed(model))


DAMAGE = {
    "cut short": lambda path: path.write_bytes(path.read_bytes()[:-5000]),
    "empty": lambda path: path.write_bytes(b""),
    "no header": without_header,
    "old version": lambda path: with_header(path, version=1),
    "broken header": lambda path: with_header(path, made_by=None),
    "garbled header": lambda path: with_header(path, executed=["1", 1e400]),
    "another policy, by its fingerprint": lambda path: with_header(
        path, fingerprint=header(onnx.load(path))["fingerprint"] | {"weights": "0" * 64}
    ),
    "another build": lambda path: with_header(path, build="0" * 32),
    "a weight": lambda path: flip(path, 30_000),
    "the hash": lambda path: flip(path, -1),
    "an operator": with_loop,
}


@pytest.mark.parametrize("damage", DAMAGE)
def test_a_damaged_file_in_the_cache_is_made_again(policy, schedule, observe, exports_stay_here, damage):
    with bc.accelerate(policy, schedule, engine="onnx", threads=1):
        expected = act(policy, observe)
    (kept,) = kept_in(exports_stay_here)
    whole = kept.read_bytes()
    DAMAGE[damage](kept)
    assert kept.read_bytes() != whole
    with bc.accelerate(policy, schedule, engine="onnx", threads=1):
        assert torch.equal(act(policy, observe), expected)
    assert kept_in(exports_stay_here) == [kept]
    assert kept.read_bytes() == whole


def test_another_policys_export_under_the_name_is_not_used(policy, make_policy, schedule, observe, exports_stay_here):
    other = make_policy(seed=1)
    for one in (policy, other):
        bc.accelerate(one, schedule, engine="onnx", threads=1).disable()
    mine, theirs = sorted(kept_in(exports_stay_here), key=lambda path: path.stat().st_mtime_ns)
    expected = act_with(policy, schedule, observe)
    whole = mine.read_bytes()
    mine.write_bytes(theirs.read_bytes())
    assert torch.equal(act_with(policy, schedule, observe), expected)
    assert mine.read_bytes() == whole


def act_with(policy, schedule, observe):
    with bc.accelerate(policy, schedule, engine="onnx", threads=1):
        return act(policy, observe)


def test_what_cannot_be_read_or_replaced_costs_the_cache_and_nothing_else(
    policy, schedule, observe, exports_stay_here, monkeypatch, caplog
):
    expected = act_with(policy, schedule, observe)
    (kept,) = kept_in(exports_stay_here)

    def unreadable(path, what):
        raise FileError(f"cannot read the {what} {path}: Permission denied")

    with monkeypatch.context() as patch:
        patch.setattr(f"{SESSION}.read_bytes", unreadable)
        assert torch.equal(act_with(policy, schedule, observe), expected)
    assert not caplog.records
    kept.unlink()
    kept.mkdir()
    (kept / "mine").write_text("not to be touched")
    for _ in range(2):
        assert torch.equal(act_with(policy, schedule, observe), expected)
        assert "cannot be kept for the next time" in caplog.text
    assert [path.name for path in kept.iterdir()] == ["mine"]


def test_a_cache_that_cannot_be_written_is_replaced_by_a_temporary_one(policy, observe, tmp_path, monkeypatch):
    (tmp_path / "file").write_text("not a directory")
    monkeypatch.setenv("BLOCKCACHE_CACHE", str(tmp_path / "file" / "cache"))
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))
    with bc.accelerate(policy, engine="onnx", threads=1):
        act(policy, observe)
    (directory,) = tmp_path.glob("blockcache-*")  # torch may make one of its own, too
    assert len([*directory.glob("*.onnx")]) == 1


def test_a_temporary_cache_of_another_user_is_not_used(monkeypatch, tmp_path):
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))
    assert exports._temporary_directory() == exports._temporary_directory() == tmp_path / f"blockcache-{os.getuid()}"
    monkeypatch.setattr(f"{CACHE}.os.getuid", lambda: 12345)  # the directory will be of the user that we really are
    found = exports._temporary_directory()
    assert found.parent == tmp_path
    assert found.name != "blockcache-12345"


@pytest.mark.parametrize("taken", ["a file", "a link to nowhere", "a link elsewhere", "unwritable"])
def test_a_temporary_cache_whose_name_is_taken_is_made_under_another_one(monkeypatch, tmp_path, taken):
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path / "tmp"))
    monkeypatch.setenv("BLOCKCACHE_CACHE", os.devnull)
    place = tmp_path / "tmp" / f"blockcache-{os.getuid()}"
    (tmp_path / "tmp").mkdir()
    if taken == "a file":
        place.write_text("something else")
    elif taken == "unwritable":
        place.mkdir(mode=0o500)
        monkeypatch.setattr(f"{CACHE}.os.access", lambda path, mode: path != place)  # the tests may run as root
    else:
        place.symlink_to(tmp_path / "nowhere" if "nowhere" in taken else tmp_path)
    found = cache_directory()
    assert found.parent == place.parent
    assert found != place
    assert found == cache_directory(), "one for the whole process"
    assert found.stat().st_mode & 0o777 == 0o700


def test_where_the_cache_is(monkeypatch, tmp_path):
    assert cache_directory() == tmp_path / "cache"
    monkeypatch.delenv("BLOCKCACHE_CACHE")
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "xdg"))
    assert cache_directory() == tmp_path / "xdg" / "blockcache"
    monkeypatch.delenv("XDG_CACHE_HOME")
    monkeypatch.setenv("HOME", str(tmp_path / "home"))
    assert cache_directory() == tmp_path / "home" / ".cache" / "blockcache"
    monkeypatch.setattr(os.path, "expanduser", lambda path: path)  # as it is where nobody knows a home
    assert cache_directory().parent == Path(tempfile.gettempdir())
    monkeypatch.setenv("BLOCKCACHE_CACHE", str(tmp_path / "cache"))
    assert cache_directory() == tmp_path / "cache", "a home is not needed then"


# -- libraries and threads


def only(package, found):
    """Pretend that a package has this version, or is not there, and others are new."""
    return lambda name: found if name == package else "99.0"


@pytest.mark.parametrize(
    ("package", "found", "sentence"),
    [
        ("onnxruntime", None, "needs onnxruntime, which is not installed; version 1.23 or newer comes with"),
        ("onnxruntime", "1.22.1", "needs a newer onnxruntime than the installed 1.22.1; version 1.23 or newer"),
        ("onnxruntime", "1.9.0", "than the installed 1.9.0"),
        ("onnx", None, "needs onnx, which is not installed; version 1.18 or newer comes with"),
        ("onnx", "1.17rc1", "than the installed 1.17rc1"),
    ],
)
def test_a_missing_or_old_library_is_named(policy, observe, tmp_path, monkeypatch, package, found, sentence):
    monkeypatch.setattr("blockcache.extras.installed_version", only(package, found))
    with pytest.raises(EngineError) as caught:
        bc.accelerate(policy, engine="onnx", threads=1)
    assert sentence in str(caught.value)
    assert str(caught.value).endswith(
        'comes with "blockcache", which docs/start.md says how to install from a clone or a wheel'
    )
    with pytest.raises(EngineError, match="the onnx engine needs"):
        bc.export_policy(policy, None, tmp_path / "policy.onnx")
    assert not (tmp_path / "policy.onnx").exists()
    with bc.accelerate(policy) as fast:
        assert fast.engine == "loop"
        act(policy, observe)


@pytest.mark.parametrize("found", ["1.23", "1.23.0rc1", "1.24.dev20250901", "2.0.0", "1.100"])
def test_new_enough_libraries(monkeypatch, found):
    asked = []
    monkeypatch.setattr("blockcache.extras.installed_version", lambda name: asked.append(name) or found)
    engine.require_onnxruntime(also_onnx=True)
    assert list(dict.fromkeys(asked)) == ["onnxruntime", "onnx"]


@pytest.mark.parametrize("package", ["onnxruntime", "onnx"])
@pytest.mark.parametrize("found", [None, types.ModuleType("leftover")], ids=["nothing", "an empty directory"])
def test_a_library_that_cannot_be_imported_counts_as_missing(monkeypatch, package, found):
    monkeypatch.setitem(sys.modules, package, found)
    with pytest.raises(EngineError, match=f"needs {package}, which is not installed"):
        engine.require_onnxruntime(also_onnx=True)


def test_onnx_is_not_needed_where_the_export_is_there_already(policy, schedule, observe, monkeypatch):
    with bc.accelerate(policy, schedule, engine="onnx", threads=1):
        expected = act(policy, observe)
    monkeypatch.setattr("blockcache.extras.installed_version", only("onnx", None))
    with bc.accelerate(policy, schedule, engine="onnx", threads=1):
        assert torch.equal(act(policy, observe), expected)


@pytest.mark.parametrize(
    ("house", "library", "minimum"), [("runtime", "onnxruntime", MINIMUM), ("library", "onnx", engine.ONNX_MINIMUM)]
)
def test_installing_brings_new_enough_libraries(house, library, minimum):
    tomllib = pytest.importorskip("tomllib")  # Python 3.11
    project = tomllib.loads((ROOT / house / "pyproject.toml").read_text())
    assert f"{library}>={'.'.join(map(str, minimum))}" in project["project"]["dependencies"]


@pytest.mark.parametrize(("seconds", "taken"), [({1: 1.0, 4: 2.0}, 1), ({1: 2.0, 4: 1.0}, 4)])
def test_the_faster_number_of_threads_is_taken(exported, monkeypatch, seconds, taken):
    monkeypatch.setattr(os, "sched_getaffinity", lambda pid: range(4), raising=False)
    clock = SimpleNamespace(now=0.0)

    def run(session, outputs, feed):
        clock.now += seconds[session.get_session_options().intra_op_num_threads] / 100
        return []

    monkeypatch.setattr(f"{SESSION}.run_session", run)
    monkeypatch.setattr(f"{SESSION}.time", SimpleNamespace(perf_counter=lambda: clock.now, sleep=lambda _: None))
    assert bc.open_export(exported).threads == taken


def trial(monkeypatch, seconds, rate_hz=10.0):
    """Two sessions that take so long when they are called so long after the last call, and the whole time of the trial."""
    clock = SimpleNamespace(now=0.0, last={"one": -9.0, "many": -9.0}, calls=0)

    def run(session, outputs, feed):
        clock.calls += 1
        taken = seconds[session.name](clock.now - clock.last[session.name])
        clock.now += taken
        clock.last[session.name] = clock.now
        return []

    def sleep(pause):
        clock.now += pause

    monkeypatch.setattr(session_module, "run_session", run)
    monkeypatch.setattr(session_module, "time", SimpleNamespace(perf_counter=lambda: clock.now, sleep=sleep))
    one, many = (SimpleNamespace(name=name, get_inputs=list) for name in ("one", "many"))
    return session_module.prefers_second(one, many, None, rate_hz), clock


def test_threads_are_tried_as_a_control_loop_calls_them(monkeypatch):
    """Back to back many win, after a pause they lose."""
    seconds = {"one": lambda pause: 0.0035, "many": lambda pause: 0.0031 if pause < 0.02 else 0.009}
    assert not trial(monkeypatch, seconds)[0]
    assert not trial(monkeypatch, seconds, rate_hz=30)[0]
    assert trial(monkeypatch, seconds, rate_hz=200)[0]


@pytest.mark.parametrize("seconds", [0.001, 0.3, 1.5, 9.0])
def test_the_trial_is_bounded(monkeypatch, seconds):
    preferred, clock = trial(monkeypatch, {"one": lambda _: seconds, "many": lambda _: seconds / 2}, rate_hz=1)
    assert preferred
    assert clock.now <= max(seconds, session_module.TRIAL_SECONDS + 4 * seconds)
    assert clock.calls <= 10


def test_the_trial_is_remembered(policy, monkeypatch, exports_stay_here):
    monkeypatch.setattr(os, "sched_getaffinity", lambda pid: range(2), raising=False)
    asked = []
    monkeypatch.setattr(f"{SESSION}.prefers_second", lambda *args: asked.append(args[-1]) or True)
    for rate_hz in (10.0, 10.0, 30.0, 30.0):
        with bc.accelerate(policy, engine="onnx", rate_hz=rate_hz):
            pass
    assert asked == [10.0, 30.0]
    for rate_hz in (0, -1, float("nan")):
        with pytest.raises(EngineError, match="rate_hz is calls a second, more than 0"):
            bc.accelerate(policy, engine="onnx", rate_hz=rate_hz)


@pytest.mark.parametrize("harm", [None, b"", b"3", b"1\n", b"\xff" * 9, b"9" * 10_000])
def test_an_export_remembers_its_trial_and_nothing_that_was_damaged(exported, exports_stay_here, monkeypatch, harm):
    monkeypatch.setattr(os, "sched_getaffinity", lambda pid: range(2), raising=False)
    asked = []
    monkeypatch.setattr(f"{SESSION}.prefers_second", lambda *args: asked.append(args[-1]) or True)
    assert open_export(exported).threads == 2
    (kept,) = exports_stay_here.glob("*.threads")
    if harm is not None:
        kept.write_bytes(harm)
    assert open_export(exported).threads == open_export(exported).threads == 2
    assert asked == [10.0] * (1 if harm is None else 2)
    assert open_export(exported, threads=1).threads == 1
    assert len(asked) <= 2


def test_a_trial_that_cannot_be_kept_is_no_error(exported, tmp_path, monkeypatch):
    (tmp_path / "file").write_bytes(b"")
    monkeypatch.setenv("BLOCKCACHE_CACHE", str(tmp_path / "file" / "within"))
    assert open_export(exported).threads in (1, len(os.sched_getaffinity(0)))


def test_threads_are_measured_or_given(policy, exported):
    assert bc.open_export(exported, threads=2).threads == 2
    assert bc.open_export(exported).threads in (1, len(os.sched_getaffinity(0)))
    for threads in (0, -1):
        with pytest.raises(EngineError, match=f"one thread at least, got {threads}"):
            bc.accelerate(policy, engine="onnx", threads=threads)


DAEMONS = """
import sys, threading, time
import numpy as np
from blockcache_runtime import open_export
policy = open_export(sys.argv[1], threads=1)
obs = np.zeros((1, *policy.sizes["obs"][1:]), dtype=np.float32)
def work():
    while True:
        policy.predict_action(obs)
for _ in range(4):
    threading.Thread(target=work, daemon=True).start()
time.sleep(0.2)
"""


def test_daemon_threads_in_the_midst_of_a_run_do_not_abort_the_process(exported):
    for _ in range(3):
        ran = subprocess.run(
            [sys.executable, "-c", DAEMONS, str(exported)], timeout=60, capture_output=True, check=False
        )
        assert (ran.returncode, ran.stderr) == (0, b"")


# -- what the cached export is of, and what answers


def test_numbers_in_no_fingerprint_count_too(policy, schedule):
    """A normaliser that somebody overrode, say: every number that goes into the file is in its name."""
    mine, fingerprint = build(port_of(policy), schedule, "onnx"), port_of(policy).fingerprint
    names = {engine._digest(mine, fingerprint)}
    for name, weight in mine.program.weights.items():
        other = weight.clone()
        other.view(-1)[-1] += 1
        changed = replace(mine, program=replace(mine.program, weights={**mine.program.weights, name: other}))
        names.add(engine._digest(changed, fingerprint))
    for name, table in mine.program.tables.items():
        tables = {**mine.program.tables, name: replace(table, values=table.values + 1)}
        names.add(engine._digest(replace(mine, program=replace(mine.program, tables=tables)), fingerprint))
    assert len(names) == 1 + len(mine.program.weights) + len(mine.program.tables)
    assert engine._digest(build(port_of(policy), schedule, "onnx"), fingerprint) in names


def test_verify_runs_the_engine_that_answers(policy, schedule, monkeypatch):
    """The torch program is right, and the session that stands in the policy's place is not."""
    with bc.accelerate(policy, schedule, engine="onnx", threads=1) as fast:
        fast.verify()
        right = engine.OnnxRunner.__call__

        def wrong(self, obs, noise):
            return {name: value + 4.4 for name, value in right(self, obs, noise).items()}

        monkeypatch.setattr(engine.OnnxRunner, "__call__", wrong)
        with pytest.raises(StaleError, match="no longer acts as this engine, its actions differ from the engine's"):
            fast.verify()
