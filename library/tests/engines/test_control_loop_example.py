"""examples/control_loop.py: every policy is called in every situation, and the page compares within a round."""

import pytest

from blockcache.report.markdown import render
from repository import load_example


@pytest.fixture(scope="module")
def example():
    return load_example("control_loop")


def test_each_call_comes_right_behind_its_situation(example, monkeypatch):
    heard = []
    before = {"at once": lambda: None, "late": lambda: heard.append("wait")}
    monkeypatch.setattr(example, "seconds", lambda call: call() or len(heard))
    fast = {name: lambda name=name: heard.append(name) for name in "ab"}
    found = example.measure(lambda: heard.append("plain"), fast, before, 2)
    timed = {place for case, places in found.items() if case[0] != example.PLAIN for place in places}
    assert {case: len(places) for case, places in found.items()} == dict.fromkeys(
        [(example.PLAIN, ""), ("a", "at once"), ("a", "late"), ("b", "at once"), ("b", "late")], 2
    )
    for (name, situation), places in found.items():
        for place in places:
            *before_it, last = heard[:place]
            assert last == (name if name in fast else "plain")
            if name in fast:  # calls that are not counted, and what the situation is
                assert before_it[-1] == ("wait" if situation == "late" else name)
                assert before_it[-example.WARM - (situation == "late") :][: example.WARM] == [name] * example.WARM
    assert len(timed) == 2 * len(fast) * len(before)


def test_the_order_changes_from_round_to_round(example, monkeypatch):
    heard = []
    monkeypatch.setattr(example, "WARM", 0)
    fast = {name: lambda name=name: heard.append(name) for name in "abcdef"}
    example.measure(lambda: heard.append("|"), fast, {"": lambda: None}, 8)
    rounds = "".join(heard).split("|")[1:]
    assert {"".join(sorted(one)) for one in rounds} == {"abcdef"}
    assert len(set(rounds)) > 4


def test_situations_end_and_plain_torch_is_one_of_them(example):
    called = []
    for prepare in example.situations(lambda: called.append("plain")).values():
        prepare()
    assert called == ["plain"]


def test_the_page_divides_round_by_round(example):
    found = {(example.PLAIN, ""): [1.0, 2.0, 8.0], ("tuned", "late"): [0.01, 0.01, 0.02]}
    page = render(example.page("pusht/tuned", found, "python examples/control_loop.py"))
    assert "| plain torch |  | 2000.0 |  | 1 |" in page
    assert "| tuned | late | 10.00 | 19.00 | 200 |" in page  # the middle of 100, 200 and 400 times
