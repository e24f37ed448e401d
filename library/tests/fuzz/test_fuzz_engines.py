"""The quick part: some random policies under random schedules, every engine against the reference."""

from .engines import ENGINES, compare

POLICIES = 20


def test_every_engine_gives_the_actions_of_the_reference(exports_stay_here, tmp_path):
    found = [compare(0, case, tmp_path) for case in range(POLICIES)]
    assert not [item for item in found if not item.agrees]
    for engine in ENGINES:  # else it was never tried
        assert sum(engine in item.gaps for item in found) >= POLICIES // 2
