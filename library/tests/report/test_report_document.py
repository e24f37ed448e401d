"""The document model and its two renderers, on documents small enough to be written down."""

import re

import pytest
from hypothesis import given
from hypothesis import strategies as st

from blockcache.report.document import (
    Bullets,
    Column,
    Document,
    Figure,
    Folded,
    Paragraph,
    Section,
    Span,
    Table,
    plain,
    spans,
    table,
    table_of,
)
from blockcache.report.markdown import render
from blockcache.report.terminal import display

SMALL = Document(
    "Fruit",
    (
        Paragraph("Some *sour*,\nsome **sweet**."),
        Section(
            "Prices",
            (
                Paragraph("In `EUR`."),
                table(["kind", "price"], [["apple", "1.0"], ["**a|b**", ""]]),
                Section("More", (Bullets(("one", "[two](here.md)")), Figure("pie.png", "a pie", "Eaten."))),
                Folded("a < b", (Paragraph("hidden"),)),
            ),
        ),
        Section("End", (Paragraph("Good."),)),
    ),
)


# ---- inline markup


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("", []),
        ("no marks", [Span("no marks")]),
        ("a `b*c*` d", [Span("a "), Span("b*c*", "code"), Span(" d")]),
        ("**a b** *c*", [Span("a b", "strong"), Span(" "), Span("c", "emphasis")]),
        ("**a\nb**", [Span("a\nb", "strong")]),
        ("see [the page](docs/a.md).", [Span("see "), Span("the page", "link", "docs/a.md"), Span(".")]),
        ("-0.05 [-0.10, +0.01], n = 3", [Span("-0.05 [-0.10, +0.01], n = 3")]),
        ("2 * 3 * 4", [Span("2 * 3 * 4")]),
        (r"**x\***", [Span("x*", "strong")]),
        (r"`a\*`", [Span(r"a\*", "code")]),
    ],
)
def test_marks_become_spans(text, expected):
    assert list(spans(text)) == expected


@given(st.text())
def test_words_of_others_are_shown_as_they_are(words):
    """Whatever marks they hold; only white space is made plain, as no name should break a line."""
    for text in (plain(words), f"**{plain(words)}**" if words.split() else ""):
        found = spans(text)
        assert "".join(span.text for span in found) == (" ".join(words.split()) if text else "")
    assert all(span.kind == "plain" for span in spans(plain(words)))


# ---- what is refused


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (lambda: table(["a", "b"], [["1", "2"], ["1"]]), "a row has 1 cells in a table of 2 columns"),
        (lambda: table(["a"], [["1\n2"]]), "a cell is one line"),
        (lambda: Table((), ()), "at least one column"),
        (lambda: Column("a", "middle"), "on the left or on the right, got 'middle'"),
        (lambda: Column(" "), "the name of a column is one line of text"),
        (lambda: Bullets(("a", "")), "an item of a list is one line"),
        (lambda: Figure("", "a pie"), "the path of a figure"),
        (lambda: Figure("pie.png", ""), "what a figure shows"),
        (lambda: Section("", ()), "the title of a section"),
        (lambda: Folded("a\nb", ()), "the title of what is folded"),
        (lambda: Document("", ()), "the title of a document"),
    ],
)
def test_what_could_not_be_shown_is_refused_when_it_is_made(make, message):
    with pytest.raises(ValueError, match=message):
        make()


def test_names_stand_on_the_left_and_figures_on_the_right():
    made = table(["method", "engine", "ms"], [["full", "onnx", "3"]], left=2)
    assert [column.align for column in made.columns] == ["left", "left", "right"]


def test_records_become_rows():
    made = table_of({"name": ("who", "{}"), "ms": ("seconds", "{:.1f}x")}, [{"who": "a", "seconds": 2, "other": 3}])
    assert made == table(["name", "ms"], [["a", "2.0x"]])
    assert table_of({"ms": ("ms", "{:.0f}")}, [{"ms": None}]).rows == (("",),)


# ---- Markdown


def test_markdown():
    assert render(SMALL) == (
        "# Fruit\n\nSome *sour*,\nsome **sweet**.\n\n"
        "## Prices\n\nIn `EUR`.\n\n| kind | price |\n| --- | ---: |\n| apple | 1.0 |\n| **a\\|b** |  |\n\n"
        "### More\n\n- one\n- [two](here.md)\n\n![a pie](pie.png)\n\nEaten.\n\n"
        "<details><summary>a &lt; b</summary>\n\nhidden\n\n</details>\n\n"
        "## End\n\nGood.\n"
    )


# ---- terminal


def shown(capsys, *parts):
    display(*parts)
    return capsys.readouterr().out


def test_terminal(capsys):
    lines = [line.rstrip() for line in shown(capsys, SMALL).split("\n")]
    assert lines == [
        "Fruit", "", "Some sour, some sweet.", "", "Prices", "", "In `EUR`.", "", "kind   price", "apple    1.0",
        "a|b        -", "", "More", "", "- one", "- two (here.md)", "", "[a pie: pie.png]", "", "Eaten.", "",
        "a < b", "", "hidden", "", "End", "", "Good.", "",
    ]  # fmt: skip


def test_figures_are_not_cut_in_a_pipe(capsys, monkeypatch):
    monkeypatch.setenv("COLUMNS", "40")
    wide = table([f"column {place}" for place in range(30)], [[f"{place}.123456" for place in range(30)]])
    head, row, _ = shown(capsys, wide).split("\n")
    assert len(head) == len(row) > 300
    assert row.split() == [f"{place}.123456" for place in range(30)]
    sentence = "so many words " * 20
    assert shown(capsys, Paragraph(sentence)).rstrip("\n") == sentence


def test_words_are_wrapped_for_those_who_watch(capsys, monkeypatch):
    monkeypatch.setenv("COLUMNS", "40")
    monkeypatch.setenv("FORCE_COLOR", "1")
    monkeypatch.setenv("TERM", "xterm")
    lines = re.sub(r"\x1b\[[0-9;]*m", "", shown(capsys, Paragraph("so many **words** " * 20))).split("\n")
    assert max(map(len, lines)) <= 40
    assert " ".join(" ".join(lines).split()) == " ".join(["so many words"] * 20)


def test_names_are_no_markup_and_nothing_is_left_behind_an_empty_paragraph(capsys):
    text = shown(capsys, table(["schedule"], [[plain("[bold]*a*_b_.json")]]), Paragraph(""))
    assert text.split() == ["schedule", "[bold]*a*_b_.json"]
    assert text.count("\n") == 2
