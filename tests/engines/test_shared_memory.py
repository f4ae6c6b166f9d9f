"""Shared memory: objects are read as they were written, without a copy, and an overflow reports its size."""

import numpy as np
import pytest
import torch

from cfl.engines.shared_memory import Arena, ArenaFull, portable

LEAVES = {
    "float": torch.arange(6.0).view(2, 3),
    "double, transposed": torch.arange(6.0).double().view(2, 3).T,
    "half": torch.ones(5, dtype=torch.bfloat16),
    "int": torch.tensor([-1, 2**62]),
    "bool": torch.tensor([True, False, True]),
    "scalar": torch.tensor(3.5),
    "one number, stride 0": torch.tensor(3.5).expand(1),
    "empty": torch.zeros(0, 4),
    "one number, expanded": torch.tensor(2.0).expand(1000, 1000),
    "one number, expanded to one": torch.tensor(2.0).expand(1),
    "every other": torch.arange(10)[::2],
    "parameter": torch.nn.Parameter(torch.ones(2)),
    "array": np.arange(5, dtype=np.uint64),
    "array, 16 bits": np.arange(5, dtype=np.uint16),
    "array, empty": np.zeros(0, dtype=np.uint64),
}


@pytest.mark.parametrize("name", LEAVES)
def test_a_leaf_keeps_type_and_shape(name):
    arena, leaf = Arena(4096), LEAVES[name]
    found = arena.read(arena.write([None, {"a": (leaf, 5, "text")}]))[1]["a"][0]
    assert isinstance(found, np.ndarray) == isinstance(leaf, np.ndarray)
    assert found.dtype == leaf.dtype and tuple(found.shape) == tuple(leaf.shape)
    assert np.array_equal(found, leaf) if isinstance(leaf, np.ndarray) else torch.equal(found, leaf)


def test_tensors_that_are_read_are_views_of_the_arena():
    arena = Arena(4096)
    first = arena.read(arena.write(torch.ones(3)))
    arena.write(torch.zeros(3))
    assert first.tolist() == [0, 0, 0]


def test_leaves_begin_at_multiples_of_64_bytes():
    arena = Arena(4096)
    one, two = arena.read(arena.write([torch.ones(3, dtype=torch.bool), torch.ones(2).double()]))
    assert (two.data_ptr() - one.data_ptr()) == 64


def test_an_overflow_reports_the_bytes_it_takes():
    arena = Arena(4096)
    with pytest.raises(ArenaFull) as caught:
        arena.write([torch.ones(1, dtype=torch.bool), torch.zeros(4033, dtype=torch.bool)])
    assert caught.value.bytes == 64 + 4033
    assert Arena(caught.value.bytes).write([torch.ones(1, dtype=torch.bool), torch.zeros(4033, dtype=torch.bool)])
    arena.write(torch.zeros(4096, dtype=torch.bool))  # to the last byte


def test_known_objects_are_not_sent():
    arena, known = Arena(0), object()
    pickled = arena.write([known, 1], {id(known): 1})
    assert arena.read(pickled, [None, known])[0] is known


def test_a_portable_error_has_its_traceback():
    class Local(Exception):
        pass

    for error, kind, text in ((ValueError("a", 1), ValueError, "('a', 1)"), (Local("b"), RuntimeError, "Local: b")):
        try:
            raise error
        except Exception as raised:
            found = portable(raised)
        assert type(found) is kind and str(found) == text
        assert "test_a_portable_error" in found.__notes__[-1]
