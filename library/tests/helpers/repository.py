"""Where the repository's own files are, for tests that read them."""

import importlib.util
import sys
from pathlib import Path

ROOT = Path(__file__).parents[3]
DOCS = ROOT / "docs"
GENERATED = DOCS / "generated"  # what commands wrote
RECORDS = GENERATED / "records"
SHARED = ROOT.parent / "shared"
HELPERS = Path(__file__).parent


def load_example(name):
    """A script of examples/ as a module."""
    spec = importlib.util.spec_from_file_location(name, ROOT / "examples" / f"{name}.py")
    module = sys.modules[name] = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module
