"""Libraries that are not always there: one check, one sentence, and the extra that brings them. Imports nothing heavy."""

from __future__ import annotations

import importlib
import re
from importlib.util import find_spec

from blockcache.errors import BlockcacheError

_PACKAGES = {"PIL": "Pillow", "cv2": "OpenCV"}  # where a library is known by another name than its module's


def installed(module: str) -> bool:
    """Whether a top-level module is there; it is not imported.

    Args:
        module: Its name, such as "onnxruntime".
    """
    return find_spec(module) is not None


def installed_version(module: str) -> str | None:
    """The version that the module says it has: ONNX Runtime is also installed under names like onnxruntime-gpu.

    Args:
        module: The name by which it is imported, such as "onnxruntime".
    """
    try:
        return str(importlib.import_module(module).__version__)
    except (ImportError, AttributeError):  # AttributeError: an empty directory of that name
        return None


def how_to_install(distribution: str, extra: str | None = None) -> str:
    """What brings a library, and where it is said how to install it: nothing is published on a package index.

    Args:
        distribution: Such as "blockcache" or "blockcache-lab".
        extra: Of the distribution, if it is one.
    """
    what = f'"{distribution}[{extra}]"' if extra else f'"{distribution}"'
    return f"{what}, which docs/start.md says how to install from a clone or a wheel"


def require(
    module: str,
    extra: str | None,
    what_for: str,
    *,
    error: type[BlockcacheError],
    minimum: tuple[int, int] | None = None,
) -> None:
    """Refuse a missing or an old library before any work is done for it, naming the extra that brings it.

    Args:
        module: What would be imported, such as "PIL".
        extra: The extra of blockcache that brings it; None for what comes with blockcache itself.
        what_for: Who needs it, as the subject of a sentence: "a picture", "the onnx engine".
        error: The kind of error to raise.
        minimum: The oldest version that will do; None takes any, and imports nothing.
    """
    name = _PACKAGES.get(module, module)
    wanted = "it" if minimum is None else f"version {'.'.join(map(str, minimum))} or newer"
    hint = f"{wanted} comes with {how_to_install('blockcache', extra)}"
    found = installed_version(module) if minimum else installed(module)
    if not found:
        raise error(f"{what_for} needs {name}, which is not installed; {hint}")
    if minimum and tuple(map(int, re.findall(r"\d+", str(found))[:2])) < minimum:
        raise error(f"{what_for} needs a newer {name} than the installed {found}; {hint}")
