"""What methods are called in tables and pictures, by their names in files. Knows nothing of torch or of pages."""

from __future__ import annotations

from blockcache.compare.methods import method_named


def family(name: str) -> str:
    """See `Method.family`."""
    return method_named(name).family


def kind_of(name: str) -> str:
    """See `Method.kind`."""
    return method_named(name).kind


def label(name: str) -> str:
    """See `Method.label`."""
    return method_named(name).label
