"""Memory shared by processes: one process writes an object, the others read its tensors without a copy."""

import io
import mmap
import pickle
import traceback
from collections.abc import Mapping, Sequence
from types import MappingProxyType
from typing import Any

import numpy as np
import torch
from torch import Tensor

_ALIGNED = 64  # bytes, for vector instructions


class ArenaFull(Exception):
    """An object does not fit into an arena. bytes: the size that it takes."""

    def __init__(self, bytes: int) -> None:
        super().__init__(bytes)
        self.bytes = bytes


class Arena:
    """Shared memory of a fixed size in bytes, for processes forked after its creation.

    It has no name and no file, and ends with the last process that maps it. A page takes memory only once written.
    """

    def __init__(self, bytes: int) -> None:
        self.bytes = bytes
        self._memory = mmap.mmap(-1, max(bytes, mmap.PAGESIZE))
        self._view = torch.frombuffer(self._memory, dtype=torch.uint8)

    def write(self, value: Any, known: Mapping[int, int] = MappingProxyType({})) -> bytes:
        """Write an object's CPU tensors and arrays to the arena; return the pickled rest, which `read` takes.

        known: places in the reader's list of objects that it has already, by id; they are not written.
        Overwrites the previous object. Raises ArenaFull if the tensors and arrays do not fit.
        """
        leaves: list[Tensor] = []
        ends = [0]

        def place(leaf: Any) -> Any:
            if not isinstance(leaf, Tensor | np.ndarray):
                return known.get(id(leaf))
            tensor = torch.from_numpy(leaf) if isinstance(leaf, np.ndarray) else leaf.detach()
            shape = tuple(tensor.shape)
            if expanded := tensor.dim() > 0 < tensor.numel() and not any(tensor.stride()):  # a single number
                tensor = tensor[(0,) * tensor.dim()]
            flat = tensor.reshape(-1).contiguous() if tensor.numel() else tensor.new_empty(0)  # NumPy's have stride 0
            flat = flat.as_strided(flat.shape, (1,))  # a lone number may have stride 0, and is contiguous
            leaves.append(flat.view(torch.uint8))
            begin = -(-ends[-1] // _ALIGNED) * _ALIGNED
            ends.append(begin + len(leaves[-1]))
            return begin, ends[-1], tensor.dtype, shape, expanded, isinstance(leaf, Tensor)

        file = io.BytesIO()
        pickler = pickle.Pickler(file, protocol=pickle.HIGHEST_PROTOCOL)
        pickler.persistent_id = place  # type: ignore[method-assign]
        pickler.dump(value)
        if ends[-1] > self.bytes:
            raise ArenaFull(ends[-1])
        for leaf, end in zip(leaves, ends[1:], strict=True):
            self._view[end - len(leaf) : end] = leaf
        return file.getvalue()

    def read(self, pickled: bytes, known: Sequence[object] = ()) -> Any:
        """Return the written object. Its tensors are views of the arena: the next `write` overwrites them.

        known: the objects that the reader has already, see `write`.
        """

        def find(token: Any) -> Any:
            if isinstance(token, int):
                return known[token]
            begin, end, dtype, shape, expanded, is_tensor = token
            flat = self._view[begin:end].view(dtype)
            leaf = flat.expand(shape) if expanded else flat.reshape(shape)
            return leaf if is_tensor else leaf.numpy()

        unpickler = pickle.Unpickler(io.BytesIO(pickled))
        unpickler.persistent_load = find  # type: ignore[method-assign]
        return unpickler.load()


def portable(error: Exception) -> Exception:
    """Return a picklable copy of an error with its traceback as a note; a RuntimeError if pickling fails."""
    trace = "".join(traceback.format_exception(error))
    try:
        found = pickle.loads(pickle.dumps(error))
    except Exception as lost:  # of any kind: pickling calls the error's own constructor
        found = RuntimeError(f"{type(error).__name__}: {error}")
        found.add_note(f"(pickling the original error failed: {lost})")
    found.add_note(trace)
    return found
