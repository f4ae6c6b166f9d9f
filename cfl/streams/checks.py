"""Checks of data when a stream is built, so that a run does not fail on them later, or learn nothing from them."""

from collections.abc import Sequence
from typing import NamedTuple

import torch
from torch import Tensor

from cfl.core import ConfigError, DataError

_FEW = 1000  # classes that a head may have for any number of samples


class Labels(NamedTuple):
    """The targets of a task: train (n,) and test (m,), int64."""

    name: str
    train: Tensor
    test: Tensor


def check_normalisation(what: str, given: Tensor | None, shape: torch.Size) -> None:
    """Raise DataError unless the "mean" or "std" of a pool is finite and broadcasts to an image, and no std is 0."""
    if given is None:
        return
    fits = given.dim() <= len(shape) and all(a in (1, b) for a, b in zip(given.shape[::-1], shape[::-1]))
    if not fits or not given.isfinite().all() or what == "std" and not given.all():
        raise DataError(
            f"{what} of a pool must be finite{' and not 0' if what == 'std' else ''}, of a shape that broadcasts to an "
            f"image, {tuple(shape)}, not {given.flatten()[:4].tolist()} of shape {tuple(given.shape)}"
        )


def check_tokens(tokens: Tensor, vocabulary: int, mean: Tensor | None, std: Tensor | None) -> None:
    """Raise DataError unless tokens are (N, 2, length) int32 with ids below `vocabulary` and a mask of 0 and 1."""
    if mean is not None or std is not None:
        raise DataError("a pool of tokens has no mean and no std, because token ids are no quantities; leave them out")
    if tokens.dtype != torch.int32 or tokens.dim() != 3 or tokens.shape[1] != 2 or not tokens.shape[2]:
        raise DataError(
            f"tokens of a pool must be int32 of shape (N, 2, length), ids and mask, not {tokens.dtype} of shape "
            f"{tuple(tokens.shape)}"
        )
    for row, what, end in ((0, "token ids", vocabulary), (1, "an attention mask", 2)):
        values = tokens[:, row]
        if values.numel() and not 0 <= values.min() <= values.max() < end:
            raise DataError(
                f"row {row} of a sample holds {what} in [0, {end}), not in [{values.min()}, {values.max()}]; encode "
                "texts by the tokenizer of the network, and give its number of ids as the vocabulary"
            )


def check_clients(task: str, clients: Tensor | None, count: int) -> None:
    """Raise DataError unless clients are (count,) int64 numbers from 0, or None."""
    if clients is None:
        return
    if clients.dtype != torch.int64 or clients.shape != (count,) or (count and clients.min() < 0):
        raise DataError(
            f"clients of task '{task}' are {clients.dtype} of shape {tuple(clients.shape)}; give each of its {count} "
            "train samples one int64 number from 0"
        )


def check_rows(index: Tensor, targets: Tensor, images: Tensor) -> None:
    """Raise DataError unless index and targets are (n,) int64, and each index is a row of the images."""
    if index.shape != targets.shape or index.dim() != 1:
        shapes = f"{tuple(index.shape)} and {tuple(targets.shape)}"
        raise DataError(f"index and targets have shapes {shapes}; give one target a sample")
    if {index.dtype, targets.dtype} != {torch.int64}:
        raise DataError(f"index and targets are {index.dtype} and {targets.dtype}; make both torch.int64")
    if len(index) and not 0 <= index.min() <= index.max() < len(images):
        raise DataError(
            f"index lies in [{index.min()}, {index.max()}]; the pool has only the rows 0 to {len(images) - 1}"
        )


def check_permutation(permutation: Tensor | None, pixels: int) -> None:
    """Raise DataError unless it holds each of 0 to pixels - 1 once."""
    if permutation is not None and not permutation.sort().values.equal(torch.arange(pixels, device=permutation.device)):
        raise DataError(f"permutation must hold each of 0 to {pixels - 1} once, as torch.randperm draws it")


def check_targets(labels: Labels, classes: int) -> None:
    """Raise DataError for a task without train or test samples, and for a target outside [0, classes)."""
    for which, targets in (("train", labels.train), ("test", labels.test)):
        if not len(targets):
            raise DataError(f"task '{labels.name}' has no {which} samples; leave it out or add some")
        at = _first((targets < 0) | (targets >= classes))
        if at is not None:
            raise DataError(
                f"{which} target {targets[at]} of task '{labels.name}' (sample {at}) is no class of its head; map "
                f"targets to 0..{classes - 1} or give the head more classes"
            )


def check_head(stream: str, classes: int, tasks: Sequence[Labels]) -> None:
    """Raise DataError for far more classes than train samples, and for a test label that no train sample has.

    tasks: those that share the head.
    """
    size = sum(len(task.train) for task in tasks)
    if classes > max(size, _FEW):
        sets = [(f"{which} label", task.name, y) for task in tasks for which, y in zip(("train", "test"), task[1:])]
        which, name, targets = max(sets, key=lambda part: int(part[2].max()))
        raise DataError(
            f"stream '{stream}' has a head of {classes} classes for {size} train samples (largest label: {which} "
            f"{targets.max()} of task '{name}', sample {targets.argmax()}); number the classes 0, 1, 2, ... without "
            "gaps, or set multi_head=True, which does it for each task"
        )
    counts = torch.stack([task.train.bincount(minlength=classes) for task in tasks]).sum(0)
    for task in tasks:
        at = _first(counts[task.test] == 0)
        if at is not None:
            raise DataError(
                f"test label {task.test[at]} of task '{task.name}' (sample {at}) of stream '{stream}' has no train "
                "sample, so that no client can learn it; add some, or leave its test samples out"
            )


def check_finite(owner: str, which: str, index: Tensor, broken: Tensor) -> None:
    """Raise DataError for a sample whose row is broken. index: (n,) rows of the samples; broken: rows with NaN."""
    found = torch.isin(index, broken) if len(broken) else broken.bool()
    at = _first(found)
    if at is not None:
        raise DataError(
            f"{which} sample {at} of {owner} has a number that is NaN or infinite in float32 ({int(found.sum())} of "
            f"{len(index)} samples do); replace it, or leave the sample out"
        )


def check_device(device: torch.device | str) -> torch.device:
    """The device of that name. Raises ConfigError if torch has none."""
    try:
        return torch.empty(0, device=device).device
    except (AssertionError, RuntimeError, TypeError) as error:
        raise ConfigError(f"device={device!r} is no device that torch finds here; use 'cpu' or 'cuda'") from error


def _first(mask: Tensor) -> int | None:
    """Position of the first True of (n,), or None."""
    return int(mask.nonzero()[0]) if mask.any() else None
