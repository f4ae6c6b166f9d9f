"""Pickled data sets: arrays and plain containers of any version are loaded, everything else is refused."""

import os
import pickle
import random
import subprocess
from collections import Counter, OrderedDict

import numpy as np
import pytest

from cfl.core import DataError
from cfl.streams import pickles

CASES = int(os.environ.get("CFL_FUZZ", "0"))
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
    call = Runs(function, f"touch {mark}")
    (tmp_path / "x.pkl").write_bytes(pickle.dumps([call]))
    with pytest.raises(DataError, match=rf"x\.pkl cannot be read .*{named}, which is no array"):
        pickles.load(tmp_path / "x.pkl")
    (tmp_path / "x.pkl").write_bytes(pickle.dumps(np.array([call], dtype=object)))
    with pytest.raises(DataError, match="it holds an array of object, not of numbers or strings"):
        pickles.load(tmp_path / "x.pkl")
    assert not mark.exists()


@pytest.mark.parametrize(("kind", "order"), [("<f4", "C"), (">i8", "F"), ("S3", "C"), ("<U2", "F"), ("?", "C")])
@pytest.mark.parametrize("protocol", [2, 5])
def test_arrays_of_any_plain_kind_and_order_are_loaded(tmp_path, kind, order, protocol):
    array = np.asarray(np.arange(6).reshape(2, 3).astype(kind), order=order)
    (tmp_path / "x.pkl").write_bytes(pickle.dumps({"a": array, "again": array, "one": array[0, 1]}, protocol))
    found = pickles.load(tmp_path / "x.pkl")
    expected = pickle.loads((tmp_path / "x.pkl").read_bytes())["a"]  # of the machine's byte order in old protocols
    assert found["a"].dtype == expected.dtype and (found["a"] == array).all() and found["again"] is found["a"]
    assert found["one"] == array[0, 1]


def damaged(draws):
    """A pickle of DATA in which some bytes are changed, cut or added."""
    content = bytearray(pickle.dumps(DATA, draws.randrange(6)))
    for _ in range(draws.choice([1, 1, 2, 5])):
        at, count = draws.randrange(len(content)), draws.randrange(1, 6)
        old, new = draws.choice([(count, count), (count, 0), (0, count)])
        content[at : at + old] = draws.randbytes(new)
    return bytes(content)


def test_damaged_pickles_are_loaded_or_refused_and_do_not_crash(tmp_path):
    """Some of these files crash Python's unpickler in C, or `__setstate__` of NumPy's arrays and dtypes."""
    draws, ends = random.Random(0), Counter()
    for _ in range(max(300, CASES)):
        (tmp_path / "x.pkl").write_bytes(damaged(draws))
        try:
            pickles.load(tmp_path / "x.pkl")
            ends["loaded"] += 1
        except DataError:
            ends["refused"] += 1
    assert ends["loaded"] and ends["refused"]


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
