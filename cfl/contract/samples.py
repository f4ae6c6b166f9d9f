"""Samples of a task, a client's share of them, and minibatches."""

from collections.abc import Sequence
from typing import NamedTuple, Protocol

import torch
from torch import Tensor
from torch.nn import functional


class Batch(NamedTuple):
    """A minibatch of one client.

    x: (batch, ...) inputs; of texts (batch, 2, l) int64, token ids and their mask;
    y: (batch,) int64 labels in [0, classes of the task's head);
    mask: (batch,) 1.0 for a sample, 0.0 for padding; ids: (batch,) int64, the same for a sample on every client.
    task: (batch,) int64 task of each sample, or None if every sample belongs to the round's task.
    """

    x: Tensor
    y: Tensor
    mask: Tensor
    ids: Tensor
    task: Tensor | None = None

    def __repr__(self) -> str:
        return f"Batch(x={tuple(self.x.shape)}, y={tuple(self.y.shape)})"

    @classmethod
    def whole(cls, x: Tensor, y: Tensor, ids: Tensor, task: Tensor | None = None) -> "Batch":
        """Make a batch without padding. The mask has the dtype of x, and float32 for integers."""
        dtype = x.dtype if x.is_floating_point() else torch.float32
        return cls(x, y, torch.ones(len(x), dtype=dtype, device=x.device), ids, task)


def joined(parts: Sequence[Tensor]) -> Tensor:
    """Concatenate a leaf (b, ...) of several batches; tokens (b, 2, l) are padded to the longest."""
    return parts[0] if len(parts) == 1 else torch.cat(equally_long(parts))  # no copy of a single part


def equally_long(leaves: Sequence[Tensor]) -> list[Tensor]:
    """The same leaf of several batches, with tokens (b, 2, l) padded to the longest by zeros in ids and mask."""
    if leaves[0].dim() != 3 or leaves[0].is_floating_point():
        return list(leaves)
    length = max(leaf.shape[2] for leaf in leaves)
    return [functional.pad(leaf, (0, length - leaf.shape[2])) for leaf in leaves]


def batched(rows: Tensor, size: int, together: bool) -> list[Tensor]:
    """Split rows (n,) into parts of `size`. together: whether a single last row joins the part before."""
    parts = list(rows.split(size))
    single = together and len(parts) > 1 and len(parts[-1]) == 1
    return [*parts[:-2], torch.cat(parts[-2:])] if single else parts


EMPTY = Batch(*(torch.empty(0) for _ in range(4)))


class Samples(Protocol):
    """The samples of one task, as the stream provides them."""

    @property
    def augment(self) -> tuple[str, ...]:
        """Kinds of random augmentation that `gather` applies to training images; empty for none."""

    @property
    def index(self) -> Tensor:
        """(n,) int64 ids."""

    @property
    def targets(self) -> Tensor:
        """(n,) int64 labels."""

    def __len__(self) -> int: ...

    def gather(self, rows: Tensor, key: int | None = None) -> tuple[Tensor, Tensor]:
        """Inputs (b, ...) and labels (b,) of the samples at rows (b,).

        key: of the random augmentation; None for the original images.
        """


class Share(NamedTuple):
    """A client's share of a task. rows: (n,) int64 positions among the task's samples."""

    samples: Samples
    rows: Tensor

    def __repr__(self) -> str:
        return f"Share({len(self.rows)} of {len(self.samples)} samples)"
