"""Values as Flower records: what comes back, what is refused, what they weigh."""

import io
import math
import pickle
from pathlib import Path

import numpy as np
import pytest
import torch
from flwr.app import Array, ArrayRecord, ConfigRecord, RecordDict
from flwr.common.serde import recorddict_from_proto, recorddict_to_proto
from hypothesis import example, given, settings
from hypothesis import strategies as st
from safetensors.torch import save

from cfl.flower import wire
from cfl.flower.wire import WireError
from cfl.testing.toys import toy_stream


def carried(value):
    """The value after a journey over Flower's own serialisation."""
    return wire.unpack(recorddict_from_proto(recorddict_to_proto(wire.pack(value))))


def alike(one, other):
    """Whether two values are equal to the bit, types included."""
    if isinstance(one, torch.Tensor):
        same = (one.dtype, one.shape) == (other.dtype, other.shape)
        return same and bits(one) == bits(other)
    if isinstance(one, np.ndarray):
        return (one.dtype, one.shape, one.tobytes()) == (other.dtype, other.shape, other.tobytes())
    if type(one) is not type(other):
        return False
    if isinstance(one, dict):
        pairs = zip(one.items(), other.items())
        return len(one) == len(other) and all(alike(list(mine), list(theirs)) for mine, theirs in pairs)
    if isinstance(one, list | tuple):
        return len(one) == len(other) and all(map(alike, one, other))
    return repr(one) == repr(other)  # NaN is not equal to itself, and -0.0 is equal to 0.0


def bits(leaf):
    return leaf.contiguous().flatten().view(torch.uint8).tolist() if leaf.numel() else []


SQUARE = torch.arange(6.0).reshape(2, 3)
VALUES = {
    "None": None,
    "booleans, which are not 0 and 1": [True, False, 0, 1],
    "floats": [math.nan, math.inf, -math.inf, -0.0, 1 / 3, 5e-324],
    "integers of 128 bits": [2**127, -(2**127), 2**64],
    "texts": ["", "quote \" and \\", "Grüße, 連合"],
    "bytes": [b"", b"\x00\xff", bytes(range(256))],
    "lists and tuples": [(), [], (1, (2, [3])), ["dict", []], ["tensor", "0"]],
    "keys of several kinds": {1: "a", (0, "x"): "b", None: "c", b"\xff": "d", "1": "e", 2.5: "f"},
    "dicts in their order": {"b": 1, "a": {"d": 2, "c": {}}},
    "floating-point tensors": [torch.tensor([math.nan, -math.inf, -0.0, 1 / 3], dtype=kind) for kind in (
        torch.float16, torch.bfloat16, torch.float32, torch.float64)],
    "counters": [torch.tensor(2**62), torch.tensor([-1, 0])],
    "masks": torch.tensor([True, False]),
    "empty tensors": [torch.empty(0), torch.empty(0, 3), torch.empty(2, 0, dtype=torch.int64)],
    "parts of a tensor": [SQUARE.T, SQUARE[:, 1], SQUARE[1:], SQUARE],
    "outlines": [torch.zeros(()).expand(2, 3), torch.zeros(()).expand(7), torch.full((), 1.5).expand(4, 1, 2)],
    "arrays": [np.arange(5, dtype=kind) - np.array(1, kind) for kind in ("<u2", "<u4", "<u8")],
    "an empty array": np.empty(0, "<u8"),
    "nested": {"states": {3: {"a/b": SQUARE, "c": None}}, "part": (1.5, [np.arange(3, dtype="<u8")])},
}  # fmt: skip


@pytest.mark.parametrize("name", VALUES)
def test_every_kind_of_value_comes_back(name):
    assert alike(carried(VALUES[name]), VALUES[name])


plain = st.none() | st.booleans() | st.integers() | st.floats() | st.text(st.characters(codec="utf-8")) | st.binary()
leaves = st.builds(lambda size, dtype: torch.arange(size).to(dtype), st.integers(0, 3), st.sampled_from([
    torch.float32, torch.int64, torch.bool]))  # fmt: skip
values = st.recursive(
    plain | leaves,
    lambda inner: st.lists(inner) | st.lists(inner).map(tuple) | st.dictionaries(plain, inner),
    max_leaves=12,
)


@given(values)
@settings(max_examples=100, deadline=None)
def test_any_nesting_comes_back(value):
    assert alike(carried(value), value)


def test_a_leaf_that_needs_a_gradient_comes_back_without():
    leaf = torch.ones(2, requires_grad=True)
    found = carried(leaf)
    assert alike(found, leaf.detach()) and not found.requires_grad


def test_a_matrix_keeps_its_shape():
    value = np.arange(6, dtype="<u8").reshape(2, 3)
    assert alike(carried(value), value)


@pytest.mark.parametrize("value", [{1, 2}, object(), toy_stream(1), Path("a"), {"a": [len]}, 1j, np.float32(1)])
def test_other_objects_are_not_sent(value):
    with pytest.raises(TypeError, match="cannot be sent"):
        wire.pack(value)


# --- size ------------------------------------------------------------------------------------------------------------


def test_the_size_is_that_of_the_text_and_the_tensors():
    value = {"loss": torch.ones(3), "kept": [None, torch.zeros(2, dtype=torch.int64)]}
    text = '["dict",[["loss",["tensor","0"]],["kept",["list",[null,["tensor","1"]]]]]]'
    data = save({"0": value["loss"], "1": value["kept"][1]})
    assert wire.size(wire.pack(value)) == len(text) + len("body") + len(data)


def test_a_tensor_weighs_its_bytes():
    few, many = (wire.size(wire.pack(torch.ones(count))) for count in (10_000, 20_000))
    assert many - few == 4 * 10_000


def test_an_outline_weighs_as_much_as_one_number():
    few, many = (wire.size(wire.pack(torch.zeros(()).expand(size, 10))) for size in (10**3, 10**8))
    assert many - few == len("10" * 5) - 5  # digits of the shape
    assert many < 200


# --- what is refused -------------------------------------------------------------------------------------------------


class Bomb:
    """Makes a file when it is unpickled."""

    def __init__(self, path):
        self.path = path

    def __reduce__(self):
        return Path.touch, (self.path,)


def records(body="null", data=None, stype=wire.FORMAT):
    data = save({}) if data is None else data
    packed = Array(dtype="uint8", shape=(len(data),), stype=stype, data=data)
    return RecordDict({wire.BODY: ConfigRecord({wire.BODY: body}), wire.TENSORS: ArrayRecord({wire.TENSORS: packed})})


def dumped(write):
    file = io.BytesIO()
    write(file)
    return file.getvalue()


PICKLES = {
    "a pickle for tensors": lambda bomb: records(data=pickle.dumps(bomb)),
    "a file of torch.save": lambda bomb: records(data=dumped(lambda file: torch.save(bomb, file))),
    "an array of objects": lambda bomb: records(data=dumped(lambda file: np.save(file, np.array([bomb])))),
    "an npz with objects": lambda bomb: records(data=dumped(lambda file: np.savez(file, a=np.array([bomb])))),
    "an array of Flower's kind": lambda bomb: records(
        data=dumped(lambda file: np.save(file, np.array([bomb]))), stype="numpy.ndarray"
    ),
    "a pickle for the text": lambda bomb: records(pickle.dumps(bomb, 0).decode("latin-1")),
    "objects in the bytes of an array": lambda bomb: records(
        '["array","|O",["tensor","0"]]', save({"0": torch.frombuffer(bytearray(pickle.dumps(bomb)), dtype=torch.uint8)})
    ),
}


@pytest.mark.parametrize("name", PICKLES)
def test_no_pickle_is_ever_read(name, tmp_path):
    flag = tmp_path / "exploded"
    payload = PICKLES[name](Bomb(flag))
    with pytest.raises(WireError):
        wire.unpack(payload)
    assert not flag.exists()
    pickle.loads(pickle.dumps(Bomb(flag)))
    assert flag.exists()  # the bomb is no dud


FOREIGN = {
    "nothing": RecordDict(),
    "no text": RecordDict({wire.TENSORS: records()[wire.TENSORS]}),
    "no tensors": RecordDict({wire.BODY: records()[wire.BODY]}),
    "a text of another name": RecordDict({**records(), wire.BODY: ConfigRecord({"text": "null"})}),
    "arrays for the text": RecordDict({wire.BODY: ArrayRecord([np.ones(2)]), wire.TENSORS: records()[wire.TENSORS]}),
    "arrays of Flower": RecordDict({wire.BODY: records()[wire.BODY], wire.TENSORS: ArrayRecord([np.ones(2)])}),
    "an empty text": records(""),
    "an unknown kind": records('["object","os.system"]'),
    "a list for a kind": records('[["dict"],[]]'),
    "an empty list": records("[]"),
    "too deep": records("[" * 100_000),
    "a tensor that is not there": records('["tensor","0"]'),
    "a list as a key": records('["dict",[[["list",[]],1]]]'),
    "bytes that are none": records('["bytes","?"]'),
    "an array of no type": records('["array","<u9",["tensor","0"]]', save({"0": torch.ones(8, dtype=torch.uint8)})),
    "an array of half a number": records('["array","<u8",["tensor","0"]]', save({"0": torch.ones(9).to(torch.uint8)})),
    "an integer for many": records('["expanded",[9],["tensor","0"]]', save({"0": torch.tensor(1)})),
    "numbers for many": records('["expanded",[9,2],["tensor","0"]]', save({"0": torch.ones(2)})),
    "an outline of no shape": records('["expanded",[-2],["tensor","0"]]', save({"0": torch.ones(())})),
    "an outline beyond all numbers": records(f'["expanded",[{10**40}],["tensor","0"]]', save({"0": torch.ones(())})),
    "garbage for tensors": records(data=b"garbage"),
    "no bytes for tensors": records(data=b""),
    "an object of JSON": records('{"a":1}'),
    "a type that numpy reads as code": records('["array","i4,(",["tensor","0"]]', save({"0": torch.ones(8)})),
}  # fmt: skip


@pytest.mark.parametrize("name", FOREIGN)
def test_foreign_records_are_refused(name):
    with pytest.raises(WireError, match=r"^(a message|the tensors of a message|tensors must come as) "):
        wire.unpack(FOREIGN[name])


EMPTY = {
    "an empty text": FOREIGN["an empty text"],
    "empty bytes": RecordDict({"more": ConfigRecord({"a": b""})}),
    "an empty list": RecordDict({"more": ConfigRecord({"a": []})}),
}


@pytest.mark.parametrize("name", {**FOREIGN, **EMPTY})
def test_foreign_records_have_a_size(name):
    """The server counts the bytes of a reply before it reads the reply."""
    assert wire.size((FOREIGN | EMPTY)[name]) >= 0


TREE = {
    "info": {"key": 2**127 + 1, "heads": (0,), "lr": 0.1}, "blocks": [{3: {"a": SQUARE}}, {7: {}}],
    "sums": np.arange(4, dtype="<u8"), "outline": torch.zeros(()).expand(3, 2), "seed": b"\x01\xff",
}  # fmt: skip
BODY = wire.pack(TREE).config_records[wire.BODY][wire.BODY]
DATA = wire.pack(TREE).array_records[wire.TENSORS][wire.TENSORS].data
places = st.integers(0, 10**6)


@given(st.booleans(), places, st.integers(1, 255), st.booleans())
@example(True, BODY.index("3,2"), ord("3") ^ ord("-"), False)
@settings(max_examples=400, deadline=None)
def test_a_damaged_message_gives_a_value_or_a_wire_error(in_text, place, change, cut):
    """One byte is changed, or the end is missing."""
    whole = BODY.encode() if in_text else DATA
    place %= len(whole)
    damaged = whole[:place] + (b"" if cut else bytes([whole[place] ^ change]) + whole[place + 1 :])
    try:
        wire.unpack(records(damaged.decode("latin-1")) if in_text else records(BODY, damaged))
    except WireError as error:
        assert "damaged" in str(error) or "kind" in str(error)
    else:
        assert not cut or place == 0 or not in_text  # a text without its end is never a value


@given(st.binary(max_size=200), st.binary(max_size=200))
@settings(max_examples=100, deadline=None)
def test_random_bytes_are_refused(text, data):
    with pytest.raises(WireError):
        wire.unpack(records("[" + text.decode("latin-1"), data))
