"""What people read (README, CONTRIBUTING, docs, the houses' READMEs), and what it tells them to type."""

import re
import shlex

import click

import blockcache.cli
import blockcache.cli.verbs
from blockcache.compare.methods import parse_method
from repository import ROOT

FILES = [ROOT / "README.md", ROOT / "CONTRIBUTING.md", *ROOT.glob("docs/**/*.md"), *ROOT.glob("*/README.md")]
PAGES = {str(page.relative_to(ROOT)): page.read_text() for page in FILES}
FENCE = re.compile(r"^```(\w*)\n(.*?)^```$", re.MULTILINE | re.DOTALL)
_SIMPLE = (click.Choice, click.IntRange, click.FloatRange, type(click.INT), type(click.FLOAT))  # these look at no files


def section(page, heading):
    """The text under a heading of a page, up to the next one of its level or above."""
    level = len(heading) - len(heading.lstrip("#"))
    _, found, rest = PAGES[page].partition(f"\n{heading}\n")
    assert found, f"{page} has no heading {heading!r}"
    inside = [
        span for block in FENCE.finditer(rest) for span in range(block.start(), block.end())
    ]  # a # there is a comment
    ends = [match.start() for match in re.finditer(rf"^#{{1,{level}}} ", rest, re.MULTILINE)]
    return rest[: next((end for end in ends if end not in inside), len(rest))]


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
            if isinstance(option.type, _SIMPLE):
                option.type.convert(item, option, context)
            if option.name == "methods":
                parse_method(item)


def _resolve(words):
    """The verb's command and what is given to it."""
    command = _front()
    context = click.Context(command, info_name="blockcache")
    while words and isinstance(command, click.Group):
        inner = command.get_command(context, words[0])
        if inner is None:
            break
        context = click.Context(inner, parent=context, info_name=words[0])
        command, words = inner, words[1:]
    return command, words


def _front():
    blockcache.cli.main(["--version"])  # verbs may be added by the first call only
    return blockcache.cli.verbs.cli
