"""The toy task as an RDT policy of `rdt_policies` meets it: a mapping of arrays, one moment at a time."""

import numpy as np

from blockcache.tasks import TaskEntry, TaskSpec
from toy_task import Toy

INPUTS = {"state_tokens": (4,), "lang_tokens": (5, 7), "lang_attn_mask": (5,), "img_tokens": (10, 9)}
INPUTS |= {"action_mask": (4,), "ctrl_freqs": (1,)}
SPEC = TaskSpec(
    "toy-rdt", obs_dim=0, action_dim=4, max_steps=9, success="within 0.6 of the centre", extra="toy", inputs=INPUTS
)
ENTRY = TaskEntry(SPEC, f"{__name__}:ToyRDT")


class ToyRDT(Toy):
    """What cameras see and what is asked for depends on the seed; only the first three numbers of an action count."""

    def __init__(self, spec=SPEC):
        super().__init__(spec)

    def observe(self):
        rng = np.random.default_rng(self.seed)
        return {
            "state_tokens": np.array([*self.place, 0.0], dtype=np.float32),
            "lang_tokens": rng.standard_normal((5, 7), dtype=np.float32),
            "lang_attn_mask": np.array([1, 1, 1, 0, 0], dtype=np.float32),
            "img_tokens": rng.standard_normal((10, 9), dtype=np.float32),
            "action_mask": np.array([1, 1, 1, 0], dtype=np.float32),
            "ctrl_freqs": np.array([20], dtype=np.float32),
        }

    def step(self, action):
        super().step(action[:3])


def observations(count):
    """As rollouts show them: (count, 1, ...)."""
    task, seen = ToyRDT(), []
    for seed in range(count):
        seen.append(task.reset(seed))
    return {name: np.stack([one[name] for one in seen])[:, None] for name in INPUTS}
