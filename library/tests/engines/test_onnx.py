"""The onnx engine's file: what is in it, what it carries, opening it, and files that are refused."""

import numpy as np
import onnx
import onnxruntime
import pytest
import torch
from onnx import TensorProto, helper

import blockcache as bc
from blockcache.engines.onnx_backend import UNROLLED_STEPS
from blockcache.errors import EngineError, FileError, ObservationError, ScheduleError
from blockcache.models.dpt.policy import Shape
from blockcache.models.registry import port_of
from blockcache.samplers import DDIM, SAMPLERS
from blockcache.solvers.presets import stretched_schedule
from onnx_files import BLOCKS, header, nodes, with_header

pytestmark = pytest.mark.usefixtures("exports_stay_here")


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
    assert (
        sizes
        == {"obs": ["batch", 2, 5], "noise": [draws, "batch", 6, 3], "action": ["batch", 4, 3], "norms": [1]} | chunk
    )


@pytest.mark.parametrize("more", [0, 1])
def test_few_steps_of_full_precision_are_unrolled(make_policy, tmp_path, more):
    path = tmp_path / "few.onnx"
    bc.export_policy(make_policy(sampler=SAMPLERS["ddpm"](num_inference_steps=UNROLLED_STEPS + more)), None, path)
    kinds = [node.op_type for node in onnx.load(path).graph.node]
    assert kinds.count("Scan") == more


def test_metadata_says_what_the_file_was_made_for(policy, schedule, exported, tmp_path):
    said = header(onnx.load(exported))
    assert (said["format"], said["version"]) == ("blockcache.onnx", 3)
    assert said["made_by"] == f"blockcache {bc.__version__}"
    assert said["schedule"] == {name: list(steps) for name, steps in schedule.updates.items()}
    assert said["origin"] == {"method": "random"}
    assert (said["output"], said["executed"]) == ("chunk", [1, 5])
    assert said["inputs"] == {"obs": ["batch", 2, 5], "noise": [6, "batch", 6, 3]}
    assert said["outputs"] == {"action": ["batch", 4, 3], "action_pred": ["batch", 6, 3], "norms": [1]}
    assert said["fingerprint"]["sampler"] == policy.sampler.to_dict()
    assert len(said["fingerprint"]["weights"]) == 64
    bc.export_policy(policy, None, tmp_path / "full.onnx", "action")
    said = header(onnx.load(tmp_path / "full.onnx"))
    assert (said["output"], said["schedule"]) == ("action", {name: list(range(6)) for name in BLOCKS})


@pytest.mark.parametrize("full", [False, True], ids=["schedule", "full"])
def test_weights_are_stored_once(tmp_path, full):
    shape = Shape(layers=2)
    policy, path = shape.policy(), tmp_path / "policy.onnx"
    stretched = stretched_schedule("square_ph", port_of(policy).adapter.blocks, shape.steps)
    bc.export_policy(policy, None if full else stretched, path)
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
        noise = policy.draw_noise(batch, torch.Generator().manual_seed(batch))
        with bc.accelerate(policy, followed, engine="patched"):
            expected = policy.predict_action(observe(batch), noise=noise)
        found = session.run(["action", "action_pred"], {"obs": observe(batch).numpy(), "noise": noise.numpy()})
        np.testing.assert_allclose(found[0], expected["action"], atol=1e-5)
        np.testing.assert_allclose(found[1], expected["action_pred"], atol=1e-5)


def test_a_double_precision_policy_can_be_exported(make_policy, observe, tmp_path):
    policy = make_policy().double()
    bc.export_policy(policy, None, tmp_path / "policy.onnx")
    noise = policy.draw_noise(2, torch.Generator().manual_seed(2))
    found = bc.open_export(tmp_path / "policy.onnx", threads=1).predict_action(observe(2), noise=noise.float())[
        "action"
    ]
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
    found = runner.predict_action(observe(2), noise=noise)
    assert all(torch.equal(found[name], expected[name]) for name in ("action", "action_pred"))
    assert bc.open_export(exported, threads=1).fingerprint == runner.fingerprint


def test_a_runner_refuses_what_the_policy_would(policy, observe, exported):
    runner, noise = bc.open_export(exported, threads=1), policy.draw_noise(1)
    expected = runner.predict_action(observe(), noise=noise)["action"]
    doubled = runner.predict_action({"obs": observe().double().numpy()}, noise=noise.double())
    assert torch.equal(doubled["action"], expected)
    for wrong in (torch.zeros(1, 3, 5), torch.zeros(1, 2, 4), torch.full((1, 2, 5), torch.nan)):
        with pytest.raises(ObservationError, match="the observation"):
            runner.predict_action(wrong, noise=noise)
    for wrong in (noise[:-1], policy.draw_noise(2)):
        with pytest.raises(ObservationError, match=r"noise has shape .*, expected \(6, 1, 6, 3\)"):
            runner.predict_action(observe(), noise=wrong)


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
    for content, sentence in ((b"", "is empty"), (b"nothing like a model", r"is garbled \(.*\); export it again")):
        exported.write_bytes(content)
        with pytest.raises(FileError, match=f"the ONNX file .* {sentence}"):
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
        ({"version": 1}, "has format version 1, this blockcache reads version 3; .*make the file again"),
        ({"version": True}, "has format version True"),
        ({"format": "other"}, "is not an ONNX file: its format is 'other', expected 'blockcache.onnx'"),
        ({"colour": "red"}, "missing or unknown keys: colour"),
        ({"schedule": []}, "needs an object under 'schedule'"),
        ({"fingerprint": {}}, "the ONNX file .* is garbled .*under 'fingerprint': .*export it again"),
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

    monkeypatch.setattr("os.fsync", full)
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
        bc.export_policy(make_policy(p_drop_attn=0.1).train(), None, path)
    assert not path.exists()


def test_an_export_follows_a_schedule_and_not_a_path(policy, tmp_path):
    with pytest.raises(ScheduleError, match=r"an export needs a Schedule or None, got str; .*Schedule.load"):
        bc.export_policy(policy, "schedule.json", tmp_path / "policy.onnx")
    with pytest.raises(EngineError, match="unknown check 'typo'"):
        bc.export_policy(policy, None, tmp_path / "policy.onnx", check="typo")
