"""Files that were damaged at random, and random policies in every engine, against a reference that shares no code.

`python -m tests.fuzz --help` runs as many cases as one likes (`make fuzz` all of them); the tests in here run a few.
"""

import sys
from pathlib import Path

sys.path.append(str(Path(__file__).parents[1]))  # the other tests' toys and examples, as pytest finds them
