"""The command line: help for every verb, the flow from a policy to an export, and nothing heavy before it is needed."""

import subprocess
import sys
from pathlib import Path

import click
import pytest

import blockcache as bc
from blockcache.cli import verbs
from blockcache.cli.arguments import POLICY
from blockcache.models.registry import port_of
from blockcache.samplers import DDPM
from cli_inputs import STEPS, check_help, check_list, loads_no_verb, loads_nothing_heavy, parameters

pytestmark = pytest.mark.usefixtures("in_an_empty_directory")
GROUPS = {"": verbs.cli, "policy": verbs.policy}
TOP = click.Context(verbs.cli)
CONTEXTS = {"": TOP, "policy": click.Context(verbs.policy, TOP)}
VERBS = {f"{group} {verb}".strip(): (group, verb) for group, found in GROUPS.items() for verb in found.verbs}


# -- help


@pytest.mark.parametrize("verb", VERBS)
@pytest.mark.parametrize("option", ["--help", "-h"])
def test_help_has_an_example(blockcache, verb, option):
    check_help(blockcache(*verb.split(), option), verb)


@pytest.mark.parametrize("words", [["--help"], ["-h"], [], ["--debug"]], ids=str)
def test_without_a_verb_there_is_help(blockcache, words):
    text = blockcache(*words)
    assert "blockcache demo" in text
    assert all(f"\n  {name} " in text for name in (*verbs.cli.verbs, "policy"))


@pytest.mark.parametrize("words", [["--help"], ["-h"], []], ids=str)
def test_a_group_lists_its_verbs_with_a_line_each(blockcache, words):
    check_list(blockcache("policy", *words), verbs.policy.verbs)


def test_the_verbs_a_user_needs_stand_at_the_top_and_the_others_in_groups():
    assert list(verbs.cli.verbs) == [
        "demo",
        "calibrate",
        "solve",
        "show",
        "export",
        "bench",
        "tune",
        "check",
        "eval",
        "report",
        "serve",
    ]
    assert verbs.cli.list_commands(TOP)[: len(verbs.cli.verbs) + 1] == [*verbs.cli.verbs, "policy"]
    assert list(verbs.policy.verbs) == ["convert", "observe", "place", "fit"]
    assert verbs.policy.list_commands(CONTEXTS["policy"])[:4] == list(verbs.policy.verbs)


def test_one_word_means_one_thing_in_every_verb():
    """POLICY is one kind of argument and never an option beside it; --seed is of noise."""
    seen = parameters({name: GROUPS[at].get_command(CONTEXTS[at], verb) for name, (at, verb) in VERBS.items()})
    assert {type(parameter.type) for parameter in seen["policy"].values()} == {type(POLICY)}
    assert not any(isinstance(found, click.Option) for found in seen["policy"].values())
    assert set(seen["seed"]) == {"calibrate", "check", "tune", "policy place", "policy fit"}
    assert set(seen["first_seed"]) == {"eval", "policy observe"}
    assert not any("docs" in str(found.default) for found in seen["output"].values())


def test_version(blockcache):
    assert blockcache("--version").strip() == f"blockcache, version {bc.__version__}"


@pytest.mark.parametrize("words", [["--help"], ["show", "square_ph"], ["eval", "--help"], ["check", "--help"]], ids=str)
def test_what_needs_no_torch_does_not_load_it(words):
    """Torch takes seconds."""
    loads_nothing_heavy(*words)


@pytest.mark.parametrize("words", [[], ["policy"], ["train"], ["nonsense"]], ids=str)
def test_a_list_of_verbs_loads_none_of_them(words):
    loads_no_verb(*words)


def test_all_that_is_exported_is_there():
    assert all(getattr(bc, name) is not None for name in bc.__all__)
    assert set(bc.__all__) <= set(dir(bc))
    with pytest.raises(AttributeError, match="no attribute 'nothing'"):
        bc.nothing  # noqa: B018


@pytest.mark.parametrize(
    "name", ["bc.solvers.adaptive", "bc.solvers.fit_teacache", "bc.schedule.compile_plan", "bc.samplers.table"]
)
def test_modules_are_at_hand_after_a_plain_import(name):
    """In a process of its own: here something else has imported them already."""
    done = subprocess.run([sys.executable, "-c", f"import blockcache as bc; {name}"], capture_output=True, text=True)
    assert done.returncode == 0, done.stderr


# -- the flow


def test_from_a_policy_to_a_file_for_the_robot(blockcache, policy_directory):
    said = blockcache("calibrate", policy_directory, "--generations", 3)
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

    for options in (["schedule.json"], ["schedule.json", "--actions-only"], []):
        assert blockcache("export", policy_directory, *options).startswith("policy.onnx: ")
        runner = bc.open_export("policy.onnx", bc.load_policy(policy_directory), threads=1)
        assert runner.header["output"] == ("action" if "--actions-only" in options else "chunk")
        assert (runner.header["schedule"]["layers.0.SA"] == list(range(STEPS))) == (not options)


def test_a_schedule_for_other_weights_needs_a_word(blockcache, refused, policy_directory, make_policy, tmp_path):
    blockcache("calibrate", policy_directory, "--generations", 1)
    blockcache("solve", "recording.safetensors", "-S", 5)
    other = make_policy(seed=1, sampler=DDPM(num_inference_steps=STEPS))
    bc.save_policy(other, tmp_path / "other")
    line = refused("export", tmp_path / "other", "schedule.json")
    assert "does not fit the policy, which has weights" in line
    assert not Path("policy.onnx").exists()
    assert blockcache("export", tmp_path / "other", "schedule.json", "--other-weights")


@pytest.mark.parametrize("verb", ["export", "serve"])
def test_a_schedule_that_would_fit_any_weights_must_be_named(blockcache, refused, policy_directory, verb):
    """It lies beside the policy, and nothing says that it was made for it."""
    blocks = [block.name for block in port_of(bc.load_policy(policy_directory)).adapter.blocks]
    bc.Schedule(STEPS, dict.fromkeys(blocks, (0, 2))).save(policy_directory / "schedule.json")
    assert "for no weights in particular, and is not followed unless it is named" in refused(verb, policy_directory)
    assert blockcache("export", policy_directory, policy_directory / "schedule.json").startswith("policy.onnx: ")


@pytest.mark.parametrize("name", bc.published_names())
def test_show_a_printed_schedule(blockcache, name):
    text = blockcache("show", name)
    assert f"from = paper, {name}" in text
    assert text.count("\nlayers.") == 24
    assert len(blockcache("show", name, "--plan").splitlines()) == 100


def test_twelve_schedules_are_printed():
    assert len(bc.published_names()) == 12


def test_demo_on_a_policy_of_one_s_own(blockcache, policy_directory):
    text = blockcache("demo", policy_directory, "--generations", 2, "--repeats", 1)
    lines = text.splitlines()
    assert "20 DDPM steps" in lines[0]
    assert "calibrated on 2 generations" in text
    for method, engine in (("full precision", "eager"), ("Uniform S=10", "patched"), ("Action costs", "onnx")):
        assert any(line.startswith(method) and f" {engine} " in line for line in lines)
    assert "Noise floor" in text
