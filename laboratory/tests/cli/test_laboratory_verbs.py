"""The laboratory's verbs: where they stand beside the library's, help for each, and nothing heavy before it is needed."""

import click
import pytest

import blockcache as bc
from blockcache.cli import verbs
from blockcache.cli.arguments import POLICY
from blockcache_lab.cli import VERBS, paper
from cli_inputs import check_help, check_list, loads_no_verb, loads_nothing_heavy, parameters
from foreign_policy import BLOCKS, STEPS

pytestmark = pytest.mark.usefixtures("in_an_empty_directory")
TOP = click.Context(verbs.cli)
GROUPS = {"": verbs.cli, "policy": verbs.policy, "paper": paper}
CONTEXTS = {"": TOP, **{name: click.Context(GROUPS[name], TOP) for name in ("policy", "paper")}}
BROUGHT = [*(name for name in VERBS if name != "paper"), *(f"paper {verb}" for verb in paper.verbs)]


def command(verb):
    *group, name = verb.split()
    return GROUPS["".join(group)].get_command(CONTEXTS["".join(group)], name)


# -- help


@pytest.mark.parametrize("verb", BROUGHT)
@pytest.mark.parametrize("option", ["--help", "-h"])
def test_help_has_an_example(blockcache, verb, option):
    check_help(blockcache(*verb.split(), option), verb)


@pytest.mark.parametrize("words", [["--help"], ["-h"], [], ["--debug"]], ids=str)
def test_without_a_verb_there_is_help_of_the_laboratory_too(blockcache, words):
    text = blockcache(*words)
    assert all(f"\n  {name} " in text for name in (*verbs.cli.verbs, "analyse", "policy", "paper"))


@pytest.mark.parametrize("words", [["--help"], ["-h"], []], ids=str)
def test_a_group_lists_its_verbs_with_a_line_each(blockcache, words):
    check_list(blockcache("paper", *words), paper.verbs)


def test_its_verbs_stand_behind_those_of_the_library():
    assert verbs.cli.list_commands(TOP) == [*verbs.cli.verbs, "policy", "analyse", "paper"]
    assert verbs.policy.list_commands(CONTEXTS["policy"]) == [
        *verbs.policy.verbs,
        "demonstrate",
        "pretrain",
        "replay",
        "train",
    ]
    assert list(paper.verbs) == [
        "suite",
        "timing",
        "results",
        "distances",
        "losses",
        "frontier",
        "rdt",
        "checkpoints",
        "realtime",
        "tables",
        "figures",
        "performance",
        "guard",
        "flops",
    ]


def test_one_word_means_one_thing_in_every_verb():
    """As in the library; beside another argument POLICY is an option, and --seed is of noise and training."""
    seen = parameters({verb: command(verb) for verb in BROUGHT})
    assert {type(parameter.type) for parameter in seen["policy"].values()} == {type(POLICY)}
    assert {verb for verb, found in seen["policy"].items() if isinstance(found, click.Option)} == {"paper flops"}
    assert set(seen["seed"]) == {"analyse", "policy pretrain", "policy train"}
    assert set(seen["first_seed"]) == {"paper checkpoints", "policy demonstrate", "policy replay"}
    assert not any("docs" in str(found.default) for found in seen["output"].values())


def test_what_needs_no_torch_does_not_load_it():
    loads_nothing_heavy("paper", "flops", "square_ph")


def test_a_list_of_verbs_loads_none_of_them():
    loads_no_verb("paper", "--help")


# -- paper flops


def test_flops_of_the_paper_s_shape(blockcache):
    text = blockcache("paper", "flops", "square_ph", "kitchen")
    assert "15.739" in text
    assert blockcache("paper", "flops", "--width", 16) != blockcache("paper", "flops")


def test_flops_under_a_schedule_that_was_solved(blockcache, policy_directory):
    blockcache("calibrate", policy_directory, "--generations", 3)
    blockcache("solve", "recording.safetensors", "-S", 5, "-n", 2)
    table = blockcache("paper", "flops", "schedule.json", "--policy", policy_directory)
    assert "full precision" in table
    assert f"{bc.Schedule.load('schedule.json').reused_share:.1%}" in table


def test_flops_of_a_policy_object_of_one_s_own(blockcache):
    bc.Schedule(STEPS, dict.fromkeys(BLOCKS, (0, 2))).save("schedule.json")
    table = blockcache("paper", "flops", "schedule.json", "--policy", "foreign_policy:Policy")
    assert "full precision" in table
