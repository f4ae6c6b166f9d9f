"""Values as Flower records: a JSON text for the structure, and one array of safetensors bytes for all tensors.

Nothing is pickled, so a message cannot run code at its receiver.
"""

import json
from base64 import b64decode, b64encode
from collections.abc import Mapping
from typing import Any

import numpy as np
import torch
from flwr.app import Array, ArrayRecord, ConfigRecord, RecordDict
from safetensors import SafetensorError
from safetensors.torch import load, save
from torch import Tensor

from cfl.core import CflError, Tree

BODY, TENSORS = "body", "tensors"
FORMAT = "safetensors"
_DTYPES = [f"{order}{kind}{size}" for order in "<|" for kind in "uif" for size in (1, 2, 4, 8)]


class WireError(CflError):
    """A message that `cfl` did not write, or that was damaged on its way."""


def pack(value: Any) -> RecordDict:
    """Return the records of a value: plain data, bytes, tuples, tensors and arrays, nested in lists and dicts.

    Keys of dicts may be any plain values. Raises TypeError for other objects.
    """
    leaves: dict[str, Tensor] = {}
    body = json.dumps(_plain(value, leaves), separators=(",", ":"))
    return RecordDict({BODY: ConfigRecord({BODY: body}), TENSORS: ArrayRecord({TENSORS: array(leaves)})})


def unpack(records: RecordDict) -> Any:
    """Return the value of `pack`. Raises WireError for records that `pack` did not make."""
    try:
        body = json.loads(str(records.config_records[BODY][BODY]))
        return _value(body, tree(records.array_records[TENSORS][TENSORS]))
    except (KeyError, IndexError, TypeError, ValueError, AttributeError, RuntimeError) as error:
        raise WireError(f"a message is not one of cfl's, or is damaged ({type(error).__name__}: {error})") from error


def array(leaves: Tree) -> Array:
    """Return the tensors of a tree as one Flower array."""
    data = save({name: leaf.detach().cpu().contiguous().clone() for name, leaf in leaves.items()})
    return Array(dtype="uint8", shape=(len(data),), stype=FORMAT, data=data)


def tree(packed: Array) -> Tree:
    """Return the tree of `array`, sorted by name. Raises WireError for other bytes."""
    if packed.stype != FORMAT:
        raise WireError(f"tensors must come as {FORMAT}, not {packed.stype}")
    try:
        found: Tree = load(packed.data)
    except (SafetensorError, KeyError) as error:
        raise WireError(f"the tensors of a message are damaged: {error}") from error
    return found


def size(records: RecordDict) -> int:
    """Bytes of the content of a message, without what Flower and the network add."""
    arrays = (packed for record in records.array_records.values() for packed in record.values())
    texts = (item for record in records.config_records.values() for pair in record.items() for item in pair)
    return sum(len(packed.data) for packed in arrays) + sum(len(str(item).encode()) for item in texts)


def _plain(value: Any, leaves: dict[str, Tensor]) -> Any:
    """JSON data of a value; adds its tensors to `leaves`. A list of a kind and content stands for all but scalars."""
    if value is None or isinstance(value, bool | int | float | str):
        return value
    if isinstance(value, Mapping):
        return ["dict", [[_plain(key, leaves), _plain(item, leaves)] for key, item in value.items()]]
    if isinstance(value, list | tuple):
        return ["list" if isinstance(value, list) else "tuple", [_plain(item, leaves) for item in value]]
    if isinstance(value, bytes):
        return ["bytes", b64encode(value).decode()]
    if isinstance(value, np.ndarray):  # safetensors for torch lacks the unsigned integers of secure sums
        flat = torch.from_numpy(np.ascontiguousarray(value).reshape(-1).view(np.uint8))
        return ["array", value.dtype.str, list(value.shape), _plain(flat, leaves)]
    if not isinstance(value, Tensor):
        raise TypeError(f"{type(value).__name__} cannot be sent")
    if value.is_floating_point() and value.numel() > 1 and not any(value.stride()):  # a single number
        return ["expanded", list(value.shape), _plain(value[(0,) * value.dim()], leaves)]
    leaves[name := str(len(leaves))] = value
    return ["tensor", name]


def _value(body: Any, leaves: Tree) -> Any:
    if not isinstance(body, list | dict):
        return body
    kind, *content = body
    match kind, content:
        case "dict", [pairs]:
            return {_value(key, leaves): _value(item, leaves) for key, item in pairs}
        case "list" | "tuple", [items]:
            found = [_value(item, leaves) for item in items]
            return found if kind == "list" else tuple(found)
        case "bytes", [text]:
            return b64decode(text, validate=True)
        case "array", [dtype, shape, data] if dtype in _DTYPES:
            return np.frombuffer(_value(data, leaves).numpy(), dtype=np.dtype(dtype)).reshape(shape)
        case "expanded", [shape, number]:
            single = _value(number, leaves)
            if single.dim() or not single.is_floating_point():
                raise ValueError("only one floating-point number may stand for many entries")
            return single.expand(shape)
        case "tensor", [name]:
            return leaves[name]
    raise WireError(f"a message holds the unknown kind {kind!r}")
