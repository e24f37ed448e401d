"""The quick part: Ctrl-C at random lines within `accelerate` and `disable`."""

from collections import Counter

from .interrupts import check

CASES = 200


def test_no_interrupt_leaves_a_trace(exports_stay_here, tmp_path):
    found = [check(0, case, tmp_path) for case in range(CASES)]
    assert not [item.line("interrupts") for item in found if item.finding]
    tags = Counter(item.tag for item in found)
    for engine in ("patched", "loop", "onnx"):
        for verb in ("accelerate", "disable"):
            assert tags[f"{engine} {verb}"] >= 10  # else it was hardly tried
