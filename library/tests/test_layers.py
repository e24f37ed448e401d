"""CONTRIBUTING's table is true: a module imports only from rows above its own, and not what its row knows nothing of."""

import ast
import re
from dataclasses import dataclass
from importlib.util import find_spec
from pathlib import Path

import pytest

import blockcache
from repository import ROOT

PACKAGE = "blockcache"
SOURCE = Path(blockcache.__file__).parent
CONTRIBUTING = ROOT / "CONTRIBUTING.md"
HEADER = ["room", "holds", "knows nothing of"]


@dataclass(frozen=True)
class Row:
    """Rooms are modules or whole subpackages, whose own modules may import one another."""

    rooms: tuple[str, ...]
    unknown: tuple[str, ...]
    excepted: tuple[str, ...]


def read_table(text):
    """The rows of the table, top-down, and the groups of libraries that are listed right behind it."""
    lines = iter(text.splitlines())
    assert any(_cells(line) == HEADER for line in lines), f"there is no table with the columns {', '.join(HEADER)}"
    next(lines)  # the rule beneath the header
    rows, groups = [], {}
    for line in lines:
        if line.startswith("|"):
            rooms, _, unknown = _cells(line)
            excepted = " ".join(re.findall(r"\(except ([^)]*)\)", unknown))
            plain = re.sub(r"\(except [^)]*\)", "", unknown)
            rows.append(Row(_names(rooms), _names(plain), _names(excepted)))
        elif line.startswith("- "):
            name, *members = _names(line)
            groups[name] = members
        elif line:
            break
    return rows, groups


def _cells(line):
    return [cell.strip() for cell in line.strip("| ").split("|")]


def _names(cell):
    return tuple(re.findall(r"`([^`]+)`", cell))


def lies(rows, groups, sources):
    """One line for each name of the table that stands for nothing, or twice."""
    modules = {".".join(Path(path).with_suffix("").parts[:depth]) for path in sources for depth in (1, 2)}
    exist, named = {_room(path) for path in sources}, [room for row in rows for room in row.rooms]
    found = [f"the table has the room {room}, which does not exist" for room in named if room not in exist]
    found += [f"the table has the room {room} twice" for room in sorted(set(named)) if named.count(room) > 1]
    for row in rows:
        found += [f"the row of {row.rooms} knows nothing of itself" for name in row.unknown if name in row.rooms]
        for name in (*row.unknown, *row.excepted):
            if name in groups or name in modules or ("." not in name and find_spec(name)):
                continue
            found.append(f"the row of {row.rooms} names {name}, which is no room, no group and no installed library")
    found += [
        f"the group {group} has {name}, which is not installed"
        for group in groups
        for name in groups[group]
        if not find_spec(name)
    ]
    return found


def violations(rows, groups, sources):
    """One line for each forbidden import in {path within the package: source text}."""
    rank = {room: index for index, row in enumerate(rows) for room in row.rooms}
    found = []
    for path, text in sources.items():
        room = _room(path)
        if room not in rank:
            found.append(f"{path} is in no row of the table")
            continue
        row = rows[rank[room]]
        unknown = {member for name in row.unknown for member in groups.get(name, [name])}
        for target, line in imported(text, room):
            inside = target.startswith(f"{PACKAGE}.")
            name = target.removeprefix(f"{PACKAGE}.")
            if target.startswith("."):
                found.append(f"{path}:{line} imports {target}; write blockcache... in full")
            elif inside and name.split(".")[0] == room:
                continue
            elif _among(name, unknown) and not _among(name, row.excepted):
                found.append(f"{path}:{line} imports {target}, of which {room} knows nothing")
            elif target == PACKAGE or (inside and rank.get(name.split(".")[0], len(rows)) >= rank[room]):
                found.append(f"{path}:{line} imports {target}, which is not above {room}")
    return found


def _room(path):
    return Path(path).parts[0].removesuffix(".py")


def _among(name, names):
    return any(name == other or name.startswith(f"{other}.") for other in names)


def imported(text, room):
    """(absolute name, line) of every import, also inside functions; the front imports there what it likes."""
    tree = ast.parse(text)
    for node in ast.iter_child_nodes(tree) if room in ("cli", "__init__") else ast.walk(tree):
        if isinstance(node, ast.Import):
            yield from ((alias.name, node.lineno) for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            module = "." * node.level + (node.module or "")
            ours = module.split(".")[0] == PACKAGE  # then each name may be a module of its own
            yield from ((f"{module}.{alias.name}" if ours else module, node.lineno) for alias in node.names)


ROWS, GROUPS = read_table(CONTRIBUTING.read_text())


def test_every_module_imports_only_what_the_table_allows():
    sources = {str(path.relative_to(SOURCE)): path.read_text() for path in sorted(SOURCE.rglob("*.py"))}
    assert len(sources) > 30
    assert violations(ROWS, GROUPS, sources) == []
    assert lies(ROWS, GROUPS, sources) == []


@pytest.mark.parametrize(
    ("path", "text", "named"),
    [
        ("schedule/plan.py", "from blockcache.solvers import solve", "schedule/plan.py:1 imports blockcache.solvers"),
        ("schedule/plan.py", "import torch", "schedule/plan.py:1 imports torch"),
        ("fingerprint.py", "from blockcache.schedule import Schedule", "which is not above fingerprint"),
        ("files.py", "from blockcache.extras import require", "which is not above files"),
        ("solvers/acs.py", "def f():\n    import torch.nn", "solvers/acs.py:2 imports torch.nn"),
        ("solvers/acs.py", "from pymunk import Space", "of which solvers knows nothing"),
        ("models/dpt/policy.py", "from blockcache import attach", "models/dpt/policy.py:1 imports blockcache.attach"),
        ("models/dpt/policy.py", "from blockcache.solvers import solve", "of which models knows nothing"),
        ("models/dpt/policy.py", "from blockcache.schedule import Schedule", "of which models knows nothing"),
        ("models/dpt/policy.py", "from blockcache.schedule.plan import Plan", "of which models knows nothing"),
        ("tasks/pusht.py", "from blockcache.engines.loop import Loop", "of which tasks knows nothing"),
        ("deploy/export.py", "from blockcache.observations import Observation", "of which deploy knows nothing"),
        ("deploy/export.py", "from blockcache.engines.loop import Loop", "which is not above deploy"),
        ("deploy/export.py", "def f():\n    import torch", "deploy/export.py:2 imports torch"),
        ("engines/loop.py", "import blockcache.tasks.base", "engines/loop.py:1 imports blockcache.tasks.base"),
        ("engines/loop.py", "from blockcache.models.dpt.fold import fold", "of which engines knows nothing"),
        ("engines/loop.py", "from blockcache.models import dpt", "imports blockcache.models.dpt, of which engines"),
        ("engines/loop.py", "import blockcache", "engines/loop.py:1 imports blockcache,"),
        ("engines/loop.py", "from ..tasks import base", "engines/loop.py:1 imports ..tasks; write"),
        ("report/page.py", "if True:\n    import torch", "report/page.py:2 imports torch"),
        ("cli/show.py", "import blockcache", "cli/show.py:1 imports blockcache,"),
        ("cli/show.py", "import torch", "of which cli knows nothing"),
        ("utils.py", "", "utils.py is in no row"),
    ],
)
def test_a_violation_is_reported_by_name(path, text, named):
    (line,) = violations(ROWS, GROUPS, {path: text})
    assert named in line


@pytest.mark.parametrize(
    ("path", "text"),
    [
        ("schedule/plan.py", "from blockcache.errors import ScheduleError"),
        ("engines/loop.py", "from blockcache.engines.stats import Stats\nfrom blockcache.attach import recorder"),
        ("models/adapter.py", "from blockcache.block import Block"),
        ("cli/show.py", "def show():\n    import blockcache, torch"),
        ("solvers/acs.py", "import numpy as np"),
    ],
)
def test_what_is_allowed_is_not_reported(path, text):
    assert violations(ROWS, GROUPS, {path: text}) == []


TABLE = """
Words before.

| room | holds | knows nothing of |
|---|---|---|
| `low`, `_low` | the `first` things | `plots` |
| `high` | more | `low` (except `low.values`, `low.names`), `torch` |

- `plots`: `matplotlib`

Words behind, with | `a` | bar |.
"""
MODULES = {"low/values.py": "", "low/names/a.py": "", "_low.py": "", "high/__init__.py": ""}


def test_the_table_is_read_from_the_text():
    rows, groups = read_table(TABLE)
    assert rows == [
        Row(("low", "_low"), ("plots",), ()),
        Row(("high",), ("low", "torch"), ("low.values", "low.names")),
    ]
    assert groups == {"plots": ["matplotlib"]}
    assert lies(rows, groups, MODULES) == []
    with pytest.raises(AssertionError, match="no table with the columns room, holds, knows nothing of"):
        read_table("| a | b |\n|---|---|")


def test_an_order_that_is_turned_round_is_another_table():
    rows, groups = read_table(TABLE)
    sources = {"high.py": "import blockcache._low"}
    assert violations(rows, groups, sources) == []
    (line,) = violations(rows[::-1], groups, sources)
    assert line == "high.py:1 imports blockcache._low, which is not above high"


@pytest.mark.parametrize(
    ("old", "new", "said"),
    [
        ("`high`", "`high`, `attic`", "the table has the room attic, which does not exist"),
        ("`high`", "`high`, `low`", "the table has the room low twice"),
        ("`torch`", "`trch`", "names trch, which is no room, no group and no installed library"),
        ("`torch`", "`plotz`", "names plotz, which is no room"),
        ("`torch`", "`high`", "knows nothing of itself"),
        ("`low.names`", "`low.nmes`", "names low.nmes, which is no room"),
        ("`matplotlib`", "`matplotlip`", "the group plots has matplotlip, which is not installed"),
    ],
)
def test_a_table_that_lies_is_told_so(old, new, said):
    assert any(said in line for line in lies(*read_table(TABLE.replace(old, new)), MODULES))
