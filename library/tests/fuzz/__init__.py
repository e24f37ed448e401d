"""Files that were damaged at random, and random policies in every engine, against a reference that shares no code.

`python -m fuzz --help`, with `library/tests` on the path, runs as many cases as one likes (`make fuzz` all of them); the
tests in here run a few. The laboratory's formats are `laboratory_samples` among its own tests' helpers.
"""

import sys
from pathlib import Path

_TESTS = Path(__file__).parents[1]
_LABORATORY = _TESTS.parents[1] / "laboratory" / "tests"
# the other tests' toys and examples, as pytest finds them
sys.path += [str(_TESTS), str(_TESTS / "helpers"), str(_LABORATORY / "helpers")]
