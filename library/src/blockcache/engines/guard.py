"""Notices that a policy changed after an engine had copied it: cheaply at every call, and wholly when asked to."""

from __future__ import annotations

from itertools import cycle
from typing import Literal, NoReturn

from torch import Tensor

from blockcache.engines.structure import Structure
from blockcache.errors import StaleError, StaleWeightsError
from blockcache.models.port import Port
from blockcache.models.weights import checksum, memory

PARTS = 128
"""Every call reads one part of this many; so after as many calls every byte was read."""
_WORDS: dict[int, Literal["B", "H", "I", "Q"]] = {1: "B", 2: "H", 4: "I"}


class Guard:
    """Remembers a policy as it is now.

    At every call: mode, sampler and sizes, a share of the structure (see `Structure`), where each tensor lies, what torch
    counts of its edits, one number of each matrix, and the next part of the bytes. The counters see every edit that torch
    knows of, `load_state_dict` and optimisers among them. What goes around it through `.data` is seen at once if it changes
    a whole matrix on the CPU, as a switch to EMA weights does, and else when its part is read.
    """

    def __init__(self, port: Port) -> None:
        self._port, self._settings = port, port.settings()
        self._structure = Structure(
            port.policy, port.module, port.entry, port.parts_outside_program, port.scratch_attributes
        )
        self._weights = WeightsGuard(self._structure.tensors)

    def check(self) -> None:
        """What every call can afford."""
        self._check_settings()
        self._structure.check()
        self._weights.check()

    def check_everything(self) -> None:
        """Every byte and every setting."""
        self._check_settings()
        self._structure.check_everything()
        self._weights.check_everything()

    def _check_settings(self) -> None:
        self._port.mode.check()
        if self._port.settings() != self._settings:
            raise StaleError(
                "the policy's sampler or sizes changed after this engine was made of it; disable() and accelerate again"
            )


class WeightsGuard:
    """Tells whether any of these tensors changed. Several threads may ask at once."""

    def __init__(self, tensors: list[Tensor]) -> None:
        self._tensors = tensors
        self._counted = [tensor for tensor in tensors if not tensor.is_inference()]  # others have no counter
        self._versions, self._places = self._count(), self._locate()
        bytes_of = [memory(tensor) for tensor in tensors]
        both = [*zip(tensors, bytes_of, strict=True)]
        self._probes = [
            _probe(tensor.element_size(), held)
            for tensor, held in both
            if held.is_cpu and len(held) and tensor.ndim > 1
        ]
        self._values = self._look()
        self._parts = _parts(bytes_of)
        self._sums = [checksum(part) for part in self._parts]
        self._turn = cycle(range(PARTS))
        self._differing: int | None = None

    def check(self) -> None:
        """All counters, a number of each tensor, and the part of the bytes whose turn it is."""
        # in this order: bytes are worth a look only while the tensors are where they were
        if self._count() != self._versions or self._locate() != self._places or self._look() != self._values:
            _complain()
        self._check_part(next(self._turn) if self._differing is None else self._differing)

    def check_everything(self) -> None:
        if self._count() != self._versions or self._locate() != self._places:
            _complain()
        for part in range(PARTS):
            self._check_part(part)

    def _check_part(self, part: int) -> None:
        if checksum(self._parts[part]) != self._sums[part]:
            self._differing = part  # looked at again by the next call, which must not find another part in order
            _complain()
        self._differing = None

    def _count(self) -> list[int]:
        return [tensor._version for tensor in self._counted]

    def _locate(self) -> list[int]:
        return [*map(Tensor.data_ptr, self._tensors)]

    def _look(self) -> list[int]:
        return [words[index] for words, index in self._probes]


def _probe(size: int, held: Tensor) -> tuple[memoryview, int]:
    """A tensor's memory as whole numbers, so that NaN equals itself, and the place of one that is no corner."""
    words = held.numpy().data.cast(_WORDS.get(size, "Q"))
    return words, int(0.618 * len(words))


def _parts(pieces: list[Tensor]) -> list[list[Tensor | memoryview]]:
    """All the bytes in `PARTS` parts of one size; a part may begin and end within a tensor, and the last may be short."""
    size = -(-sum(map(len, pieces)) // PARTS)
    parts: list[list[Tensor | memoryview]] = [[] for _ in range(PARTS)]
    place = 0
    for piece in pieces:
        start = 0
        while start < len(piece):
            number, taken = divmod(place + start, size)
            stop = start + size - taken
            share = piece[start:stop]
            parts[number].append(
                share.numpy().data if share.is_cpu else share
            )  # what lies elsewhere is fetched in its turn
            start = stop
        place += len(piece)
    return parts


def _complain() -> NoReturn:
    raise StaleWeightsError(
        "the policy's weights changed after this engine had copied them; disable() and accelerate again"
    )
