"""What README and docs tell people to type: Python blocks and quick commands are run, every other command is parsed."""

import re
import shlex
import subprocess
import sys
from pathlib import Path

import click
import numpy as np
import pytest

import blockcache.cli
from blockcache.compare.methods import parse_method
from blockcache.models.loading import save_policy
from blockcache.schedule import Schedule
from repository import ROOT

PAGES = {
    page.name: page.read_text() for page in (ROOT / "README.md", ROOT / "CONTRIBUTING.md", *ROOT.glob("docs/*.md"))
}
FENCE = re.compile(r"^```(\w*)\n(.*?)^```$", re.MULTILINE | re.DOTALL)
LANGUAGES = ("json", "python", "sh", "text", "toml")  # sh is typed, text is printed
QUICK = {"calibrate": ["--generations", "1"], "solve": [], "show": [], "export": []}  # the others take minutes
SIMPLE = (click.Choice, click.IntRange, click.FloatRange, type(click.INT), type(click.FLOAT))  # these look at no files


def fenced(text, language):
    return [code for found, code in FENCE.findall(text) if found == language]


def lines(code):
    """What a reader types, without comments."""
    return [re.sub(r"\s+# .*", "", row) for row in code.splitlines()]


def typed(text):
    return [line for code in fenced(text, "sh") for line in lines(code)]


def mentioned(text):
    """Commands within sentences, which may leave things open."""
    return re.findall(r"`(blockcache [^`]+)`", FENCE.sub("", text))


def everything(found):
    return [pytest.param(line, id=f"{page}: {line}") for page, text in PAGES.items() for line in found(text)]


def parse(line, complete):
    """Refuse what the command line would refuse, as far as that needs no files and nothing is run."""
    command, words = _resolve(shlex.split(line)[1:])
    context = click.Context(command, parent=click.Context(_front(), **_front().context_settings))
    if isinstance(command, click.Group):
        assert not words, f"{line}: there is no verb {words[0]}"
        return
    if not complete:
        known = {name for option in command.params for name in (*option.opts, *option.secondary_opts)}
        options = [word.split("=")[0] for word in words if re.match(r"--?[A-Za-z]", word)]
        assert set(options) <= known, f"{line}: there is no {set(options) - known}"
        return
    values, left, _ = command.make_parser(context).parse_args(list(words))
    assert not left, f"{line}: nobody takes {left}"
    for option in command.params:
        given = values.get(option.name)
        found = [item for item in (given if isinstance(given, list | tuple) else [given]) if isinstance(item, str)]
        assert found or not option.required, f"{line}: {option.name} is missing"
        for item in found:
            if isinstance(option.type, SIMPLE):
                option.type.convert(item, option, context)
            if option.name == "methods":
                parse_method(item)


def _resolve(words):
    """The verb's command and what is given to it."""
    command = _front()
    while words and isinstance(command, click.Group):
        inner = command.get_command(click.Context(command), words[0])
        if inner is None:
            break
        command, words = inner, words[1:]
    return command, words


def _front():
    blockcache.cli.main(["--version"])  # verbs may be added by the first call only
    return blockcache.cli.cli


def test_every_block_says_what_it_is():
    for page, text in PAGES.items():
        assert text.count("\n```") == 2 * len(FENCE.findall(text)), f"{page} has a fence that does not end"
        assert {language for language, _ in FENCE.findall(text)} <= set(LANGUAGES), page


@pytest.mark.parametrize("line", everything(typed))
def test_what_one_types_is_there(line, capsys):
    if line.startswith("blockcache "):
        parse(line, complete=True)
    elif line.startswith("make "):
        assert f"\n{line.split()[1]}:" in (ROOT / "Makefile").read_text()
    elif line.startswith("python "):
        assert (ROOT / line.split()[1]).exists()
    else:
        assert line.startswith("pip install ")


@pytest.mark.parametrize("line", everything(mentioned))
def test_what_is_mentioned_is_there(line, capsys):
    parse(line, complete=False)


@pytest.mark.parametrize(
    "line",
    [
        "blockcache nonsense",
        "blockcache show --no-such-option square_ph",
        "blockcache show",
        "blockcache show square_ph pusht",
        "blockcache solve recording.safetensors --updates ten",
        "blockcache eval pusht -m dppm-16",
    ],
)
def test_what_is_not_there_is_noticed(line, capsys):
    with pytest.raises((AssertionError, click.UsageError, blockcache.BlockcacheError)):
        parse(line, complete=True)


@pytest.fixture
def robot(make_policy, in_an_empty_directory, tmp_path, monkeypatch):
    """What a reader has at hand: a policy directory and a schedule for it, and observations of Push-T."""
    policy = make_policy()
    save_policy(policy, "my_policy")
    names = [f"layers.{index}.{kind}" for index in range(policy.config.n_layer) for kind in ("SA", "CA", "FFN")]
    Schedule.every_step(policy.num_inference_steps, names).save("schedule.json")
    np.savez("observations.npz", obs=512 * np.random.default_rng(0).random((2, 2, 20)))
    monkeypatch.syspath_prepend(tmp_path)
    yield {"__name__": "page", "observation": np.zeros(policy.obs_dim)}
    sys.modules.pop("my_robot", None)


OWN = ("diffusion-policy.md", "adding-a-family.md", "lerobot.md")  # each is run by a test of its own


@pytest.mark.parametrize("page", [page for page, text in PAGES.items() if page not in OWN and fenced(text, "python")])
def test_a_page_works_from_top_to_bottom(page, robot, blockcache):
    """Blocks of a page build on one another, as they do for who reads it."""
    for language, code in FENCE.findall(PAGES[page]):
        if language == "python":
            if file := re.match(r"# (\w+\.py)\n", code):
                Path(file[1]).write_text(code)
            exec(compile(code, page, "exec"), robot)
        for line in lines(code) if language == "sh" else ():
            words = shlex.split(line)
            if words[0] == "python":
                subprocess.run([sys.executable, ROOT / words[1], *words[2:]], check=True, capture_output=True)
            elif words[0] == "blockcache" and words[1] in QUICK:
                assert blockcache(*words[1:], *QUICK[words[1]])


def test_links_lead_somewhere():
    for page, text in PAGES.items():
        folder = ROOT if (ROOT / page).exists() else ROOT / "docs"
        for target in re.findall(r"\]\(([^)#]+)\)", text):
            assert target.startswith("https://") or (folder / target).exists(), f"{page} links to {target}"


def test_the_readme_is_short():
    assert len(PAGES["README.md"].split()) <= 1000
