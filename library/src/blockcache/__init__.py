"""Make transformer diffusion policies fast without training them again.

policy    = bc.load_policy("pusht")
recording = bc.calibrate(policy, observations)
schedule  = bc.solve(recording, updates=10, union=5)
with bc.accelerate(policy, schedule) as fast:
    action = fast.predict_action(obs)["action"]
"""

from importlib import import_module
from typing import TYPE_CHECKING, Any

from blockcache._version import __version__

if TYPE_CHECKING:
    from blockcache.attach.recorder import calibrate
    from blockcache.block import Block
    from blockcache.compare.checker import check
    from blockcache.compare.tuned import Tuned, save_tuned
    from blockcache.compare.tuner import tune
    from blockcache.engines import Acceleration, Stats, accelerate, export_policy, handle_of, open_export
    from blockcache.errors import BlockcacheError
    from blockcache.fingerprint import Fingerprint
    from blockcache.fitting import Effort, fit_sampler, place_steps
    from blockcache.models.loading import load_policy, save_policy
    from blockcache.results.check import Check
    from blockcache.results.tuning import Tuning
    from blockcache.samplers import ChosenSampler
    from blockcache.schedule import Schedule
    from blockcache.solvers import Recording, TeaCacheRule, fit_teacache, solve
    from blockcache.solvers.presets import published_names, published_schedule

__all__ = [
    "Acceleration",
    "Block",
    "BlockcacheError",
    "Check",
    "ChosenSampler",
    "Effort",
    "Fingerprint",
    "Recording",
    "Schedule",
    "Stats",
    "TeaCacheRule",
    "Tuned",
    "Tuning",
    "__version__",
    "accelerate",
    "calibrate",
    "check",
    "export_policy",
    "fit_sampler",
    "fit_teacache",
    "handle_of",
    "load_policy",
    "open_export",
    "place_steps",
    "published_names",
    "published_schedule",
    "save_policy",
    "save_tuned",
    "solve",
    "tune",
]

# Imported at first use: torch takes seconds, which `blockcache show` and the reports need not wait for.
_HOMES = {
    "blockcache.attach.recorder": ("calibrate",),
    "blockcache.block": ("Block",),
    "blockcache.compare.checker": ("check",),
    "blockcache.compare.tuned": ("Tuned", "save_tuned"),
    "blockcache.compare.tuner": ("tune",),
    "blockcache.engines": ("Acceleration", "Stats", "accelerate", "export_policy", "handle_of", "open_export"),
    "blockcache.fitting": ("Effort", "fit_sampler", "place_steps"),
    "blockcache.models.loading": ("load_policy", "save_policy"),
    "blockcache.results.check": ("Check",),
    "blockcache.results.tuning": ("Tuning",),
    "blockcache.samplers": ("ChosenSampler",),
    "blockcache.schedule": ("Schedule",),
    "blockcache.solvers.presets": ("published_names", "published_schedule"),
    "blockcache.solvers": ("Recording", "TeaCacheRule", "fit_teacache", "solve"),
    "blockcache.errors": ("BlockcacheError",),
    "blockcache.fingerprint": ("Fingerprint",),
}
_HOME = {name: module for module, names in _HOMES.items() for name in names}
_MODULES = ("samplers", "schedule", "solvers", "tasks")  # as in bc.solvers.adaptive


def __getattr__(name: str) -> Any:
    if name in _MODULES:
        return import_module(f"{__name__}.{name}")
    if name not in _HOME:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    value = globals()[name] = getattr(import_module(_HOME[name]), name)
    return value


def __dir__() -> list[str]:
    return sorted({*globals(), *__all__})
