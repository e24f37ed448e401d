"""Running an exported policy on a robot: numpy and onnxruntime, nothing else.

policy, history = open_export("policy.onnx"), History(2)
action = policy.predict_action(history.push(observation))["action"][0]
"""

from importlib import import_module
from typing import TYPE_CHECKING, Any

from blockcache_runtime._version import __version__

if TYPE_CHECKING:
    from blockcache_runtime.export import ExportedPolicy, open_export
    from blockcache_runtime.history import History
    from blockcache_runtime.observation_log import ObservationLog
    from blockcache_runtime.player import Player

__all__ = ["ExportedPolicy", "History", "ObservationLog", "Player", "__version__", "open_export"]

_HOMES = {
    "ExportedPolicy": "export",
    "History": "history",
    "ObservationLog": "observation_log",
    "Player": "player",
    "open_export": "export",
}


def __getattr__(name: str) -> Any:
    """Imported at first use: whoever needs the errors or the formats alone does not wait for numpy."""
    if name not in _HOMES:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return getattr(import_module(f"{__name__}.{_HOMES[name]}"), name)
