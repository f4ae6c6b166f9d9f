"""Memory that processes share: one writes an object, and the others read its tensors where they lie."""

from __future__ import annotations

import io
import mmap
import pickle
import traceback
from collections.abc import Callable, Mapping
from typing import Any

import numpy as np
import torch
from torch import Tensor

_ALIGNED = 64  # bytes, as vector instructions like it


class ArenaFull(Exception):
    """What is to be written takes more bytes than the arena has. bytes: how many."""

    def __init__(self, bytes: int) -> None:
        super().__init__(bytes)
        self.bytes = bytes


class Arena:
    """Shared memory of a fixed size in bytes, for processes that are forked after it is made.

    It has no name and no file: it is gone with the last process that knows it. Pages take memory once written to.
    """

    def __init__(self, bytes: int) -> None:
        self.bytes = bytes
        self._memory = mmap.mmap(-1, max(bytes, mmap.PAGESIZE))
        self._view = torch.frombuffer(self._memory, dtype=torch.uint8)

    def write(self, value: Any, known: Callable[[Any], Any] = lambda value: None) -> bytes:
        """Put an object's CPU tensors and arrays into the arena, and give what `read` needs beside it, pickled.

        known: gives for an object that the reader has already what the reader's `recall` finds it by, else None.
        Raises ArenaFull; what was written before is then lost all the same.
        """
        leaves: list[Tensor] = []
        ends = [0]

        def place(leaf: Any) -> Any:
            if not isinstance(leaf, Tensor | np.ndarray):
                found = known(leaf)
                return None if found is None else ("known", found)
            tensor = torch.from_numpy(leaf) if isinstance(leaf, np.ndarray) else leaf.detach()
            shape = tuple(tensor.shape)
            if outline := tensor.numel() > 1 and not any(tensor.stride()):  # one number, expanded
                tensor = tensor[(0,) * tensor.dim()]
            flat = tensor.reshape(-1).contiguous() if tensor.numel() else tensor.new_empty(0)  # numpy's has no stride
            leaves.append(flat.view(torch.uint8))
            begin = -(-ends[-1] // _ALIGNED) * _ALIGNED
            ends.append(begin + len(leaves[-1]))
            return "leaf", begin, ends[-1], tensor.dtype, shape, outline, isinstance(leaf, Tensor)

        file = io.BytesIO()
        pickler = pickle.Pickler(file, protocol=pickle.HIGHEST_PROTOCOL)
        pickler.persistent_id = place  # type: ignore[method-assign]
        pickler.dump(value)
        if ends[-1] > self.bytes:
            raise ArenaFull(ends[-1])
        for leaf, end in zip(leaves, ends[1:], strict=True):
            self._view[end - len(leaf) : end] = leaf
        return file.getvalue()

    def read(self, pickled: bytes, recall: Mapping[str, Callable[..., Any]] | None = None) -> Any:
        """The object that was written. Its tensors are the arena's memory: the next `write` changes them."""

        def find(token: Any) -> Any:
            if token[0] == "known":
                kind, *key = token[1]
                return (recall or {})[kind](*key)
            _, begin, end, dtype, shape, outline, is_tensor = token
            flat = self._view[begin:end].view(dtype)
            leaf = flat.expand(shape) if outline else flat.reshape(shape)
            return leaf if is_tensor else leaf.numpy()

        unpickler = pickle.Unpickler(io.BytesIO(pickled))
        unpickler.persistent_load = find  # type: ignore[method-assign]
        return unpickler.load()


def portable(error: Exception) -> Exception:
    """The error, with where it was raised as a note; one that pickling loses becomes a RuntimeError of its name."""
    trace = "".join(traceback.format_exception(error))
    try:
        found = pickle.loads(pickle.dumps(error))
    except Exception as lost:  # whatever its constructor, or a class inside a function, may raise
        found = RuntimeError(f"{type(error).__name__}: {error}")
        found.add_note(f"(it could not be passed on between processes: {lost})")
    found.add_note(trace)
    return found
