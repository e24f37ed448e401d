"""The onnx engine by itself: the file, what it carries, the cache it is kept in, and files that are refused."""

import json
import os
import sys
import tempfile
import types
from dataclasses import replace
from pathlib import Path

import numpy as np
import onnx
import onnxruntime
import pytest
import torch
from blockcache.engines.compiled import compile_policy
from onnx import TensorProto, helper

import blockcache as bc
from blockcache.deploy.session import MINIMUM, require_onnxruntime
from blockcache.engines import onnx as engine
from blockcache.engines.onnx import cache_directory
from blockcache.errors import EngineError, FileError, ObservationError, ScheduleError
from blockcache.models.registry import port_of
from blockcache.samplers import DDIM, DDPM, SAMPLERS
from blockcache.studies.bench import Shape, preset_for

BLOCKS = tuple(f"layers.{index}.{kind}" for index in (0, 1) for kind in ("SA", "CA", "FFN"))
MODULE, SESSION = "blockcache.engines.onnx", "blockcache.deploy.session"


@pytest.fixture(autouse=True)
def cache(monkeypatch, tmp_path):
    """Where exports are kept during a test; nothing is written to the home directory."""
    directory = tmp_path / "cache"
    monkeypatch.setenv("BLOCKCACHE_CACHE", str(directory))
    return directory


@pytest.fixture
def schedule(random_updates):
    return bc.Schedule(6, random_updates(BLOCKS, 6), origin={"method": "random"})


@pytest.fixture
def exported(policy, schedule, tmp_path):
    path = tmp_path / "policy.onnx"
    bc.export_policy(policy, schedule, path)
    return path


def nodes(graph):
    for node in graph.node:
        yield node
        for attribute in node.attribute:
            if attribute.HasField("g"):
                yield from nodes(attribute.g)


def header(model):
    return json.loads({item.key: item.value for item in model.metadata_props}["blockcache"])


def with_header(path, **changes):
    """The same file with another header."""
    model = onnx.load(path)
    (item,) = model.metadata_props
    item.value = json.dumps({**header(model), **changes})
    onnx.save(model, path)


# -- the file


@pytest.mark.parametrize("full", [False, True], ids=["schedule", "full"])
@pytest.mark.parametrize("output", ["chunk", "action"])
@pytest.mark.parametrize("sampler", ["ddpm", "ddim", "dpmsolver++"])
def test_standard_operators_only(make_policy, schedule, tmp_path, full, output, sampler):
    policy, path = make_policy(sampler=SAMPLERS[sampler](num_inference_steps=6)), tmp_path / "policy.onnx"
    bc.export_policy(policy, None if full else schedule, path, output)
    model = onnx.load(path)
    onnx.checker.check_model(model, full_check=True)
    assert [(item.domain, item.version) for item in model.opset_import] == [("", 23)]
    assert {node.domain for node in nodes(model.graph)} == {""}
    kinds = [node.op_type for node in model.graph.node]
    assert kinds.count("Scan") == int(full), "full precision repeats one step, a schedule is unrolled"
    assert "Loop" not in kinds
    assert "If" not in kinds
    draws = {"ddpm": 6, "ddim": 1, "dpmsolver++": 1}[sampler]
    sizes = {
        item.name: [dim.dim_param or dim.dim_value for dim in item.type.tensor_type.shape.dim]
        for item in (*model.graph.input, *model.graph.output)
    }
    chunk = {"action_pred": ["batch", 6, 3]} if output == "chunk" else {}
    assert sizes == {"obs": ["batch", 2, 5], "noise": [draws, "batch", 6, 3], "action": ["batch", 4, 3]} | chunk


def test_metadata_says_what_the_file_was_made_for(policy, schedule, exported, tmp_path):
    said = header(onnx.load(exported))
    assert (said["format"], said["version"]) == ("blockcache.onnx", 1)
    assert said["made_by"] == f"blockcache {bc.__version__}"
    assert said["schedule"] == {name: list(steps) for name, steps in schedule.updates.items()}
    assert said["origin"] == {"method": "random"}
    assert (said["output"], said["executed"]) == ("chunk", [1, 5])
    assert said["fingerprint"]["sampler"] == policy.sampler.to_dict()
    assert len(said["fingerprint"]["weights"]) == 64
    bc.export_policy(policy, None, tmp_path / "full.onnx", "action")
    said = header(onnx.load(tmp_path / "full.onnx"))
    assert (said["output"], said["schedule"]) == ("action", {name: list(range(6)) for name in BLOCKS})


@pytest.mark.parametrize("full", [False, True], ids=["schedule", "full"])
def test_weights_are_stored_once(tmp_path, full):
    shape = Shape(layers=2)
    policy, path = shape.policy(), tmp_path / "policy.onnx"
    bc.export_policy(policy, None if full else preset_for(shape), path)
    weights = sum(parameter.numel() * parameter.element_size() for parameter in policy.parameters())
    assert weights > 5e6
    assert path.stat().st_size < 1.2 * weights + 4e6
    model = onnx.load(path)
    contents = [bytes(item.raw_data) for item in model.graph.initializer if len(item.raw_data) > 50_000]
    assert len(contents) == len(set(contents))


@pytest.mark.parametrize("full", [False, True], ids=["schedule", "full"])
def test_nothing_but_onnxruntime_is_needed_to_run_it(policy, schedule, observe, tmp_path, full):
    path = tmp_path / "policy.onnx"
    followed = None if full else schedule
    bc.export_policy(policy, followed, path)
    session = onnxruntime.InferenceSession(path, providers=["CPUExecutionProvider"])
    for batch in (1, 3, 1):
        noise = policy.draw_noise(batch)
        with bc.accelerate(policy, followed, engine="patched"):
            expected = policy.predict_action(observe(batch), noise=noise)
        found = session.run(["action", "action_pred"], {"obs": observe(batch).numpy(), "noise": noise.numpy()})
        np.testing.assert_allclose(found[0], expected["action"], atol=1e-5)
        np.testing.assert_allclose(found[1], expected["action_pred"], atol=1e-5)


def test_a_double_precision_policy_can_be_exported(make_policy, observe, tmp_path):
    policy = make_policy().double()
    bc.export_policy(policy, None, tmp_path / "policy.onnx")
    noise = policy.draw_noise(2)
    found = bc.open_export(tmp_path / "policy.onnx", threads=1)(observe(2), noise.float())["action"]
    torch.testing.assert_close(
        found.double(), policy.predict_action(observe(2), noise=noise)["action"], atol=1e-5, rtol=0
    )


# -- opening it


def test_round_trip(policy, schedule, observe, exported):
    runner = bc.open_export(exported, policy, threads=1)
    assert runner.header["schedule"]["layers.0.SA"] == list(schedule.updates["layers.0.SA"])
    noise = policy.draw_noise(2)
    with bc.accelerate(policy, schedule, engine="onnx", threads=1) as fast:
        expected = fast.predict_action(observe(2), noise=noise)
    found = runner(observe(2), noise)
    assert all(torch.equal(found[name], expected[name]) for name in ("action", "action_pred"))
    assert bc.open_export(exported, threads=1).fingerprint == runner.fingerprint


def test_a_runner_refuses_what_the_policy_would(policy, observe, exported):
    runner, noise = bc.open_export(exported, threads=1), policy.draw_noise(1)
    expected = runner(observe(), noise)["action"]
    assert torch.equal(runner({"obs": observe().double().numpy()}, noise.double())["action"], expected)
    for wrong in (torch.zeros(1, 3, 5), torch.zeros(1, 2, 4), torch.full((1, 2, 5), torch.nan)):
        with pytest.raises(ObservationError, match="the observation"):
            runner(wrong, noise)
    for wrong in (noise[:-1], policy.draw_noise(2)):
        with pytest.raises(ObservationError, match=r"noise has shape .*, expected \(6, 1, 6, 3\)"):
            runner(observe(), wrong)


@pytest.mark.parametrize(
    ("changes", "named"),
    [
        ({"seed": 1}, "weights .{8} instead of .{8}"),
        ({"n_layer": 1}, "3 blocks instead of 6"),
        ({"n_action_steps": 3}, "executed actions 1 to 3 instead of 1 to 4"),
        ({"sampler": DDIM(num_inference_steps=6)}, 'type "ddim" instead of "ddpm"'),
    ],
    ids=str,
)
def test_a_file_for_another_policy_is_refused(make_policy, exported, changes, named):
    with pytest.raises(EngineError, match=f"was made for another policy, this one has .*{named}.*; export it again"):
        bc.open_export(exported, make_policy(**changes), threads=1)


def test_a_file_that_was_cut_short_is_refused(exported):
    data = exported.read_bytes()
    for length in (1, 100, len(data) // 2, len(data) - 10, len(data) - 1):
        exported.write_bytes(data[:length])
        with pytest.raises(FileError) as caught:
            bc.open_export(exported, threads=1)
        assert str(exported) in str(caught.value)
        assert "\n" not in str(caught.value)


def test_files_that_are_no_files_are_refused(exported, tmp_path):
    with pytest.raises(FileError, match=r"no ONNX file at .*: the file does not exist"):
        bc.open_export(tmp_path / "nowhere.onnx")
    with pytest.raises(FileError, match="cannot read the ONNX file"):
        bc.open_export(tmp_path)
    for content in (b"", b"nothing like a model"):
        exported.write_bytes(content)
        with pytest.raises(FileError, match=r"cannot load the ONNX file .*; it may be cut short, export it again"):
            bc.open_export(exported)


def test_a_model_of_someone_else_is_refused(tmp_path):
    value = helper.make_tensor_value_info("x", TensorProto.FLOAT, [1])
    graph = helper.make_graph([helper.make_node("Identity", ["x"], ["y"])], "other", [value], [])
    graph.output.append(helper.make_tensor_value_info("y", TensorProto.FLOAT, [1]))
    onnx.save(helper.make_model(graph, opset_imports=[helper.make_opsetid("", 23)], ir_version=11), tmp_path / "x.onnx")
    with pytest.raises(FileError, match="is not an export of blockcache"):
        bc.open_export(tmp_path / "x.onnx")


@pytest.mark.parametrize(
    ("changes", "sentence"),
    [
        ({"version": 2}, "has format version 2, this blockcache reads version 1"),
        ({"version": True}, "has format version True"),
        ({"format": "other"}, "is not an ONNX file: its format is 'other', expected 'blockcache.onnx'"),
        ({"colour": "red"}, "missing or unknown keys: colour"),
        ({"schedule": []}, "needs an object under 'schedule'"),
        ({"fingerprint": {}}, "the ONNX file .* is garbled .a fingerprint has the keys .*export it again"),
    ],
)
def test_a_file_with_another_header_is_refused(exported, changes, sentence):
    with_header(exported, **changes)
    with pytest.raises(FileError, match=sentence):
        bc.open_export(exported, threads=1)


# -- exporting


def test_an_unwritable_place_is_refused_and_nothing_is_left(policy, schedule, exported):
    with pytest.raises(FileError, match=r"cannot write .*; nothing was changed"):
        bc.export_policy(policy, schedule, exported / "policy.onnx")  # a file as a directory
    assert [path.name for path in exported.parent.iterdir()] == [exported.name]


def test_a_full_disk_costs_nothing(policy, exported, monkeypatch):
    before = exported.read_bytes()

    def full(*args):
        raise OSError(28, "No space left on device")

    monkeypatch.setattr("blockcache.files.os.fsync", full)
    with pytest.raises(FileError, match="No space left on device; nothing was changed"):
        bc.export_policy(policy, None, exported)
    assert exported.read_bytes() == before
    assert [path.name for path in exported.parent.iterdir()] == [exported.name]


def test_what_cannot_run_cannot_be_exported(make_policy, policy, schedule, tmp_path):
    path = tmp_path / "policy.onnx"
    with pytest.raises(EngineError, match="the onnx engine does not support a transformer condition encoder"):
        bc.export_policy(make_policy(n_cond_layers=1), None, path)
    with pytest.raises(EngineError, match="needs causal attention"):
        bc.export_policy(make_policy(causal_attn=False), None, path, "action")
    with pytest.raises(EngineError, match="unknown output 'all'"):
        bc.export_policy(policy, schedule, path, "all")
    with pytest.raises(bc.BlockcacheError, match="does not fit"):
        bc.export_policy(make_policy(n_layer=1), schedule, path)
    with pytest.raises(bc.BlockcacheError, match="train mode"):
        bc.export_policy(make_policy().train(), None, path)
    assert not path.exists()


# -- the cache


def act(policy, observe):
    return policy.predict_action(observe(), generator=torch.Generator().manual_seed(0))["action"]


def forbid(*args):
    raise AssertionError("this should have come from the cache")


def test_an_export_is_made_once(policy, make_policy, schedule, observe, cache, monkeypatch):
    with bc.accelerate(policy, schedule, engine="onnx", threads=1):
        expected = act(policy, observe)
    (kept,) = cache.iterdir()
    monkeypatch.setattr(f"{MODULE}.export", forbid)
    same = bc.Schedule(6, schedule.updates, origin={"method": "the same, by another way"})
    for again in (policy, make_policy()):
        with bc.accelerate(again, same, engine="onnx", threads=1):
            assert torch.equal(act(again, observe), expected)
    assert [*cache.iterdir()] == [kept]


@pytest.mark.parametrize(
    "changes",
    [{"seed": 1}, {"n_action_steps": 3}, {"sampler": DDPM(num_inference_steps=6, clip_sample=False)}],
    ids=str,
)
def test_another_policy_has_another_export(policy, make_policy, schedule, observe, cache, changes):
    with bc.accelerate(policy, schedule, engine="onnx", threads=1):
        act(policy, observe)
    other = make_policy(**changes)
    with bc.accelerate(other, schedule, engine="patched"):
        expected = act(other, observe)
    with bc.accelerate(other, schedule, engine="onnx", threads=1):
        torch.testing.assert_close(act(other, observe), expected, atol=1e-5, rtol=0)
    assert len([*cache.iterdir()]) == 2


def test_numbers_that_no_fingerprint_holds_count_too(make_policy, observe, cache):
    for eps in (1e-5, 0.1):
        policy = make_policy()
        for module in policy.modules():
            if isinstance(module, torch.nn.LayerNorm):
                module.eps = eps
        expected = act(policy, observe)
        with bc.accelerate(policy, engine="onnx", threads=1):
            torch.testing.assert_close(act(policy, observe), expected, atol=1e-5, rtol=0)
    assert len([*cache.iterdir()]) == 2


def test_masks_and_code_count_too(policy, schedule, monkeypatch):
    """A foreign policy may hold its mask outside its state, and an older state of our code may have written the file."""
    compiled = compile_policy(port_of(policy), "onnx")
    other = replace(compiled, memory_mask=torch.zeros(compiled.tokens, compiled.cond_tokens))
    digests = {engine._digest(one, schedule, port_of(policy).fingerprint) for one in (compiled, other)}
    monkeypatch.setattr(f"{MODULE}._source_hash", lambda: "older")
    digests.add(engine._digest(compiled, schedule, port_of(policy).fingerprint))
    assert len(digests) == 3


def test_another_schedule_or_output_has_another_export(policy, schedule, cache):
    for followed in (schedule, None):
        for output in ("chunk", "action"):
            bc.accelerate(policy, followed, engine="onnx", output=output, threads=1).disable()
    assert len([*cache.iterdir()]) == 4


def test_exports_of_no_use_for_longest_are_deleted_when_the_cache_is_full(policy, cache, monkeypatch):
    def use(*updates):
        """The cache's files, with one for a schedule of these updates among them."""
        schedule = bc.Schedule(6, dict.fromkeys(BLOCKS, updates))
        bc.accelerate(policy, schedule, engine="onnx", threads=1).disable()
        return {path.name for path in cache.iterdir()}

    first = use(0, 2)
    second = use(0, 3) - first
    (cache / "mine.onnx").write_bytes(b"not to be touched")
    for age, name in enumerate(("mine.onnx", *first, *second)):
        os.utime(cache / name, (age, age))
    use(0, 2)  # made first, but of use since
    monkeypatch.setattr(f"{MODULE}.CACHE_BYTES", 1.2 * sum((cache / name).stat().st_size for name in first | second))
    kept = use(0, 4)
    assert {"mine.onnx"} | first < kept
    assert not second & kept
    assert len(kept) == 3
    monkeypatch.setattr(f"{MODULE}.CACHE_BYTES", 0)
    assert len(use(0, 5)) == 2  # the newest stays, however large


@pytest.mark.parametrize("damage", ["cut short", "empty", "no header", "old version"])
def test_a_damaged_file_in_the_cache_is_made_again(policy, schedule, observe, cache, damage):
    with bc.accelerate(policy, schedule, engine="onnx", threads=1):
        expected = act(policy, observe)
    (kept,) = cache.iterdir()
    whole = kept.read_bytes()
    if damage == "no header":
        model = onnx.load(kept)
        del model.metadata_props[:]
        onnx.save(model, kept)
    elif damage == "old version":
        with_header(kept, version=0)
    else:
        kept.write_bytes(whole[: len(whole) // 2] if damage == "cut short" else b"")
    with bc.accelerate(policy, schedule, engine="onnx", threads=1):
        assert torch.equal(act(policy, observe), expected)
    assert [*cache.iterdir()] == [kept]
    assert kept.read_bytes() == whole


def test_a_cache_that_cannot_be_written_is_replaced_by_a_temporary_one(policy, observe, tmp_path, monkeypatch):
    (tmp_path / "file").write_text("not a directory")
    monkeypatch.setenv("BLOCKCACHE_CACHE", str(tmp_path / "file" / "cache"))
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))
    with bc.accelerate(policy, engine="onnx", threads=1):
        act(policy, observe)
    (directory,) = [path for path in tmp_path.iterdir() if path.is_dir()]
    assert directory.name.startswith("blockcache-")
    assert len([*directory.glob("*.onnx")]) == 1


def test_a_temporary_cache_of_another_user_is_not_used(monkeypatch, tmp_path):
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))
    assert engine._temporary_directory() == engine._temporary_directory() == tmp_path / f"blockcache-{os.getuid()}"
    monkeypatch.setattr(f"{MODULE}.os.getuid", lambda: 12345)  # the directory will be of the user that we really are
    found = engine._temporary_directory()
    assert found.parent == tmp_path
    assert found.name != "blockcache-12345"


def test_an_export_follows_a_schedule_and_not_a_path(policy, tmp_path):
    with pytest.raises(ScheduleError, match=r"an export needs a Schedule or None, got str; .*Schedule.load"):
        bc.export_policy(policy, "schedule.json", tmp_path / "policy.onnx")
    with pytest.raises(EngineError, match="unknown check 'typo'"):
        bc.export_policy(policy, None, tmp_path / "policy.onnx", check="typo")


def test_where_the_cache_is(monkeypatch, tmp_path):
    assert cache_directory() == tmp_path / "cache"
    monkeypatch.delenv("BLOCKCACHE_CACHE")
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "xdg"))
    assert cache_directory() == tmp_path / "xdg" / "blockcache"
    monkeypatch.delenv("XDG_CACHE_HOME")
    monkeypatch.setattr(Path, "home", lambda: tmp_path / "home")
    assert cache_directory() == tmp_path / "home" / ".cache" / "blockcache"

    def homeless():
        raise RuntimeError("Could not determine home directory.")

    monkeypatch.setattr(Path, "home", homeless)
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
    assert 'pip install "blockcache[onnx]"' in str(caught.value)
    with pytest.raises(EngineError, match="the onnx engine needs"):
        bc.export_policy(policy, None, tmp_path / "policy.onnx")
    assert not (tmp_path / "policy.onnx").exists()
    with bc.accelerate(policy) as fast:
        assert fast.engine == "loop"
        act(policy, observe)


@pytest.mark.parametrize("found", ["1.23", "1.23.0rc1", "1.24.dev20250901", "2.0.0", "1.100"])
def test_new_enough_libraries(monkeypatch, found):
    monkeypatch.setattr("blockcache.extras.installed_version", lambda name: found)
    require_onnxruntime(also_onnx=True)


@pytest.mark.parametrize("package", ["onnxruntime", "onnx"])
@pytest.mark.parametrize("found", [None, types.ModuleType("leftover")], ids=["nothing", "an empty directory"])
def test_a_library_that_cannot_be_imported_counts_as_missing(monkeypatch, package, found):
    monkeypatch.setitem(sys.modules, package, found)
    with pytest.raises(EngineError, match=f"needs {package}, which is not installed"):
        require_onnxruntime(also_onnx=True)


def test_onnx_is_not_needed_where_the_export_is_there_already(policy, schedule, observe, monkeypatch):
    with bc.accelerate(policy, schedule, engine="onnx", threads=1):
        expected = act(policy, observe)
    monkeypatch.setattr("blockcache.extras.installed_version", only("onnx", None))
    with bc.accelerate(policy, schedule, engine="onnx", threads=1):
        assert torch.equal(act(policy, observe), expected)


def test_the_extra_brings_new_enough_libraries():
    tomllib = pytest.importorskip("tomllib")  # Python 3.11
    project = tomllib.loads((Path(__file__).parents[1] / "pyproject.toml").read_text())
    wanted = {f"{name}>={'.'.join(map(str, version))}" for name, version in MINIMUM.items()}
    assert set(project["project"]["optional-dependencies"]["onnx"]) == wanted


@pytest.mark.parametrize(("seconds", "taken"), [({1: 1.0, 4: 2.0}, 1), ({1: 2.0, 4: 1.0}, 4)])
def test_the_faster_number_of_threads_is_taken(exported, monkeypatch, seconds, taken):
    monkeypatch.setattr(os, "sched_getaffinity", lambda pid: range(4), raising=False)
    asked = lambda session: seconds[session.get_session_options().intra_op_num_threads]  # noqa: E731
    monkeypatch.setattr(f"{SESSION}.seconds_per_run", asked)
    assert bc.open_export(exported).threads == taken


def test_threads_are_measured_or_given(policy, exported):
    assert bc.open_export(exported, threads=2).threads == 2
    assert bc.open_export(exported).threads in (1, len(os.sched_getaffinity(0)))
    for threads in (0, -1):
        with pytest.raises(EngineError, match=f"one thread at least, got {threads}"):
            bc.accelerate(policy, engine="onnx", threads=threads)
