"""Named trees as safetensors with a checksum. No pickle is involved.

The safetensors header has one metadata entry, `cfl`: JSON of the checksum, the names of all trees and leaves in order
(safetensors itself sorts tensors and drops empty trees), and more data of the caller. Several entries could break the
rule that equal input gives equal bytes: safetensors does not promise their order. The checksum covers every byte except
its own digits.
"""

import json
from collections.abc import Mapping
from hashlib import blake2b
from typing import Any

from safetensors.torch import load as _parse
from safetensors.torch import save as _serialise

from cfl.core import Tree

_DIGITS = 64
# The entry is a string inside the header's JSON, so its quotes are escaped once. Quotes in names and data are escaped
# twice and do not match.
_MARK = rb"{\"checksum\":\""


def encode(trees: Mapping[str, Tree], **more: Any) -> bytearray:
    """Return the content of a file. trees: tensors of any shape, layout and device; more: JSON data.

    Equal input gives equal bytes. The names in `more` must come after "checksum" in the alphabet.
    """
    # Clones: safetensors rejects tensors that share memory, such as the leaves of a broadcast tree.
    leaves = {
        _key(tree, name): leaf.detach().cpu().contiguous().clone()
        for tree, content in trees.items()
        for name, leaf in content.items()
    }
    layout = [[tree, list(content)] for tree, content in trees.items()]
    entry = canonical({"checksum": "0" * _DIGITS, "trees": layout, **more})  # "checksum" sorts first
    data = bytearray(_serialise(leaves, {"cfl": entry}))
    start, end = _checksum_span(data)
    view = memoryview(data)
    data[start:end] = digest(view[:start], view[end:]).encode()
    return data


def decode(data: bytes) -> tuple[dict[str, Tree], dict[str, Any]]:
    """Return the trees (on the CPU) and what `entry` returns. Raises ValueError, with the reason, for damaged bytes."""
    found = entry(data)
    leaves = _parse(data)
    return {tree: {name: leaves[_key(tree, name)] for name in names} for tree, names in found["trees"]}, found


def entry(data: bytes | bytearray) -> dict[str, Any]:
    """Return the data that `encode` was given, with the "checksum". Raises ValueError for damaged bytes."""
    start, end = _checksum_span(data)
    view = memoryview(data)
    if digest(view[:start], view[end:]).encode() != data[start:end]:
        raise ValueError("its checksum does not match its content")
    header = json.loads(data[8 : 8 + int.from_bytes(data[:8], "little")])
    found: dict[str, Any] = json.loads(header["__metadata__"]["cfl"])
    return found


def checksum(data: bytes | bytearray) -> str:
    """Return the checksum in a file's content. Raises ValueError if there is none."""
    start, end = _checksum_span(data)
    return data[start:end].decode()


def canonical(value: Any) -> str:
    """Return the JSON text in which equal values are equal texts. Raises TypeError for values that JSON cannot hold."""
    return json.dumps(value, sort_keys=True, separators=(",", ":"))


def digest(*parts: bytes | memoryview) -> str:
    """Hash the parts one after another (BLAKE2b, 64 hex digits)."""
    state = blake2b(digest_size=_DIGITS // 2)
    for part in parts:
        state.update(part)
    return state.hexdigest()


def _key(tree: str, leaf: str) -> str:
    # A JSON list: no separator is safe, because both names may contain any character.
    return canonical([tree, leaf])


def _checksum_span(data: bytes | bytearray) -> tuple[int, int]:
    start = data.find(_MARK)
    if start < 0:
        raise ValueError("its header has no checksum")
    start += len(_MARK)
    return start, start + _DIGITS
