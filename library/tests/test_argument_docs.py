"""Functions that other rooms use say what each of their arguments is.

Demanded of all four houses: where a room imports a public function from a module of another room (a module's room is the
second part of its dotted name; examples are a room, too), or `blockcache.__all__` names it, its docstring has a section
`Args:` with an entry `name: what it is` for every argument, and for nothing else. A function that a package imports from one
of its modules, for others to import from the package, is followed to where it is defined.
"""

import ast
import re
from pathlib import Path

ROOT = Path(__file__).parents[2]
PLACES = ("runtime/src", "library/src", "plugin/src", "laboratory/src", "examples")
ENTRY = re.compile(r"^    \*{0,2}(\w+):", re.MULTILINE)


def undocumented(sources):
    """One line for each argument that is missing, or that there is not, in {dotted name of a module: its text}."""
    trees = {module: ast.parse(text) for module, text in sources.items()}
    used = {defined_at(trees, *name) for module, tree in trees.items() for name in imported(module, tree, trees)}
    for module, tree in trees.items():
        for node in tree.body:
            if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef) and (module, node.name) in used:
                if node.name.startswith("_") or any("overload" in ast.unparse(item) for item in node.decorator_list):
                    continue
                has, says = arguments(node), documented(node)
                yield from (f"{module}.{node.name} does not say what {name} is" for name in has if name not in says)
                yield from (f"{module}.{node.name} has no argument {name}" for name in says if name not in has)


def imported(module, tree, trees):
    """(module, name) of all that a module imports from other rooms; of `blockcache` itself these are the public names."""
    for node in ast.walk(tree):
        if isinstance(node, ast.ImportFrom) and node.module in trees and room(node.module) != room(module):
            yield from ((node.module, alias.name) for alias in node.names)


def room(module):
    return module.split(".")[:2]


def defined_at(trees, module, name):
    """Where something is defined that a module has, be it by an import from another module."""
    for node in trees[module].body:
        if isinstance(node, ast.ImportFrom) and node.module in trees:
            for alias in node.names:
                if (alias.asname or alias.name) == name and f"{node.module}.{alias.name}" not in trees:
                    return defined_at(trees, node.module, alias.name)
    return module, name


def arguments(node):
    given = node.args
    stars = [item for item in (given.vararg, given.kwarg) if item is not None]
    return [item.arg for item in [*given.posonlyargs, *given.args, *given.kwonlyargs, *stars]]


def documented(node):
    _, _, behind = (ast.get_docstring(node) or "").partition("Args:\n")
    section = re.split(r"\n(?=\S)", behind)[0]  # up to the next line that is not indented
    return ENTRY.findall(section)


def modules():
    for place in PLACES:
        for path in sorted((ROOT / place).rglob("*.py")):
            name = ".".join(path.relative_to(ROOT / place).with_suffix("").parts).removesuffix(".__init__")
            yield name if place.endswith("src") else f"examples.{name}", path.read_text()


def test_functions_that_other_rooms_use_say_what_each_argument_is():
    sources = dict(modules())
    assert {"blockcache", "blockcache_runtime.export", "blockcache_lab.cli"} <= set(sources)
    assert list(undocumented(sources)) == []


DOCUMENTED = '''
def scaled(values, factor, *more, **settings):
    """Numbers, all larger.

    Args:
        values: The numbers,
            (n,).
        factor: By which each is multiplied.
        more: Of the same length.
        settings: For the library below.

    Returns:
        these: they are no argument.
    """
'''
USE = "from house.room.maths import scaled"


def test_what_is_missing_and_what_there_is_not_are_named():
    def found(text, use=USE, at="house.other"):
        package = "from house.room.maths import scaled"
        return list(undocumented({"house.room.maths": text, "house.room": package, at: use}))

    assert found(DOCUMENTED) == []
    lost = DOCUMENTED.replace("        factor: By which each is multiplied.\n", "")
    assert found(lost) == ["house.room.maths.scaled does not say what factor is"]
    assert found(lost, use="from house.room import scaled") == found(lost)
    assert found(lost, at="house") == found(lost)
    assert found(lost, at="house.room.inner") == []  # the room itself
    assert found(lost, use="") == []
    assert found(DOCUMENTED.replace("factor: By", "scale: By")) == [
        "house.room.maths.scaled does not say what factor is",
        "house.room.maths.scaled has no argument scale",
    ]
    assert found("def scaled(values): ...") == ["house.room.maths.scaled does not say what values is"]
