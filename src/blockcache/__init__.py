"""Make transformer diffusion policies fast without training them again.

policy    = bc.load_policy("pusht")
recording = bc.calibrate(policy, observations)
schedule  = bc.solve(recording, updates=10, union=5)
with bc.accelerate(policy, schedule) as fast:
    action = fast.predict_action(obs)["action"]
"""

from blockcache._version import __version__
from blockcache.blocks import Block
from blockcache.engines import Acceleration, Stats, accelerate, export_policy, open_export
from blockcache.errors import BlockcacheError
from blockcache.fingerprint import Fingerprint
from blockcache.policies import load_policy, save_policy
from blockcache.presets import published_names, published_schedule
from blockcache.recorder import calibrate
from blockcache.recording import Recording
from blockcache.schedule import Schedule
from blockcache.solvers import solve
from blockcache.teacache import Rule, fit_teacache

__all__ = [
    "Acceleration",
    "Block",
    "BlockcacheError",
    "Fingerprint",
    "Recording",
    "Rule",
    "Schedule",
    "Stats",
    "__version__",
    "accelerate",
    "calibrate",
    "export_policy",
    "fit_teacache",
    "load_policy",
    "open_export",
    "published_names",
    "published_schedule",
    "save_policy",
    "solve",
]
