"""Which family a policy is of. Families are asked in turn, those of other packages first.

A family is a function `claim(policy)` that gives back a Port, or a phrase that says what the policy lacks; it raises
PolicyError where it recognises the policy and cannot use it as it is. Other packages register theirs under the entry
point group `blockcache.families`.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from functools import cache
from importlib import import_module
from importlib.metadata import EntryPoint, entry_points
from typing import Any, TypeAlias

from blockcache.errors import PolicyError, in_one_line
from blockcache.models.port import Port

Claim: TypeAlias = Callable[[Any], Port | str]
_OWN = {"dp-t": "dpt", "dit": "dit", "rdt": "rdt"}
"""The package's own families by name, each imported when it is asked: code that uses a port knows no family."""


def port_of(policy: Any) -> Port:
    """The port of a policy object (a port is its own), or one sentence that says what each family missed.

    Args:
        policy: the object, of any family.
    """
    if isinstance(policy, Port):
        return policy
    missed: list[str] = []
    refusals: list[PolicyError] = []
    for name, load in _families():
        try:
            found = load()(policy)
        except PolicyError as error:
            refusals.append(error)
            continue
        except Exception as error:  # a broken family harms only policies that need it
            found = f"the family itself is broken ({in_one_line(error)})"
        if isinstance(found, Port):
            return found
        missed.append(f"{name}: {found}")
    if refusals:  # a family knows it, and says why it cannot be used
        raise refusals[0]
    raise PolicyError(
        f"{type(policy).__name__} is no diffusion policy that blockcache knows ({'; '.join(missed)}); "
        "other families can register under the entry point group 'blockcache.families'"
    )


def _families() -> Iterator[tuple[str, Callable[[], Claim]]]:
    for entry in _entries(entry_points):
        yield entry.name, entry.load
    for name, module in _OWN.items():
        yield name, lambda module=module: import_module(f"blockcache.models.{module}.port").claim  # type: ignore[misc]


@cache
def _entries(find: Callable[..., Iterable[EntryPoint]]) -> tuple[EntryPoint, ...]:
    """Looked up once: reading what every installed package offers takes 10 ms."""
    return tuple(find(group="blockcache.families"))
