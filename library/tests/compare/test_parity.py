"""An export beside the policy that it was made of, here and on a robot that has the runtime alone."""

import json
import subprocess
import sys

import numpy as np
import pytest
import torch

import blockcache as bc
import foreign_policy
import lerobot_directory
from blockcache.compare.parity import check_export, save_reference
from blockcache.errors import EngineError, FileError
from blockcache.models.dit.clip import MASK, TOKENS
from blockcache.models.loading import save_policy
from blockcache.models.registry import port_of
from blockcache.samplers import DDPM
from blockcache_runtime import open_export
from blockcache_runtime.__main__ import main
from blockcache_runtime.parity import Parity, Reference, compare
from blockcache_runtime.session import with_hash
from tuned_directory import write_tuned

pytestmark = pytest.mark.usefixtures("exports_stay_here")


@pytest.fixture
def exported(make_policy, tmp_path):
    """A policy, its file under a schedule, and the reference beside it."""
    policy = make_policy(sampler=DDPM(num_inference_steps=6))
    blocks = port_of(policy).adapter.blocks
    schedule = bc.Schedule(6, {block.name: [0, 3] for block in blocks})
    bc.export_policy(policy, schedule, tmp_path / "policy.onnx")
    reference = save_reference(tmp_path / "policy.onnx", policy, count=4)
    assert reference == tmp_path / "policy.reference.npz"
    return policy, tmp_path / "policy.onnx", reference


def test_an_export_agrees_with_its_policy(exported, capsys):
    policy, file, reference = exported
    found = check_export(file, policy, count=3)
    assert found.agrees
    assert found.count == 3
    assert 0 < found.typical <= found.largest < 1e-5  # not zero: they were computed by two engines
    assert 0 < found.p50_ms <= found.p95_ms
    assert main(["check", str(file), "--reference", str(reference)]) == 0
    assert "agrees with its policy: 4 observations, actions differ by" in capsys.readouterr().out


def test_the_reference_follows_the_schedule(exported):
    """Full precision is something else: the comparison is of the file with what it stands for."""
    policy, file, _ = exported
    bc.export_policy(policy, None, file.with_name("full.onnx"))
    full, cached = (save_reference(path, policy, count=4) for path in (file.with_name("full.onnx"), file))
    first, second = Reference.load(full), Reference.load(cached)
    assert np.array_equal(first.noise, second.noise)
    assert np.abs(first.action - second.action).max() > 1e-3


def test_another_file_or_policy_is_found_out(exported, make_policy, tmp_path, capsys):
    _, file, reference = exported
    other = make_policy(sampler=DDPM(num_inference_steps=6), seed=5)
    with pytest.raises(EngineError, match="was made for another policy, this one has"):
        check_export(file, other)
    bc.export_policy(other, None, tmp_path / "other.onnx")
    assert main(["check", str(tmp_path / "other.onnx"), "--reference", str(reference)]) == 1
    told = capsys.readouterr().out
    assert "does NOT agree with the reference" in told
    assert "the reference was made for another export" in told
    found = compare(open_export(tmp_path / "other.onnx", threads=1), Reference.load(reference))
    assert found.largest > 0.01


def test_a_changed_weight_is_refused_or_shows(exported, tmp_path, capsys):
    _, file, reference = exported
    data = bytearray(file.read_bytes())
    data[len(data) // 2] ^= 0x40
    file.write_bytes(data)
    assert main(["check", str(file), "--reference", str(reference)]) == 2
    assert "error: " in capsys.readouterr().err
    # who makes a hash that fits has made another file
    file.write_bytes(with_hash(bytes(data[:-87])))
    assert main(["check", str(file), "--reference", str(reference)]) == 1
    assert "made for another export" in capsys.readouterr().out


def test_a_tolerance_decides(exported, tmp_path):
    _, file, reference = exported
    settings = ["check", str(file), "--reference", str(reference), "--json", str(tmp_path / "parity.json")]
    assert main([*settings, "--tolerance", "0"]) == 1
    kept = json.loads((tmp_path / "parity.json").read_text())
    assert kept["format"] == "blockcache.parity"
    assert not kept["agrees"]
    assert kept["same_export"]
    assert main([*settings, "--tolerance", "1e-4"]) == 0
    assert json.loads((tmp_path / "parity.json").read_text())["agrees"]
    again = Parity.load(tmp_path / "parity.json")
    assert (again.count, again.agrees) == (4, True)


def test_files_that_are_no_reference_are_refused(exported, capsys):
    _, file, reference = exported
    whole = reference.read_bytes()
    reference.write_bytes(whole[: len(whole) // 2])
    with pytest.raises(FileError, match="cannot read the reference"):
        Reference.load(reference)
    np.savez(reference, obs=np.ones(3))
    with pytest.raises(FileError, match="is not valid JSON"):
        Reference.load(reference)
    reference.write_bytes(whole)
    arrays = dict(np.load(reference))
    np.savez(reference, **{name: value for name, value in arrays.items() if name != "noise"})
    with pytest.raises(FileError, match="lacks noise"):
        Reference.load(reference)
    for odd in ({"action": arrays["action"][:2]}, {"input.obs": np.float32(1)}, {"noise": np.ones(3, np.float32)}):
        np.savez(reference, **arrays | odd)
        with pytest.raises(FileError, match="arrays that do not belong together"):
            Reference.load(reference)
    np.savez(reference, **arrays | {"action": arrays["action"][:, :1]})
    assert main(["check", str(file), "--reference", str(reference)]) == 1
    assert "the reference is that of another policy: it has actions of shape" in capsys.readouterr().out
    np.savez(reference, **arrays | {"noise": arrays["noise"][1:]})
    assert main(["check", str(file), "--reference", str(reference)]) == 1
    assert "the reference is that of another policy: noise has shape" in capsys.readouterr().out


def test_the_verbs(make_policy, tmp_path, monkeypatch, command):
    monkeypatch.chdir(tmp_path)
    save_policy(make_policy(sampler=DDPM(num_inference_steps=6)), tmp_path / "policy")
    code, out, _ = command("export", "policy", "-o", "policy.onnx", "--with-reference", "3")
    assert code == 0
    assert "python -m blockcache_runtime check policy.onnx --reference policy.reference.npz" in out
    code, out, _ = command("check", "policy.onnx", "--against", "policy", "--count", "2", "-o", "parity.json")
    assert code == 0
    assert "policy.onnx agrees with its policy: 2 observations" in out
    assert json.loads((tmp_path / "parity.json").read_text())["count"] == 2
    assert command("check", "policy.onnx", "--against", "policy", "--count", "2", "--tolerance", "0")[0] == 1
    save_policy(make_policy(sampler=DDPM(num_inference_steps=6), seed=3), tmp_path / "other")
    code, _, error = command("check", "policy.onnx", "--against", "other")
    assert code == 2
    assert "was made for another policy" in error
    for words in (
        ["policy.onnx"],
        ["policy", "--against", "policy"],
        ["policy"],
        ["policy.onnx", "ddpm-3", "--against", "policy"],
        ["policy.onnx", "--against", "policy", "--samples", "8"],
        ["policy", "ddpm-3", "--tolerance", "1"],
    ):
        assert command("check", *words)[0] == 2, words


def test_what_was_tuned_is_compared_with_it(make_policy, tmp_path, monkeypatch, command):
    monkeypatch.chdir(tmp_path)
    policy = make_policy(sampler=DDPM(num_inference_steps=6))
    save_policy(policy, tmp_path / "policy")
    write_tuned(policy, tmp_path / "tuned")
    assert command("export", "policy", "--tuned", "tuned")[0] == 0
    words = ["check", "policy.onnx", "--against", "policy", "--count", "2"]
    code, out, _ = command(*words, "--tuned", "tuned")
    assert (code, "agrees with its policy: 2 observations" in out) == (0, True)
    assert "was made for another policy" in command(*words)[2]
    assert "leave out --sampler-file" in command(*words, "--tuned", "tuned", "--sampler-file", "tuned/sampler.json")[2]
    assert "--threads have no meaning beside --against" in command(*words, "--threads", "1")[2]


def test_a_foreign_policy_draws_its_own_noise(tmp_path):
    policy = foreign_policy.Policy()
    bc.export_policy(policy, None, tmp_path / "policy.onnx")
    assert check_export(tmp_path / "policy.onnx", policy, count=2).agrees


@pytest.mark.usefixtures("clip")
def test_words_that_are_constants_are_said_to_the_policy_too(tmp_path):
    settings = lerobot_directory.config(objective="flow_matching")
    policy = bc.load_policy(lerobot_directory.Reference(settings).write(tmp_path / "policy", 5))
    obs = lerobot_directory.observation(3)
    words = {name: obs[name][:1] for name in (TOKENS, MASK)}
    for name, fixed in (("any.onnx", None), ("one.onnx", words)):
        bc.export_policy(policy, None, tmp_path / name, fixed=fixed)
        for seen in (None, obs):
            found = check_export(tmp_path / name, policy, seen, count=2)
            assert found.agrees, (name, found)
    assert open_export(tmp_path / "one.onnx").header["fixed"][TOKENS] == words[TOKENS][0].tolist()


def test_on_a_robot_nothing_but_the_runtime_is_needed(exported):
    """In a process in which torch and blockcache cannot be imported."""
    _, file, reference = exported
    code = (
        "import sys\n"
        "for name in ('torch', 'blockcache', 'onnx', 'click'): sys.modules[name] = None\n"
        "from blockcache_runtime.__main__ import main\n"
        f"sys.exit(main(['check', {str(file)!r}, '--reference', {str(reference)!r}]))\n"
    )
    ran = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=False)
    assert ran.returncode == 0, ran.stderr
    assert "agrees with its policy" in ran.stdout


def test_torch_draws_nothing_away(exported):
    policy, file, _ = exported
    torch.manual_seed(7)
    expected = torch.rand(3)
    torch.manual_seed(7)
    check_export(file, policy, count=1)
    assert torch.equal(torch.rand(3), expected)
