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
    found = example.measure(
        lambda: heard.append("plain"), {"a": lambda: heard.append("a"), "b": lambda: heard.append("b")}, before, 2
    )
    assert heard == 2 * ["plain", "a", "a", "a", "wait", "a", "b", "b", "b", "wait", "b"]
    assert found[example.PLAIN, ""] == [1, 12]
    assert found["a", "at once"] == [3, 14]  # the call before it was not counted
    assert found["b", "late"] == [11, 22]


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
