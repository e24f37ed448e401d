"""Made-up tasks with what they show, and demonstrations of them, for tests of training."""

from importlib.metadata import EntryPoint

import numpy as np

from blockcache.tasks import TaskEntry, TaskSpec

TOKENS = TaskEntry(
    TaskSpec(
        "tokens",
        obs_dim=0,
        action_dim=3,
        max_steps=9,
        success="none",
        extra="none",
        inputs={
            "state_tokens": (3,),
            "lang_tokens": (2, 4),
            "lang_attn_mask": (2,),
            "img_tokens": (3, 5),
            "action_mask": (3,),
            "ctrl_freqs": (1,),
        },
    ),
    "nowhere:none",
)
ROW = TaskEntry(TaskSpec("row", obs_dim=4, action_dim=2, max_steps=9, success="none", extra="none"), "nowhere:none")
EPISODES, LENGTH = 5, 8


def register(monkeypatch):
    points = [
        EntryPoint(entry.spec.name, f"{__name__}:{name}", "blockcache.tasks")
        for name, entry in (("TOKENS", TOKENS), ("ROW", ROW))
    ]
    monkeypatch.setattr(
        "blockcache.tasks.base.entry_points", lambda group: points if group == "blockcache.tasks" else []
    )


def token_demos(**changes):
    """An action is what the first image token shows in an episode. Its third number is not the robot's, whatever the file
    has there, and the second word is hidden."""
    rng = np.random.default_rng(0)
    steps = EPISODES * LENGTH
    shown = np.repeat(rng.uniform(-0.8, 0.8, size=(EPISODES, 5)), LENGTH, axis=0)
    words = rng.normal(size=(steps, 2, 4))
    images = rng.normal(size=(steps, 3, 5)) * 0.1
    images[:, 0] = shown
    action = np.concatenate((shown[:, :2], np.full((steps, 1), 7.0)), axis=1)
    return {
        "state_tokens": rng.normal(size=(steps, 3)) * 0.1,
        "lang_tokens": words,
        "lang_attn_mask": np.tile([True, False], (steps, 1)),
        "img_tokens": images,
        "action_mask": np.tile([1, 1, 0], (steps, 1)),
        "ctrl_freqs": np.full((steps, 1), 20),
        "action": action,
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
