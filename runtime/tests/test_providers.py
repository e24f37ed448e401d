"""Execution providers: what is not there is refused by name, what runs is counted, and its answers are compared first."""

import json

import numpy as np
import pytest

import blockcache as bc
from blockcache.compare.parity import save_reference
from blockcache_runtime import open_export
from blockcache_runtime.__main__ import main
from blockcache_runtime.errors import EngineError, FileError
from blockcache_runtime.parity import Reference, reference_path
from blockcache_runtime.providers import CPU, nodes_of
from image_policies import image_policy

IDLE = "AzureExecutionProvider"  # in every build of ONNX Runtime for this machine; runs none of our operators


def test_the_cpu_is_a_provider_like_any_other(export, observe):
    plain, asked = open_export(export, threads=1), open_export(export, threads=1, providers=[CPU])
    assert (plain.nodes, plain.parity) == ({}, None)
    assert list(asked.nodes) == [CPU]
    assert asked.nodes[CPU] > 50
    assert (asked.parity.largest, asked.parity.count) == (0, 4)  # beside itself, at drawn inputs
    assert asked.parity.nodes == asked.nodes
    assert str(asked.parity).startswith("agrees with the CPU's answers: 4 observations")
    obs, noise = observe().numpy(), plain.draw_noise(1)
    first, second = (one.predict_action(obs, noise=noise)["action"] for one in (plain, asked))
    assert np.array_equal(first, second)


def test_settings_of_a_provider_are_handed_on(export):
    assert open_export(export, threads=1, providers=[(CPU, {"use_arena": "1"})]).nodes[CPU] > 50


def test_a_reference_beside_the_file_is_what_is_compared_with(export, policy):
    place = save_reference(export, policy, count=6)
    assert place == reference_path(export)
    found = open_export(export, threads=1, providers=[CPU]).parity
    assert found.count == 4
    assert 0 < found.largest < 1e-5  # two engines
    with pytest.raises(EngineError, match=r"does NOT agree with the reference: 4 .* accept more with a larger tol"):
        open_export(export, threads=1, providers=[CPU], tolerance=0)
    known = Reference.load(place)
    known.__class__(known.export, known.inputs, known.noise, known.action + 1, known.scale).save(place)
    with pytest.raises(EngineError, match="does NOT agree with the reference"):
        open_export(export, threads=1, providers=[CPU])
    open_export(export, threads=1)  # nobody asked for a provider
    place.write_bytes(place.read_bytes()[:300])
    with pytest.raises(FileError, match="cannot read the reference"):
        open_export(export, threads=1, providers=[CPU])


def test_the_reference_of_another_export_is_found_out(export, policy):
    place = save_reference(export, policy, count=2)
    names = [f"layers.{index}.{kind}" for index in (0, 1) for kind in ("SA", "CA", "FFN")]
    bc.export_policy(policy, bc.Schedule(6, dict.fromkeys(names, (0, 3))), export)
    with pytest.raises(EngineError, match="the reference was made for another export"):
        open_export(export, threads=1, providers=[CPU])
    place.unlink()
    open_export(export, threads=1, providers=[CPU])


def test_answers_that_differ_from_the_cpu_s_are_refused(export, monkeypatch):
    from blockcache_runtime import export as module

    asked, plain = [], module.run_session

    def wrong(session, outputs, feed):
        found = plain(session, outputs, feed)
        asked.append(session)
        if len(asked) > 1:  # the first call is the CPU's, for all inputs at once
            found[0] = found[0] * 1.01
        return found

    monkeypatch.setattr(module, "run_session", wrong)
    with pytest.raises(EngineError, match=r"actions differ by .*e-02 at most"):
        open_export(export, threads=1, providers=[CPU])


@pytest.mark.parametrize(
    ("providers", "said"),
    [
        (["MadeUpExecutionProvider"], "no provider 'MadeUpExecutionProvider', it has .*CPUExecutionProvider; install"),
        ([("Other", {}), CPU], "no provider 'Other'"),
        ([IDLE], f"{IDLE} runs none of the [0-9]+ nodes"),
    ],
)
def test_a_provider_that_is_not_there_or_runs_nothing_is_refused(export, providers, said):
    with pytest.raises(EngineError, match=said):
        open_export(export, threads=1, providers=providers)


def test_where_several_share_the_work_each_is_counted(export):
    found = open_export(export, threads=1, providers=[IDLE, CPU])
    assert list(found.nodes) == [IDLE, CPU]
    assert found.nodes[IDLE] == 0 < found.nodes[CPU]
    assert f"{IDLE} runs 0 of {found.nodes[CPU]} nodes; {CPU} runs" in str(found.parity)


class Session:
    """One whose provider did not start, as without a graphics card's libraries; or an old one."""

    def get_providers(self):
        return [CPU]


@pytest.mark.parametrize(
    ("asked", "said"), [(["Cuda"], "Cuda cannot start on this machine"), ([CPU], "cannot say which provider runs what")]
)
def test_what_onnxruntime_would_be_silent_about_is_said(asked, said):
    with pytest.raises(EngineError, match=said):
        nodes_of(Session(), asked)


def test_frames_and_their_encoder_run_on_it_too(tmp_path):
    policy = image_policy()
    bc.export_policy(policy, None, tmp_path / "policy.onnx")
    found = open_export(tmp_path / "policy.onnx", threads=1, providers=[CPU])
    assert found.parity.agrees
    shapes = {name: np.zeros((1, *shape), np.float32) for name, shape in found.inputs.items()}
    assert found.features(found.check_observation(shapes)).shape[0] == found.n_obs_steps


def test_the_verbs(export, policy, tmp_path, capsys, command):
    place = save_reference(export, policy, count=2)
    words = ["check", str(export), "--reference", str(place), "--threads", "1", "--json", str(tmp_path / "parity.json")]
    assert main([*words, "--provider", CPU]) == 0
    out = capsys.readouterr().out
    assert "agrees with its policy: 2 observations" in out
    count = json.loads((tmp_path / "parity.json").read_text())["nodes"][CPU]
    assert f"{CPU} runs {count} of {count} nodes" in out
    assert main(words) == 0
    assert json.loads((tmp_path / "parity.json").read_text())["nodes"] == {}
    assert main([*words, "--provider", "Nonsense"]) == 2
    assert "error: the installed onnxruntime" in capsys.readouterr().err
    assert main(["serve", str(export), "--provider", "Nonsense"]) == 2
    assert "no provider 'Nonsense'" in capsys.readouterr().err
    code, _, error = command("serve", str(export), "--provider", "Nonsense")
    assert (code, "no provider 'Nonsense'" in error) == (2, True)
    code, _, error = command("serve", "pusht", "--provider", CPU)
    assert (code, "are for an export" in error) == (2, True)
