"""Pickled data sets: arrays and plain containers of any version are loaded, everything else is refused."""

import os
import pickle
import subprocess
from collections import OrderedDict

import numpy as np
import pytest

from cfl.core import DataError
from cfl.streams import pickles

DATA = {
    "image_data": np.arange(24, dtype=np.uint8).reshape(2, 3, 4),
    "labels": [np.int64(3), 4, (5, 6.5, None, True)],
    "class_dict": {"n01": [0, 1], "n02": range(2)},
    "empty": [set(), b"", b"\xff", bytearray(b"a")],
}


@pytest.mark.parametrize("protocol", range(6))
def test_arrays_and_containers_are_loaded(tmp_path, protocol):
    (tmp_path / "x.pkl").write_bytes(pickle.dumps(DATA, protocol))
    found = pickles.load(tmp_path / "x.pkl")
    assert (found.pop("image_data") == DATA["image_data"]).all()
    assert found == {name: value for name, value in DATA.items() if name != "image_data"}


def test_pickles_of_python_2_are_read(tmp_path):
    """Bytes that Python 2 writes for {'data': array of 1 and 255, 'labels': [0]}."""
    array = b"cnumpy.core.multiarray\n_reconstruct\n(cnumpy\nndarray\n(I0\ntS'b'\ntR(I1\n(I2\ntcnumpy\ndtype\n"
    array += b"(S'u1'\nI0\nI1\ntR(I3\nS'|'\nNNNI-1\nI-1\nI0\ntbI00\nS'\\x01\\xff'\ntb"
    (tmp_path / "x.pkl").write_bytes(b"(dS'data'\n" + array + b"sS'labels'\n(lI0\nas.")
    found = pickles.load(tmp_path / "x.pkl")
    assert found["data"].tolist() == [1, 255] and found["data"].dtype == np.uint8 and found["labels"] == [0]


class Runs:
    def __init__(self, function, *arguments):
        self.reduced = function, arguments

    def __reduce__(self):
        return self.reduced


@pytest.mark.parametrize(
    "function, named",
    [(os.system, "system"), (eval, "eval"), (subprocess.run, "subprocess.run"), (getattr, "getattr")],
)
def test_functions_are_refused_and_not_run(tmp_path, function, named):
    mark = tmp_path / "ran"
    payload = [np.array([Runs(function, f"touch {mark}")], dtype=object)]  # also inside an array of objects
    (tmp_path / "x.pkl").write_bytes(pickle.dumps(payload))
    with pytest.raises(DataError, match=rf"x\.pkl cannot be read .*{named}, which is no array"):
        pickles.load(tmp_path / "x.pkl")
    assert not mark.exists()


def test_other_names_of_numpy_are_refused(tmp_path):
    for name in (b"numpy\nload", b"numpy.core.multiarray\nfromfile", b"numpy.testing._private.utils\nrunstring"):
        (tmp_path / "x.pkl").write_bytes(b"c" + name + b"\n.")
        with pytest.raises(DataError, match="which is no array"):
            pickles.load(tmp_path / "x.pkl")


@pytest.mark.parametrize("content", [b"", b"no pickle", pickle.dumps(DATA)[:60], pickle.dumps(OrderedDict(a=1))])
def test_damaged_files_and_other_kinds_are_data_errors(tmp_path, content):
    (tmp_path / "x.pkl").write_bytes(content)
    with pytest.raises(DataError, match=r"x\.pkl cannot be read as a pickle of arrays .*replace it"):
        pickles.load(tmp_path / "x.pkl")
