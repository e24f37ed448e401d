"""The quick part: random code of policies, and random edits of policies, in engines that must act the same or refuse."""

from collections import Counter

import pytest

from . import code, edits

CASES = {code: 60, edits: 120}


@pytest.mark.parametrize("kind", CASES, ids=["code", "edits"])
def test_an_engine_acts_as_the_policy_or_is_refused(kind, exports_stay_here, tmp_path):
    found = [kind.check(0, case, tmp_path) for case in range(CASES[kind])]
    name = kind.__name__.rpartition(".")[2]
    assert not [item.line(name) for item in found if item.finding]
    tags = Counter(item.tag for item in found)
    wanted = {
        code: ("accelerated", "refused", "onnx", "patched"),
        edits: ("before honoured", "before refused", "after noticed", "after the same actions"),
    }
    for tag in wanted[kind]:  # else it was hardly tried
        assert tags[tag] >= 5, tags
