"""CONTRIBUTING's tables are true, in all four houses: a module imports only from rows above its own and from houses before
its own, and nothing that it pulls in, however far away, is what its row knows nothing of."""

import ast
import re
import sys
from collections import deque
from dataclasses import dataclass
from importlib.util import find_spec
from pathlib import Path

import pytest

from repository import ROOT

HOUSES = {
    "runtime": "blockcache_runtime",
    "library": "blockcache",
    "plugin": "lerobot_policy_blockcache",
    "laboratory": "blockcache_lab",
}
"""Folder and package, in the order in which they may import one another."""
PACKAGES = tuple(HOUSES.values())
RUNTIME_NEEDS = {"numpy", "onnxruntime"}
RUNTIME_EXTRAS = {"serve": {"websockets", "msgpack", "PIL"}, "rerun_file": {"rerun"}}
"""By room: what only that room may import, of an extra, or if it happens to be there."""
CONTRIBUTING = ROOT / "CONTRIBUTING.md"
HEADER = ["room", "holds", "knows nothing of"]
LAZY = ("cli", "__init__")
"""Rooms that import inside a function what they like of houses before their own."""


@dataclass(frozen=True)
class Row:
    """Rooms are modules or whole subpackages, whose own modules may import one another."""

    rooms: tuple[str, ...]
    unknown: tuple[str, ...]


@dataclass(frozen=True)
class Import:
    """An import in a source text. `at_import` is false inside functions and where only a type checker looks."""

    target: str
    line: int
    at_import: bool


def read_tables(text):
    """The tables of the houses, top-down: rows by package; and the groups of libraries that are listed behind them."""
    tables, groups, house, rows = {}, {}, None, None
    for line in text.splitlines():
        if named := re.match(r"#+ Rooms of the (\w+)$", line):
            house = HOUSES[named[1]]
        elif line.startswith("|") and _cells(line) == HEADER and house is not None:
            rows = tables[house] = []
        elif line.startswith("|---"):
            continue
        elif line.startswith("|") and rows is not None:
            rooms, _, unknown = _cells(line)
            assert "except" not in unknown, f"the row of {rooms} has an exception; solve its cause"
            rows.append(Row(_names(rooms), _names(unknown)))
        elif line.startswith("- ") and rows is not None:
            name, *members = _names(line)
            groups[name] = members
        elif line:
            house, rows = None, None if groups else rows
    missing = [house for house, package in HOUSES.items() if package not in tables]
    assert not missing, f"there is no table with the columns {', '.join(HEADER)} under 'Rooms of the {missing[0]}'"
    return tables, groups


def _cells(line):
    return [cell.strip() for cell in line.strip("| ").split("|")]


def _names(cell):
    return tuple(re.findall(r"`([^`]+)`", cell))


def _module(path):
    """The name of a module from its path within the houses' sources: "blockcache/solvers/acs.py"."""
    return ".".join(Path(path).with_suffix("").parts).removesuffix(".__init__")


def _room(path):
    return Path(path).parts[1].removesuffix(".py")


def _among(name, names):
    return any(name == other or name.startswith(f"{other}.") for other in names)


def _unknown(row, package, groups, modules):
    """Full names of all that a row knows nothing of; a name is a group, a room or module of the same house, or as it is."""
    members = [member for name in row.unknown for member in groups.get(name, [name])]
    return {f"{package}.{name}" if f"{package}.{name}" in modules else name for name in members}


def lies(tables, groups, sources):
    """One line for each name of the tables that stands for nothing, or twice."""
    modules, found = {_module(path) for path in sources}, []
    modules |= {module.rpartition(".")[0] for module in modules}
    for package, rows in tables.items():
        exist = {_room(path) for path in sources if Path(path).parts[0] == package}
        named = [room for row in rows for room in row.rooms]
        found += [f"the table has the room {room}, which does not exist" for room in named if room not in exist]
        found += [f"the table has the room {room} twice" for room in sorted(set(named)) if named.count(room) > 1]
        for row in rows:
            found += [f"the row of {row.rooms} knows nothing of itself" for name in row.unknown if name in row.rooms]
            for name in row.unknown:
                known = name in groups or f"{package}.{name}" in modules or name in modules
                if not known and ("." in name or not (find_spec(name) or name in NOT_ON_EVERY_MACHINE)):
                    found.append(
                        f"the row of {row.rooms} names {name}, which is no room, no group and no installed library"
                    )
    return found + [
        f"the group {group} has {name}, which no extra of a house brings and which is not installed"
        for group in groups
        for name in groups[group]
        if not find_spec(name) and name not in NOT_ON_EVERY_MACHINE
    ]


NOT_ON_EVERY_MACHINE = {
    "mani_skill",
    "sapien",
    "pybullet",
    "pybullet_data",
    "robosuite",
    "gymnasium_robotics",
    "lerobot",
}
"""Simulators of the laboratory, and LeRobot, that `make test` does not install; a table may name them all the same."""


def violations(tables, groups, sources):
    """One line for each forbidden import in {path within the houses' sources: text}, those of what it pulls in too."""
    modules = {_module(path): path for path in sources}
    imports = {path: tuple(imported(text)) for path, text in sources.items()}
    found = []
    for path in sources:
        package, room = Path(path).parts[0], _room(path)
        rank = {name: index for index, row in enumerate(tables[package]) for name in row.rooms}
        if room not in rank:
            found.append(f"{path} is in no row of the table")
            continue
        row = tables[package][rank[room]]
        unknown = _unknown(row, package, groups, {*modules, *(f"{package}.{name}" for name in rank)})
        unknown |= {f"{package}.{name}" for name in row.unknown if name.partition(".")[0] in rank}
        direct = [_complaint(one, package, room, rank, unknown) for one in imports[path]]
        found += [
            f"{path}:{one.line} imports {one.target}{why}"
            for one, why in zip(imports[path], direct, strict=True)
            if why
        ]
        told = {one.target for one, why in zip(imports[path], direct, strict=True) if why}
        for name, way in _pulled_in(path, modules, imports).items():
            if len(way) > 1 and _among(name, unknown) and not any(_among(step, told) for step in (name, *way)):
                found.append(f"{path} pulls in {name} through {' -> '.join(way[:-1])}, of which {room} knows nothing")
                told.add(name)
    return found


def _complaint(one, package, room, rank, unknown):
    """What is wrong with one import, or nothing."""
    top = one.target.partition(".")[0]
    if one.target.startswith("."):
        return f"; write {package}... in full"
    if top in PACKAGES and PACKAGES.index(top) > PACKAGES.index(package):
        return f", which is of a house behind {package}"
    if package == PACKAGES[0] and top not in {
        package,
        *RUNTIME_NEEDS,
        *RUNTIME_EXTRAS.get(room, ()),
        *sys.stdlib_module_names,
    }:
        return ", which a robot does not have"
    if room in LAZY and not one.at_import:
        return ""
    inside = one.target.removeprefix(f"{package}.").partition(".")[0] if one.target.startswith(f"{package}.") else None
    if inside == room:
        return ""
    if _among(one.target, unknown):
        return f", of which {room} knows nothing"
    if one.target == package or (inside is not None and rank.get(inside, len(rank)) >= rank[room]):
        return f", which is not above {room}"
    return ""


def _pulled_in(path, modules, imports):
    """Every module that importing this one imports, to the end, each with the shortest way to it."""
    ways, waiting = {}, deque([(path, ())])
    while waiting:
        place, way = waiting.popleft()
        for one in imports[place]:
            for name in _loaded(one.target, modules) if one.at_import else ():
                if name not in ways and modules.get(name) != path:
                    ways[name] = (*way, name)
                    if name in modules:
                        waiting.append((modules[name], ways[name]))
    return ways


def _loaded(target, modules):
    """What an import of that name loads: the longest of it that is a module, and the packages that it lies in."""
    if target.partition(".")[0] not in PACKAGES:
        return [target]
    parts = target.split(".")
    names = [".".join(parts[:end]) for end in range(len(parts), 0, -1)]
    return [name for name in names if name in modules] or [target]


def imported(text):
    """Every import of a source text."""
    tree = ast.parse(text)
    early = {id(node) for node in _run_at_import(tree)}
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            yield from (Import(alias.name, node.lineno, id(node) in early) for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            module = "." * node.level + (node.module or "")
            ours = module.partition(".")[0] in PACKAGES  # then each name may be a module of its own
            for alias in node.names:
                yield Import(f"{module}.{alias.name}" if ours else module, node.lineno, id(node) in early)


def _run_at_import(node):
    for child in ast.iter_child_nodes(node):
        if isinstance(child, ast.FunctionDef | ast.AsyncFunctionDef | ast.Lambda):
            continue
        if isinstance(child, ast.If) and ast.unparse(child.test).endswith("TYPE_CHECKING"):
            continue
        yield child
        yield from _run_at_import(child)


TABLES, GROUPS = read_tables(CONTRIBUTING.read_text())


def test_every_module_imports_only_what_the_tables_allow():
    roots = {ROOT / house / "src" / package: ROOT / house / "src" for house, package in HOUSES.items()}
    sources = {
        path.relative_to(root).as_posix(): path.read_text()
        for package, root in roots.items()
        for path in sorted(package.rglob("*.py"))
    }
    assert all(sum(path.startswith(f"{package}/") for path in sources) > 5 for package in PACKAGES)
    assert violations(TABLES, GROUPS, sources) == []
    assert lies(TABLES, GROUPS, sources) == []


@pytest.mark.parametrize(
    ("path", "text", "named"),
    [
        ("schedule/plan.py", "from blockcache.solvers import solve", "schedule/plan.py:1 imports blockcache.solvers"),
        ("schedule/plan.py", "import torch", "schedule/plan.py:1 imports torch"),
        ("errors.py", "from blockcache.schedule import Schedule", "which is not above errors"),
        ("files/format.py", "from blockcache.schedule import Schedule", "which is not above files"),
        ("solvers/acs.py", "def f():\n    import torch.nn", "solvers/acs.py:2 imports torch.nn"),
        ("solvers/acs.py", "from pymunk import Space", "of which solvers knows nothing"),
        ("models/dpt/policy.py", "from blockcache import attach", "models/dpt/policy.py:1 imports blockcache.attach"),
        ("models/dpt/policy.py", "from blockcache.solvers import solve", "of which models knows nothing"),
        ("models/dpt/policy.py", "from blockcache.schedule import Schedule", "of which models knows nothing"),
        ("models/dpt/policy.py", "from blockcache.schedule.plan import Plan", "of which models knows nothing"),
        ("tasks/pusht.py", "from blockcache.engines.loop import Loop", "of which tasks knows nothing"),
        ("engines/loop.py", "import blockcache.tasks.base", "engines/loop.py:1 imports blockcache.tasks.base"),
        ("engines/loop.py", "from blockcache.models.dpt.fold import fold", "of which engines knows nothing"),
        ("engines/loop.py", "from blockcache.models import dpt", "imports blockcache.models.dpt, of which engines"),
        ("engines/loop.py", "import blockcache", "engines/loop.py:1 imports blockcache,"),
        ("engines/loop.py", "from ..tasks import base", "engines/loop.py:1 imports ..tasks; write"),
        ("report/page.py", "if True:\n    import torch", "report/page.py:2 imports torch"),
        ("report/page.py", "from blockcache.compare.store import Store", "of which report knows nothing"),
        ("results/check.py", "from blockcache.compare.jobs import Store", "which is not above results"),
        ("cli/show.py", "import blockcache", "cli/show.py:1 imports blockcache,"),
        ("cli/show.py", "import torch", "of which cli knows nothing"),
        ("cli/show.py", "def f():\n    import blockcache_lab.pages", "cli/show.py:2 imports blockcache_lab.pages, which is"),
        ("tasks/pusht.py", "from blockcache_lab.tasks import flagged", "which is of a house behind blockcache"),
        ("utils.py", "", "utils.py is in no row"),
        ("blockcache_runtime/export.py", "from blockcache.observations import Tree", "of a house behind blockcache_runtime"),
        ("blockcache_runtime/export.py", "def f():\n    import torch", "export.py:2 imports torch, which a robot"),
        ("blockcache_runtime/export.py", "import safetensors", "which a robot does not have"),
        ("blockcache_runtime/errors.py", "from blockcache_runtime.export import open_export", "which is not above errors"),
        ("blockcache_lab/pages/rdt.py", "import torch", "of which pages knows nothing"),
        ("lerobot_policy_blockcache/runner.py", "import lerobot.policies", "of which runner knows nothing"),
        ("lerobot_policy_blockcache/runner.py", "import blockcache_lab", "of a house behind lerobot_policy"),
        ("blockcache_lab/studies/suites.py", "from blockcache_lab.pages import rdt", "which is not above studies"),
    ],
)  # fmt: skip
def test_a_violation_is_reported_by_name(path, text, named):
    path = path if path.startswith(("blockcache", "lerobot_")) else f"blockcache/{path}"
    (line,) = violations(TABLES, GROUPS, {path: text})
    assert named in line


@pytest.mark.parametrize(
    ("path", "text"),
    [
        ("blockcache/schedule/plan.py", "from blockcache.errors import ScheduleError"),
        ("blockcache/schedule/plan.py", "from blockcache_runtime.fields import Fields"),
        (
            "blockcache/engines/loop.py",
            "from blockcache.engines.handle import Stats\nfrom blockcache.attach import recorder",
        ),
        ("blockcache/models/adapter.py", "from blockcache.block import Block"),
        ("blockcache/cli/show.py", "def show():\n    import blockcache, torch"),
        ("blockcache/solvers/acs.py", "import numpy as np"),
        ("blockcache/report/page.py", "from blockcache.compare.methods import Method"),
        ("blockcache_runtime/export.py", "import json\nimport numpy, onnxruntime"),
        ("blockcache_lab/pages/rdt.py", "from blockcache.report.document import Table"),
        ("blockcache_lab/studies/suites.py", "import torch\nfrom blockcache.compare.methods import Method"),
    ],
)
def test_what_is_allowed_is_not_reported(path, text):
    assert violations(TABLES, GROUPS, {path: text}) == []


TABLE = """
Words before.

## Rooms of the runtime

| room | holds | knows nothing of |
|---|---|---|
| `run` | what a robot runs | `plots` |

## Rooms of the library

| room | holds | knows nothing of |
|---|---|---|
| `low`, `_low` | the `first` things | `plots` |
| `high` | more | `low.names`, `torch` |

## Rooms of the plugin

| room | holds | knows nothing of |
|---|---|---|
| `type` | what LeRobot finds | `torch` |

## Rooms of the laboratory

| room | holds | knows nothing of |
|---|---|---|
| `study` | proof | `blockcache.high`, `plots` |

- `plots`: `matplotlib`

Words behind, with | `a` | bar |.
"""
MODULES = {
    "blockcache_runtime/run.py": "",
    "blockcache/low/values.py": "",
    "blockcache/low/names/a.py": "",
    "blockcache/_low.py": "",
    "blockcache/high/__init__.py": "",
    "lerobot_policy_blockcache/type.py": "",
    "blockcache_lab/study.py": "",
}


def test_the_tables_are_read_from_the_text():
    tables, groups = read_tables(TABLE)
    assert tables == {
        "blockcache_runtime": [Row(("run",), ("plots",))],
        "blockcache": [Row(("low", "_low"), ("plots",)), Row(("high",), ("low.names", "torch"))],
        "lerobot_policy_blockcache": [Row(("type",), ("torch",))],
        "blockcache_lab": [Row(("study",), ("blockcache.high", "plots"))],
    }
    assert groups == {"plots": ["matplotlib"]}
    assert lies(tables, groups, MODULES) == []
    with pytest.raises(AssertionError, match="no table with the columns room, holds, knows nothing of"):
        read_tables("## Rooms of the library\n\n| a | b |\n|---|---|")
    with pytest.raises(AssertionError, match="under 'Rooms of the laboratory'"):
        read_tables(TABLE.replace("Rooms of the laboratory", "Other rooms"))
    with pytest.raises(AssertionError, match="`high` has an exception; solve its cause"):
        read_tables(TABLE.replace("`low.names`,", "`low` (except `low.names`),"))


def test_an_order_that_is_turned_round_is_another_table():
    tables, groups = read_tables(TABLE)
    sources = {"blockcache/high.py": "import blockcache._low"}
    assert violations(tables, groups, sources) == []
    turned = {**tables, "blockcache": tables["blockcache"][::-1]}
    (line,) = violations(turned, groups, sources)
    assert line == "blockcache/high.py:1 imports blockcache._low, which is not above high"


@pytest.mark.parametrize(
    ("sources", "said"),
    [
        ({"blockcache/low/values.py": "import torch"}, "blockcache/high.py pulls in torch through blockcache.low.values"),
        ({"blockcache/low/values.py": "from blockcache.low import names", "blockcache/low/names.py": ""},
         "blockcache/high.py pulls in blockcache.low.names through blockcache.low.values"),
        ({"blockcache/low/__init__.py": "import torch", "blockcache/low/values.py": ""},
         "blockcache/high.py pulls in torch through blockcache.low,"),
        ({"blockcache/low/values.py": "import blockcache._low",
          "blockcache/_low.py": "try:\n    import torch.nn\nfinally:\n    pass"},
         "blockcache/high.py pulls in torch.nn through blockcache.low.values -> blockcache._low"),
        ({"blockcache/low/values.py": "from blockcache_runtime import run", "blockcache_runtime/run.py": "import torch"},
         "blockcache/high.py pulls in torch through blockcache.low.values -> blockcache_runtime.run"),
    ],
)  # fmt: skip
def test_what_is_pulled_in_counts_to_its_end(sources, said):
    tables, groups = read_tables(TABLE)
    found = violations(tables, groups, {"blockcache/high.py": "from blockcache.low import values", **sources})
    (line,) = [line for line in found if line.startswith("blockcache/high.py")]
    assert line.startswith(said)
    assert line.endswith("of which high knows nothing")


@pytest.mark.parametrize(
    "text",
    [
        "def f():\n    import torch",
        "class A:\n    def f(self):\n        import torch",
        "from typing import TYPE_CHECKING\nif TYPE_CHECKING:\n    import torch",
    ],
)
def test_what_is_not_run_at_import_is_not_pulled_in(text):
    sources = {"blockcache/high.py": "from blockcache.low import values", "blockcache/low/values.py": text}
    assert violations(*read_tables(TABLE), sources) == []


def test_another_house_is_looked_into_as_well():
    sources = {
        "blockcache_lab/study.py": "from blockcache.low import values",
        "blockcache/low/values.py": "import blockcache_runtime.run",
        "blockcache_runtime/run.py": "import matplotlib.figure",
    }
    tables, groups = read_tables(TABLE)
    found = violations(tables, groups, sources)
    assert "blockcache_runtime/run.py:1 imports matplotlib.figure, which a robot does not have" in found
    assert any(line.startswith("blockcache_lab/study.py pulls in matplotlib.figure through") for line in found)
    (line,) = violations(tables, groups, {"blockcache_lab/study.py": "def f():\n    import blockcache.high"})
    assert line == "blockcache_lab/study.py:2 imports blockcache.high, of which study knows nothing"


@pytest.mark.parametrize(
    ("old", "new", "said"),
    [
        ("`high`", "`high`, `attic`", "the table has the room attic, which does not exist"),
        ("`high`", "`high`, `low`", "the table has the room low twice"),
        ("`torch`", "`trch`", "names trch, which is no room, no group and no installed library"),
        ("`torch`", "`plotz`", "names plotz, which is no room"),
        ("`torch`", "`high`", "knows nothing of itself"),
        ("`low.names`", "`low.nmes`", "names low.nmes, which is no room"),
        ("`blockcache.high`", "`blockcache.hihg`", "names blockcache.hihg, which is no room"),
        ("`run`", "`walk`", "the table has the room walk, which does not exist"),
        ("`matplotlib`", "`matplotlip`", "the group plots has matplotlip, which no extra"),
    ],
)
def test_a_table_that_lies_is_told_so(old, new, said):
    assert any(said in line for line in lies(*read_tables(TABLE.replace(old, new, 1)), MODULES))
