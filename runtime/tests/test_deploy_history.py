"""The history that a robot keeps, against what rollouts feed a policy."""

import numpy as np
import pytest

from blockcache.errors import ObservationError
from blockcache.tasks import rollout
from blockcache_runtime import History
from toy_task import Toy


class OneBuffer(Toy):
    """Observes into the same array every time, as drivers do."""

    def __init__(self):
        super().__init__()
        self.buffer = np.empty(5)

    def observe(self):
        self.buffer[:] = super().observe()
        return self.buffer


@pytest.mark.parametrize("n_obs_steps", [1, 2, 3, 5])
@pytest.mark.parametrize("n_action_steps", [1, 2, 4])
def test_a_history_is_what_rollouts_feed(n_obs_steps, n_action_steps):
    act = lambda observed, chunk: np.sin(observed[:, -1:, :3] + np.arange(n_action_steps)[:, None] + chunk)  # noqa: E731
    fed = []
    rollout(
        Toy,
        lambda observed, chunk: (fed.append(observed), act(observed, chunk))[1],
        [3],
        n_obs_steps=n_obs_steps,
        n_action_steps=n_action_steps,
    )
    task, history = OneBuffer(), History(n_obs_steps)
    history.push(np.zeros(2))
    history.reset()
    seen = history.push(task.reset(3))
    for chunk, expected in enumerate(fed):
        assert (seen.dtype, seen.shape) == (expected.dtype, (1, n_obs_steps, 5))
        np.testing.assert_array_equal(seen, expected)
        for action in act(seen, chunk)[0]:
            if not task.done:
                task.step(action)
                seen = history.push(task.observe())
    assert task.done


def test_a_history_of_named_arrays():
    history = History(3)
    first = history.push({"arm": [1, 2], "camera": np.zeros((4, 4, 3), dtype=np.uint8)})
    assert {name: array.shape for name, array in first.items()} == {"arm": (1, 3, 2), "camera": (1, 3, 4, 4, 3)}
    second = history.push({"camera": np.full((4, 4, 3), 255, dtype=np.uint8), "arm": [3, 4]})
    np.testing.assert_array_equal(second["arm"], [[[1, 2], [1, 2], [3, 4]]])
    np.testing.assert_array_equal(first["arm"], [[[1, 2]] * 3])
    assert second["camera"].dtype == np.uint8
    assert second["camera"][0, :, 0, 0, 0].tolist() == [0, 0, 255]


def test_a_camera_s_bytes_and_fractions_do_not_mix_and_numbers_do():
    history = History(2)
    history.push({"arm": np.zeros(2, np.uint8), "camera": np.zeros((3, 4, 4), np.uint8)})
    with pytest.raises(ObservationError, match=r"\(3, 4, 4, 'float'\).*expected .*\(3, 4, 4, 'uint8'\)"):
        history.push({"arm": np.zeros(2), "camera": np.ones((3, 4, 4))})
    seen = history.push({"arm": np.full(2, 0.5), "camera": np.full((3, 4, 4), 255, np.uint8)})
    assert seen["arm"][0, :, 0].tolist() == [0, 0.5]
    history.reset()
    history.push({"arm": np.zeros(2, np.float32), "camera": np.zeros((3, 4, 4), np.float32)})
    assert history.push({"arm": np.zeros(2), "camera": np.ones((3, 4, 4))})["camera"][0, 1].max() == 1


def test_what_a_history_refuses_leaves_it_as_it_was():
    history = History(2)
    history.push([1.0])
    for wrong, sentence in (
        ([np.nan], "the observation 'obs' holds NaN or infinity; check the sensor"),
        (["a"], "the observation 'obs' is not an array of numbers"),
        ([1.0, 2.0], r"has the shapes {'obs': \(2,\)}, expected {'obs': \(1,\)} as before; call reset"),
        ({"arm": [1.0]}, r"has the shapes {'arm': \(1,\)}, expected"),
    ):
        with pytest.raises(ObservationError, match=sentence):
            history.push(wrong)
    np.testing.assert_array_equal(history.push([2.0]), [[[1], [2]]])
    with pytest.raises(ObservationError, match="one observation at least, got n_obs_steps=0"):
        History(0)
