"""Tasks and demonstrations of them, for tests of training."""

from importlib.metadata import EntryPoint

import numpy as np

from blockcache.tasks import TaskEntry, TaskSpec
from toy_rdt_task import SPEC as TOKENS

ROW = TaskEntry(TaskSpec("row", obs_dim=4, action_dim=2, max_steps=9, success="none", extra="none"), "nowhere:none")
EPISODES, LENGTH = 5, 8


def register(monkeypatch):
    """The task of rows and the toy task that RDT meets are found by their names."""
    entries = {ROW.spec.name: f"{__name__}:ROW", TOKENS.name: "toy_rdt_task:ENTRY"}
    points = [EntryPoint(name, value, "blockcache.tasks") for name, value in entries.items()]
    monkeypatch.setattr(
        "blockcache.tasks.base.entry_points", lambda group: points if group == "blockcache.tasks" else []
    )


def token_demos(**changes):
    """An action is what the first image token shows in an episode. Its fourth number is not the robot's, whatever the file
    has there, and the last words are hidden."""
    rng = np.random.default_rng(0)
    steps = EPISODES * LENGTH
    seen = {name: 0.1 * rng.normal(size=(steps, *shape)) for name, shape in TOKENS.inputs.items()}
    shown = np.repeat(rng.uniform(-0.8, 0.8, size=(EPISODES, 9)), LENGTH, axis=0)
    seen["img_tokens"][:, 0] = shown
    return {
        **seen,
        "lang_attn_mask": np.tile([True, True, True, False, False], (steps, 1)),
        "action_mask": np.tile([1, 1, 1, 0], (steps, 1)),
        "ctrl_freqs": np.full((steps, 1), 20),
        "action": np.concatenate((shown[:, :3], np.full((steps, 1), 7.0)), axis=1),
        "episode_ends": np.arange(1, EPISODES + 1) * LENGTH,
    } | changes


def row_demos(**changes):
    """An action is ten times the first two numbers of an observation and 5; nothing moves in an episode."""
    obs = np.repeat(np.random.default_rng(0).uniform(-1, 1, size=(EPISODES, 4)), LENGTH, axis=0)
    return {
        "obs": obs,
        "action": 10 * obs[:, :2] + 5,
        "episode_ends": np.arange(1, EPISODES + 1) * LENGTH,
    } | changes
