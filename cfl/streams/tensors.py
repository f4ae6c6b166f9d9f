"""Streams from tensors."""

from collections.abc import Sequence
from dataclasses import replace

import torch
from torch import Tensor

from cfl.core import DataError
from cfl.streams.store import Pool, Stream, Task, TaskSamples, unlabelled


def from_tensors(
    tasks: Sequence[tuple[Tensor, Tensor, Tensor, Tensor]],
    name: str = "custom",
    multi_head: bool = False,
    public: Tensor | None = None,
) -> Stream:
    """Make a stream from your own tensors.

    tasks: (x_train, y_train, x_test, y_test) of each task: x (n, C, H, W) or (n, d), uint8 (scaled to [0, 1] later) or
    floating-point (converted to float32); y (n,) integer labels.
    multi_head: one head a task, whose labels become 0, 1, ...; otherwise one head for all labels of all tasks.
    public: unlabelled inputs of the same shape and kind, for methods that distil.
    Raises DataError for tasks without train or test samples, unequal lengths, shapes or kinds, and negative labels.
    """
    images, samples, start = [], [], 0
    for number, (x_train, y_train, x_test, y_test) in enumerate(tasks):
        pairs = []
        for x, y, which in ((x_train, y_train, "train"), (x_test, y_test, "test")):
            if y.dim() != 1 or len(x) != len(y) or y.is_floating_point():
                raise DataError(
                    f"{which} labels of task {number} are {y.dtype} of shape {tuple(y.shape)} for {len(x)} samples; "
                    "give one integer a sample"
                )
            images.append(x)
            pairs.append((torch.arange(start, start + len(x)), y.cpu().long()))
            start += len(x)
        samples.append((*pairs[0], *pairs[1]))
    stream = assemble(name, images, samples, multi_head)
    if public is None:
        return stream
    if (public.dtype == torch.uint8) != (images[0].dtype == torch.uint8):
        raise DataError(f"public inputs are {public.dtype} and the tasks' are {images[0].dtype}; convert either")
    return replace(stream, public=unlabelled(Pool(public if public.dtype == torch.uint8 else public.float())))


def assemble(
    name: str,
    images: Sequence[Tensor],
    samples: Sequence[tuple[Tensor, Tensor, Tensor, Tensor]],
    multi_head: bool,
) -> Stream:
    """Make a stream over one pool of several blocks of images.

    images: blocks (n, ...) of one sample shape, all uint8 or all of other dtypes (which become float32);
    samples: (train rows, train labels, test rows, test labels) of each task; rows count through all blocks.
    With multi_head a task's labels become 0, 1, ... in ascending order; otherwise every task has largest label + 1
    classes. Raises DataError for blocks of unequal shape or kind, and as Task and Stream.
    """
    kinds = {(tuple(block.shape[1:]), block.dtype == torch.uint8) for block in images}
    if len(kinds) > 1:
        found = ", ".join(f"{shape} {'uint8' if raw else 'float'}" for shape, raw in sorted(kinds))
        raise DataError(f"samples of stream '{name}' differ: {found}; bring all tasks to one shape and dtype")
    blocks = [block if block.dtype == torch.uint8 else block.float() for block in images]
    if not blocks:
        raise DataError(f"stream '{name}' has no task; give at least one")
    pool = Pool(blocks[0] if len(blocks) == 1 else torch.cat(blocks))
    classes = max((int(label.max()) + 1 for _, a, _, b in samples for label in (a, b) if len(label)), default=0)
    tasks = []
    for number, (train, train_y, test, test_y) in enumerate(samples):
        label, heads = f"task {number}", classes
        if multi_head:
            known = torch.cat([train_y, test_y]).unique()
            train_y, test_y = torch.searchsorted(known, train_y), torch.searchsorted(known, test_y)
            label, heads = class_name(known), len(known)
        tasks.append(Task(label, TaskSamples(pool, train, train_y), TaskSamples(pool, test, test_y), heads))
    return Stream(name, tuple(tasks), tuple(pool.images.shape[1:]), multi_head)


def class_name(classes: Tensor) -> str:
    """Name of the task with those classes (k,), in the order of the head: "classes 4 7"."""
    return "classes " + " ".join(str(label) for label in classes.tolist())
