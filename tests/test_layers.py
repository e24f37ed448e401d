"""The layers of DESIGN.md: a module imports only from rows above its own, and not what its row knows nothing of."""

import ast
from pathlib import Path

import pytest

import blockcache

PACKAGE = "blockcache"
SOURCE = Path(blockcache.__file__).parent

# Units are modules or whole subpackages (whose own modules may import one another). DESIGN's rows, some of them split
# where their members build on one another.
ROWS = (
    ("errors", "_version", "cores"),
    ("extras", "files", "fingerprint", "observations"),
    ("schedule",),
    ("solvers", "samplers"),
    ("models",),
    ("attach",),
    ("deploy",),
    ("engines",),
    ("tasks", "testing"),
    ("training", "measure", "analysis"),
    ("compare",),
    ("studies",),
    ("report",),
    ("cli", "__init__", "__main__"),
)
HEAVY = {"torch", "diffusers"}
SIMULATORS = {"gymnasium", "gym_pusht", "pymunk", "pygame"}
PLOTS = {"matplotlib"}

# "knows nothing of", for what stands above a row and would otherwise be allowed
FORBIDDEN = {
    **dict.fromkeys(("errors", "cores", "files", "fingerprint", "schedule", "solvers"), HEAVY | SIMULATORS | PLOTS),
    "extras": HEAVY | SIMULATORS | PLOTS,
    "samplers": {"torch"} | SIMULATORS | PLOTS,
    "models": {"solvers"} | SIMULATORS | PLOTS,
    "attach": SIMULATORS | PLOTS,
    # a robot has numpy and onnxruntime
    "deploy": {"onnx", "safetensors", "scipy", "observations", "schedule", "solvers", "samplers", "models", "attach"}
    | HEAVY
    | SIMULATORS
    | PLOTS,
    "engines": SIMULATORS | PLOTS,
    "tasks": {"engines", "solvers", "attach"} | PLOTS,
    "testing": SIMULATORS | PLOTS,
    "measure": PLOTS,
    "analysis": PLOTS,
    "compare": PLOTS,
    "studies": PLOTS,
    "report": HEAVY,
}


def violations(sources):
    """One line for each forbidden import in {path within the package: source text}."""
    rank = {name: index for index, row in enumerate(ROWS) for name in row}
    found = []
    for path, text in sources.items():
        unit = Path(path).parts[0].removesuffix(".py")
        if unit not in rank:
            found.append(f"{path} is in no row of the table")
            continue
        for target, line in imported(text, unit):
            inside = target.split(".")[1] if target.startswith(f"{PACKAGE}.") else None
            what = inside or target.split(".")[0]
            if what == unit:
                continue
            if what in FORBIDDEN.get(unit, ()):
                found.append(f"{path}:{line} imports {target}, of which {unit} knows nothing")
            elif target == PACKAGE or (inside and rank.get(inside, len(ROWS)) >= rank[unit]):
                found.append(f"{path}:{line} imports {target}, which is not above {unit}")
    return found


def imported(text, unit):
    """(absolute name, line) of every import, also inside functions; the command line imports lazily what it likes."""
    tree = ast.parse(text)
    nodes = ast.iter_child_nodes(tree) if unit == "cli" else ast.walk(tree)
    for node in nodes:
        if isinstance(node, ast.Import):
            yield from ((alias.name, node.lineno) for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            module = f"{PACKAGE}.{node.module or unit}" if node.level else str(node.module)
            if module == PACKAGE:  # from blockcache import solvers
                yield from ((f"{PACKAGE}.{alias.name}", node.lineno) for alias in node.names)
            else:
                yield module, node.lineno


def test_every_module_imports_only_from_rows_above_its_own():
    sources = {str(path.relative_to(SOURCE)): path.read_text() for path in sorted(SOURCE.rglob("*.py"))}
    assert len(sources) > 30
    assert violations(sources) == []


@pytest.mark.parametrize(
    ("path", "text", "named"),
    [
        ("schedule/plan.py", "from blockcache.solvers import solve", "schedule/plan.py:1 imports blockcache.solvers"),
        ("schedule/plan.py", "import torch", "schedule/plan.py:1 imports torch"),
        ("fingerprint.py", "from blockcache.schedule import Schedule", "which is not above fingerprint"),
        ("solvers/acs.py", "def f():\n    import torch.nn", "solvers/acs.py:2 imports torch.nn"),
        ("models/dpt/policy.py", "from blockcache import attach", "models/dpt/policy.py:1 imports blockcache.attach"),
        ("models/dpt/policy.py", "from blockcache.solvers import solve", "of which models knows nothing"),
        ("tasks/pusht.py", "from blockcache.engines.loop import Loop", "of which tasks knows nothing"),
        ("deploy/export.py", "from blockcache.observations import Observation", "of which deploy knows nothing"),
        ("deploy/export.py", "from blockcache.engines.loop import Loop", "which is not above deploy"),
        ("deploy/export.py", "def f():\n    import torch", "deploy/export.py:2 imports torch"),
        ("engines/loop.py", "import blockcache.tasks.base", "engines/loop.py:1 imports blockcache.tasks.base"),
        ("engines/loop.py", "import blockcache", "engines/loop.py:1 imports blockcache,"),
        ("report/page.py", "if True:\n    import torch", "report/page.py:2 imports torch"),
        ("cli/show.py", "import blockcache", "cli/show.py:1 imports blockcache,"),
        ("utils.py", "", "utils.py is in no row"),
    ],
)
def test_a_violation_is_reported_by_name(path, text, named):
    (line,) = violations({path: text})
    assert named in line


@pytest.mark.parametrize(
    ("path", "text"),
    [
        ("schedule/plan.py", "from blockcache.errors import ScheduleError"),
        ("engines/loop.py", "from blockcache.engines.stats import Stats\nfrom blockcache.attach import recorder"),
        ("cli/show.py", "def show():\n    import blockcache"),
        ("solvers/acs.py", "import numpy as np"),
    ],
)
def test_what_is_allowed_is_not_reported(path, text):
    assert violations({path: text}) == []
