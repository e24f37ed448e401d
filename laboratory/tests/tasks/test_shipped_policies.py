"""The policies that ship with the library and the laboratory, and the tasks of both."""

import numpy as np

import blockcache as bc
from blockcache.models.policy_files import shipped_policies
from blockcache.tasks import task_names, task_spec


def test_every_task_has_a_shipped_policy_that_acts_on_what_it_shows():
    shipped = [name for name in shipped_policies() if "/" not in name]
    scenes = ("lift-mh", "can-mh", "square-mh", "tool-hang-ph", "transport-ph")
    arms = {f"robosuite-{name}" for name in scenes}
    # whoever wants one of these trains it: docs/shipped-policies.md
    assert set(task_names()) - set(shipped) == arms
    for name in shipped:
        policy = bc.load_policy(name)
        spec = task_spec(policy.config.task)
        assert name.startswith(spec.name)
        shown = {key: np.ones((1, policy.n_obs_steps, *shape), np.float32) for key, shape in spec.shapes.items()}
        action = policy.predict_action(shown if spec.inputs else shown["obs"])["action"]
        assert action.shape == (1, policy.n_action_steps, spec.action_dim)
