"""What is read as a tensor is read as it lies, and looked through wherever it lies."""

import numpy as np
import pytest
import torch

from blockcache.errors import ObservationError
from blockcache.observations.tensors import as_tensor, check_finite


def test_reading_does_not_copy_what_need_not_be_copied():
    array = np.zeros((3, 4), dtype=np.float32)
    assert as_tensor(array).data_ptr() == torch.from_numpy(array).data_ptr()
    given = torch.linspace(-1, 1, 20).reshape(2, 2, 5)
    assert as_tensor(given) is given
    assert as_tensor(np.array(3.0, dtype=">f8")).shape == ()


def test_looking_for_nan_in_what_lies_oddly():
    for odd in (np.ones(4)[::-1], np.ones(4, dtype=">f8")):
        check_finite({"a": [odd]})
        with pytest.raises(ObservationError, match="NaN"):
            check_finite({"a": [np.append(odd, np.nan)[::-1]]})
