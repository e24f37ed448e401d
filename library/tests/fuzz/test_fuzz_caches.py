"""The quick part: damaged and exchanged entries of the cache of converted checkpoints and exports."""

from collections import Counter

from .caches import check

CASES = 80


def test_no_damage_to_what_is_kept_loads(exports_stay_here, tmp_path):
    found = [check(0, case, tmp_path) for case in range(CASES)]
    assert not [item.line("caches") for item in found if item.finding]
    tags = Counter(item.tag for item in found)
    assert len(tags) == 12  # six kinds of damage to two kinds of entries
