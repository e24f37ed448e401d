"""Functions that other rooms use, and methods of public classes, say what each of their arguments is.

Demanded of all four houses: where a room imports a public function from a module of another room (a module's room is the
second part of its dotted name; examples are a room, too), or `blockcache.__all__` names it, its docstring has a section
`Args:` with an entry `name: what it is` for every argument, and for nothing else. A function that a package imports from one
of its modules, for others to import from the package, is followed to where it is defined.

The same is demanded of the public methods of classes that `blockcache.__all__` names and of `Port`, which every family
subclasses, with the bases of each. A method without a docstring that overrides another has the other's.
"""

import ast
import re
from pathlib import Path

import blockcache

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
                yield from gaps(f"{module}.{node.name}", arguments(node), documented(node))


def gaps(called, has, says):
    yield from (f"{called} does not say what {name} is" for name in has if name not in says)
    yield from (f"{called} has no argument {name}" for name in says if name not in has)


def undocumented_methods(sources, classes):
    """The same of the public methods of classes, given as (module, name) from where they may be imported."""
    trees = {module: ast.parse(text) for module, text in sources.items()}
    for called in classes:
        found = list(lineage(trees, *called))
        for place, (module, line) in enumerate(found):
            above = {getattr(node, "name", None) for _, base in found[place + 1 :] for node in base.body}
            for node in line.body:
                if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef) and not node.name.startswith("_"):
                    alone = any(ast.unparse(item) == "staticmethod" for item in node.decorator_list)
                    if ast.get_docstring(node) is not None or node.name not in above:
                        has = arguments(node)[0 if alone else 1 :]
                        yield from gaps(f"{module}.{line.name}.{node.name}", has, documented(node))


def lineage(trees, module, name):
    """A class and all that it is made from: (module, definition) of each."""
    module, name = defined_at(trees, module, name)
    for node in trees[module].body:
        if isinstance(node, ast.ClassDef) and node.name == name:
            yield module, node
            for base in node.bases:
                if isinstance(base, ast.Name):
                    yield from lineage(trees, module, base.id)


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


def test_methods_of_public_classes_say_what_each_argument_is():
    sources = dict(modules())
    public = [(blockcache._HOME[name], name) for name in blockcache.__all__ if name in blockcache._HOME]
    assert {("blockcache.solvers", "Recording"), ("blockcache.schedule", "Schedule")} <= set(public)
    assert list(undocumented_methods(sources, [*public, ("blockcache.models.port", "Port")])) == []


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


METHODS = """
from house.room.maths import Base as Root

class Base:
    def scaled(self, factor):
        '''Larger.'''

    def __call__(self, factor): ...

class Scale(Root):
    def scaled(self, factor): ...

    @staticmethod
    def load(path): ...

    @classmethod
    def made(cls, of):
        '''One.

        Args:
            of: What it is made of.
        '''
"""


def test_methods_are_followed_to_their_bases():
    def found(text):
        sources = {"house.room.maths": text, "house.room": "from house.room.maths import Scale"}
        return list(undocumented_methods(sources, [("house.room", "Scale")]))

    lost = [
        "house.room.maths.Scale.load does not say what path is",
        "house.room.maths.Base.scaled does not say what factor is",
    ]
    assert found(METHODS) == lost
    said = METHODS.replace("'''Larger.'''", "'''Larger.\n\n        Args:\n            factor: By which.\n        '''")
    assert found(said) == lost[:1]
    assert found(METHODS.replace("def scaled(self, factor): ...", "def grown(self, factor): ..."))[0] == (
        "house.room.maths.Scale.grown does not say what factor is"
    )
    assert found(METHODS.replace("of: What", "off: What"))[1:3] == [
        "house.room.maths.Scale.made does not say what of is",
        "house.room.maths.Scale.made has no argument off",
    ]
