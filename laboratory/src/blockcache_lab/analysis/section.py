"""What every section of an analysis is: a frozen value of arrays with named axes and of plain fields, checked when made.

An array is declared as `Annotated[Array, Axes("blocks", "steps")]`. Axes of one name have one length, and where a field of
that name is a tuple, one entry for each of its items. Knows no section, no file and nothing of torch.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, fields
from typing import Any, ClassVar, TypeAlias, get_args

import numpy as np
from numpy.typing import NDArray

from blockcache.errors import BlockcacheError, short
from blockcache.files import Fields, keys_of

Array: TypeAlias = NDArray[np.floating[Any]]
"""Single precision once it is in a section."""
Marks: TypeAlias = NDArray[np.bool_]
Counts: TypeAlias = NDArray[np.int64]

_TYPES = {Array: np.dtype(np.float32), Marks: np.dtype(np.bool_), Counts: np.dtype(np.int64)}


REGISTERED: dict[str, type[AnalysisSection]] = {}
"""Every kind of section by name, in the order in which they are made."""


class AnalysisError(BlockcacheError):
    """An analysis that cannot be made as asked, or that is not what it should be."""


class Axes:
    """For `Annotated`: the names of an array's axes. `blocks` and `steps` are those of the policy."""

    def __init__(self, *names: str) -> None:
        self.names = names


@dataclass(frozen=True, eq=False)
class AnalysisSection:
    """One analysis. `name` is what it is called in files and on the command line; making the class registers it."""

    name: ClassVar[str]

    def __init_subclass__(cls, *, name: str) -> None:
        cls.name = name
        REGISTERED[name] = cls

    def __post_init__(self) -> None:
        sizes: dict[str, int] = {}
        for field in fields(self):
            value = getattr(self, field.name)
            if isinstance(value, list | tuple):
                object.__setattr__(self, field.name, tuple(value))
                sizes[field.name] = len(value)
        for name, (dtype, axes) in arrays_of(type(self)).items():
            array = _checked(f"the {self.name}'s {name}", getattr(self, name), dtype)
            if array.ndim != len(axes) or any(
                sizes.setdefault(axis, size) != size for axis, size in zip(axes, array.shape, strict=True)
            ):
                known = [f"{axis}={sizes[axis]}" if axis in sizes else axis for axis in axes]
                raise AnalysisError(f"the {self.name}'s {name} has shape {array.shape}, expected ({', '.join(known)})")
            object.__setattr__(self, name, array)
        self.check_sizes(sizes)

    def check_sizes(self, sizes: Mapping[str, int]) -> None:
        """Refuse what arrays of the right shape may still get wrong; `sizes` are the axes' lengths."""

    def fits(self, blocks: int, steps: int) -> bool:
        """Whether the axes of these names have as many entries as the policy has blocks and steps."""
        expected = {"blocks": blocks, "steps": steps}
        return all(
            size == expected.get(axis, size)
            for name, (_, axes) in arrays_of(type(self)).items()
            for axis, size in zip(axes, getattr(self, name).shape, strict=True)
        )

    def plain(self) -> dict[str, Any]:
        """Every field that is no array, in JSON types."""
        arrays = arrays_of(type(self))
        values = {field.name: getattr(self, field.name) for field in fields(self) if field.name not in arrays}
        return {name: list(value) if isinstance(value, tuple) else value for name, value in values.items()}


def arrays_of(section: Any) -> dict[str, tuple[np.dtype[Any], tuple[str, ...]]]:
    """The arrays of a kind of section by name: what they hold, and their axes."""
    declared = {name: (*get_args(kind), None, None) for name, kind in keys_of(section).items()}
    return {name: (_TYPES[held], axes.names) for name, (held, axes, *_) in declared.items() if isinstance(axes, Axes)}


def plain_fields(section: Any) -> Fields:
    """What the other fields of a kind of section look like in a file."""
    return Fields({name: kind for name, kind in keys_of(section).items() if name not in arrays_of(section)})


def _checked(what: str, value: Any, dtype: np.dtype[Any]) -> NDArray[Any]:
    array = np.asarray(value)
    wanted = {"f": "fiu", "i": "iu", "b": "b"}[dtype.kind]
    if array.dtype.kind not in wanted:
        raise AnalysisError(f"{what} holds {array.dtype}, expected {dtype}")
    with np.errstate(over="ignore"):
        found = np.ascontiguousarray(array, dtype=dtype)
    if dtype.kind == "f" and not np.isfinite(found).all():
        raise AnalysisError(f"{what} holds NaN, infinity or what single precision cannot hold; analyse again")
    return found


def one_of(what: str, name: str, known: tuple[str, ...]) -> int:
    """The place of a name among those that are there, or one sentence."""
    if name not in known:
        raise AnalysisError(f"no {what} {short(name)} here, there are {', '.join(known)}")
    return known.index(name)
