"""Files of arrays hold what was given and nothing else, whatever numpy is installed."""

from __future__ import annotations

import io
import zipfile

import numpy as np
import pytest

from blockcache_runtime.arrays import parse_arrays, write_arrays


def test_a_file_holds_the_arrays_that_were_given_and_no_other(tmp_path):
    given = {"obs": np.arange(6, dtype=np.float32).reshape(2, 3), "task": np.array("lift"), "ends": np.array([2])}
    write_arrays(tmp_path / "a.npz", **given)
    with zipfile.ZipFile(tmp_path / "a.npz") as archive:
        assert archive.namelist() == ["obs.npy", "task.npy", "ends.npy"]
    found = parse_arrays((tmp_path / "a.npz").read_bytes(), "arrays", "a.npz")
    assert all(np.array_equal(found[name], array) and found[name].dtype == array.dtype for name, array in given.items())


def test_the_bytes_are_those_that_numpy_writes(tmp_path):
    given = {"obs": np.linspace(0, 1, 1000, dtype=np.float32), "action": np.zeros((3, 2))}
    write_arrays(tmp_path / "a.npz", **given)
    expected = io.BytesIO()
    np.savez_compressed(expected, **given)
    assert (tmp_path / "a.npz").read_bytes() == expected.getvalue()


def test_objects_are_refused_and_nothing_is_written(tmp_path):
    with pytest.raises(ValueError, match="Object arrays cannot be saved"):
        write_arrays(tmp_path / "a.npz", obs=np.array([{}], dtype=object))
    assert not (tmp_path / "a.npz").exists()
