"""Types and sizes of demonstrations are checked before anything is made of them."""

import numpy as np
import pytest

from blockcache.errors import BlockcacheError
from blockcache.tasks import task_spec
from blockcache_lab.training.data import read_demonstrations
from laboratory_formats import write_demonstrations


@pytest.mark.parametrize(
    ("arrays", "sentence"),
    [
        ({"state": np.ones(8)}, "is garbled|have shape"),
        ({"keypoint": np.array(1.0)}, "is garbled"),
        ({"action": np.full((8, 2), 1e200)}, "actions .* hold NaN or infinity"),
        ({"action": np.array([["x", "y"]] * 8)}, "actions .* of <U1, task 'pusht' needs"),
        ({"action": np.ones((8, 2), dtype=complex)}, "actions .* of complex128, task 'pusht' needs"),
        ({"episode_ends": np.array([2**64 - 1, 8], dtype=np.uint64)}, "rise to the number of steps"),
        ({"episode_ends": np.array(8)}, "rise to the number of steps"),
    ],
)
def test_odd_demonstrations(tmp_path, arrays, sentence):
    path = write_demonstrations(tmp_path)
    np.savez(path, **{**np.load(path), **arrays})
    with pytest.raises(BlockcacheError, match=sentence):
        read_demonstrations(task_spec("pusht"), path)
