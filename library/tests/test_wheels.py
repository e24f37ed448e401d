"""What each house's wheel would hold, and how large it would be; nothing is built. Needs all houses' sources, imports none.

hatchling packs everything under `packages` that .gitignore does not name, and beside it METADATA (the README), the licence
and RECORD, a line a file.
"""

import re
import zlib
from functools import cache

import pytest

from repository import ROOT

PACKAGES = {
    "runtime": "blockcache_runtime",
    "library": "blockcache",
    "plugin": "lerobot_policy_blockcache",
    "laboratory": "blockcache_lab",
}
IGNORED = {"__pycache__"}
ASSETS = {"library", "laboratory"}
ENTRY = 200  # bytes of a zip for a file's name, twice, and its line in RECORD


@cache
def packed(house):
    """By the name in the wheel."""
    package = ROOT / house / "src" / PACKAGES[house]
    files = (path for path in package.rglob("*") if path.is_file() and not IGNORED & set(path.parts))
    return {path.relative_to(package.parent).as_posix(): path for path in files}


def size(house):
    """Bytes of the wheel, as zip compresses by default; the README and the licence are in it too."""
    files = [
        *packed(house).values(),
        ROOT / house / "README.md",
        ROOT / house / "LICENSE",
        ROOT / house / "pyproject.toml",
    ]
    return sum(len(zlib.compress(path.read_bytes(), 6)) + ENTRY for path in files)


@pytest.mark.parametrize("house", PACKAGES)
def test_a_wheel_holds_one_package_and_nothing_is_added_or_left_out(house):
    text = (ROOT / house / "pyproject.toml").read_text()
    section = re.search(r"^\[tool\.hatch\.build\.targets\.wheel\]\n(.*?)(?=^\[|\Z)", text, re.DOTALL | re.MULTILINE)[1]
    assert section.split("\n", 1) == [f'packages = ["src/{PACKAGES[house]}"]', ""]
    others = re.findall(r"^\[(tool\.hatch\.build.*)\]", text, re.MULTILINE)
    assert others == ["tool.hatch.build.targets.wheel"]
    assert f"{PACKAGES[house]}/__init__.py" in packed(house)
    assert f"{PACKAGES[house]}/py.typed" in packed(house)


@pytest.mark.parametrize("house", PACKAGES)
def test_beside_code_there_are_assets_only(house):
    rest = {name for name in packed(house) if not name.endswith((".py", "/py.typed"))}
    assert {name.split("/")[1] for name in rest} == ({"assets"} if house in ASSETS else set())


def test_the_library_has_the_policy_of_push_t_and_the_laboratory_the_others():
    def policies(house):
        return {name.split("/")[3] for name in packed(house) if name.split("/")[1:3] == ["assets", "policies"]}

    assert policies("library") == {"pusht"}
    assert len(policies("laboratory")) > 5
    assert "pusht" not in policies("laboratory")


@pytest.mark.parametrize(("house", "most"), [("runtime", 150_000), ("library", 9_000_000)])
def test_a_wheel_stays_small(house, most):
    assert most / 3 < size(house) < most
