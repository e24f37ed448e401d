"""Where the repository's own files are, for tests that read them."""

from pathlib import Path

ROOT = Path(__file__).parents[3]
DOCS = ROOT / "docs"
GENERATED = DOCS / "generated"  # what commands wrote
RECORDS = GENERATED / "records"
SHARED = ROOT.parent / "shared"
HELPERS = Path(__file__).parent
