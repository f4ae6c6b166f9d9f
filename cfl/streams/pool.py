"""Pools: the samples of a data set, each in memory once. Images, vectors, or the tokens of texts."""

from __future__ import annotations

from dataclasses import dataclass, replace
from functools import cached_property

import torch
from torch import Tensor

from cfl.contract import Pixels
from cfl.core import DataError
from cfl.core.typed import typed_fields
from cfl.streams import checks

_COLUMNS = 8  # lengths of batches of texts are multiples of it, so that recorded steps see few shapes


@dataclass(frozen=True, eq=False)
class Pool:
    """All samples of a data set, on one device.

    images: (N, C, H, W) or (N, d), uint8 or float32; `inputs` scales uint8 to [0, 1]. Or the tokens of texts,
    (N, 2, length) int32: row 0 of a sample holds token ids, row 1 the attention mask, 1 for a token and 0 for padding;
    mean, std: broadcastable to one image, e.g. (C, 1, 1), in units of the scaled image; None: no normalisation;
    vocabulary: of tokens: their ids are in [0, vocabulary); None for other samples.
    Raises ConfigError for fields of another type; DataError for samples of other dtypes or shapes, a mean or std that
    does not fit an image, is not finite, or is a std of 0, a normalisation of tokens, an id outside the vocabulary, and
    a mask with other numbers than 0 and 1.
    """

    images: Tensor
    mean: Tensor | None = None
    std: Tensor | None = None
    vocabulary: int | None = None

    def __post_init__(self) -> None:
        typed_fields(self)
        if self.vocabulary is not None:
            checks.check_tokens(self.images, self.vocabulary, self.mean, self.std)
            return
        if self.images.dtype not in (torch.uint8, torch.float32):
            raise DataError(f"images of a pool must be uint8 or float32, not {self.images.dtype}; convert them first")
        if self.images.dim() < 2:
            raise DataError(f"images of a pool must be (N, C, H, W) or (N, d), not {tuple(self.images.shape)}")
        checks.check_normalisation("mean", self.mean, self.images.shape[1:])
        checks.check_normalisation("std", self.std, self.images.shape[1:])

    def __repr__(self) -> str:
        size, *shape = self.images.shape
        kind = str(self.images.dtype).removeprefix("torch.")
        if self.vocabulary is not None:
            return f"Pool({size} texts, {tuple(shape)}, {kind}, vocabulary={self.vocabulary})"
        return f"Pool({size} images, {tuple(shape)}, {kind})"

    @cached_property
    def broken(self) -> Tensor:
        """Rows of images with NaN or infinity, usually none; looked for only once."""
        x = self.images
        if not x.is_floating_point() or not x.numel() or all(bound.isfinite() for bound in x.aminmax()):
            return torch.empty(0, dtype=torch.int64, device=x.device)
        return (~x.flatten(1).isfinite().all(1)).nonzero().flatten()

    @property
    def pixels(self) -> Pixels | None:
        """How 8-bit images become inputs; None for a pool of other samples."""
        return Pixels(self.mean, self.std) if self.images.dtype == torch.uint8 else None

    def to(self, device: torch.device | str) -> Pool:
        """The pool with its tensors on `device`; the pool itself if they are there."""
        if self.images.device == torch.device(device):
            return self
        mean, std = (None if t is None else t.to(device) for t in (self.mean, self.std))
        return replace(self, images=self.images.to(device), mean=mean, std=std)

    def inputs(self, rows: Tensor) -> Tensor:
        """Inputs of a network for rows (b,), as a copy.

        Images and vectors: (b, ...) float32, scaled and normalised. Tokens: (b, 2, l) int64 without the last columns
        that are padding in the whole batch, l being a multiple of 8 or the length of the pool's samples.
        """
        x = self.images.index_select(0, rows)
        if self.vocabulary is not None:
            return _without_padding(x).long()
        if x.dtype == torch.uint8:
            x = x.float().div_(255)
        return self.normalise_(x)

    def normalise_(self, x: Tensor) -> Tensor:
        """Normalise scaled images (..., C, H, W) or samples (..., d) in place, with the pool's mean and deviation."""
        if self.mean is not None:
            x.sub_(self.mean)
        return x if self.std is None else x.div_(self.std)


def _without_padding(tokens: Tensor) -> Tensor:
    """Tokens (b, 2, length) up to the last column with a token, rounded up to a multiple of `_COLUMNS`: (b, 2, l)."""
    used = tokens[:, 1].any(0).nonzero()
    longest = int(used[-1]) + 1 if len(used) else 1
    return tokens[:, :, : -(-longest // _COLUMNS) * _COLUMNS]
