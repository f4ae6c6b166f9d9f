"""Streams from tensors, NumPy arrays and lists."""

from collections.abc import Callable, Iterable, Mapping, Sequence, Sized
from dataclasses import replace
from typing import Any, TypeVar

import numpy as np
import torch
from torch import Tensor

from cfl.core import DataError
from cfl.core.typed import described, typed
from cfl.streams.store import Pool, Stream, Task, TaskSamples, unlabelled

_PARTS = "(x_train, y_train, x_test, y_test)"
Inputs = TypeVar("Inputs", bound=Sized)


@typed
def from_tensors(
    tasks: Iterable[Sequence[Any]],
    name: str = "custom",
    multi_head: bool = False,
    public: Any = None,
    clients: Iterable[Any] | None = None,
) -> Stream:
    """Make a stream from your own tensors, NumPy arrays or lists.

    tasks: (x_train, y_train, x_test, y_test) of each task: x (n, C, H, W) or (n, d), uint8 (scaled to [0, 1] later) or
    other numbers (converted to float32); y (n,) labels 0, 1, 2, ...
    multi_head: one head a task, whose labels become 0, 1, ...; otherwise one head for all labels of all tasks.
    public: unlabelled inputs of the same shape and kind, for methods that distil.
    clients: of each task the client (n_train,) that holds each train sample, 0, 1, 2, ...; see partition.name=stream.
    Raises ConfigError for arguments of another type. Raises DataError for a task without these four parts; samples and
    labels that are not numbers, not finite, empty, or of unequal lengths, shapes or kinds; negative labels; more
    than 1,000 classes if there are fewer train samples; and test labels that no train sample has.
    """
    images, samples = parts_of(tasks, as_inputs)
    stream = assemble(name, images, samples, multi_head)
    if clients is not None:
        stream = _held(stream, [*clients])
    if public is None:
        return stream
    inputs, kind = as_inputs(public, "public inputs").clone(), stream.tasks[0].train.pool.images.dtype
    if inputs.dtype != kind:
        raise DataError(f"public inputs are {inputs.dtype} and the tasks' are {kind}; convert either")
    return replace(stream, public=unlabelled(Pool(inputs)))


def parts_of(
    tasks: Iterable[Sequence[Any]], read: Callable[[Any, str], Inputs]
) -> tuple[dict[str, Inputs], list[tuple[Tensor, Tensor, Tensor, Tensor]]]:
    """Read (x_train, y_train, x_test, y_test) of each task; `assemble` says what is returned.

    read: makes the inputs from x and its name, which errors have. Raises DataError for a task without these four
    parts, and as `as_labels`.
    """
    inputs: dict[str, Inputs] = {}
    samples, start = [], 0
    for number, parts in enumerate(tasks):
        if not isinstance(parts, list | tuple) or len(parts) != 4:
            raise DataError(f"task {number} must be {_PARTS}, not {described(parts)}; give a list of tasks")
        rows: list[Tensor] = []
        for x, y, which in ((*parts[:2], "train"), (*parts[2:], "test")):
            what = f"{which} samples of task {number}"
            inputs[what] = read(x, what)
            size = len(inputs[what])
            rows += [torch.arange(start, start + size), as_labels(y, f"{which} labels of task {number}", size)]
            start += size
        samples.append((rows[0], rows[1], rows[2], rows[3]))
    return inputs, samples


def _held(stream: Stream, clients: Sequence[Any]) -> Stream:
    """Return the stream with the client (n_train,) of each train sample, given for each task."""
    if len(clients) != len(stream):
        raise DataError(f"clients are given for {len(clients)} of {len(stream)} tasks; give an array for each task")
    tasks = [
        replace(task, clients=as_labels(own, f"clients of task {number}", len(task.train)))
        for number, (task, own) in enumerate(zip(stream.tasks, clients, strict=True))
    ]
    return replace(stream, tasks=tuple(tasks))


def as_inputs(value: Any, what: str) -> Tensor:
    """Samples (n, ...) as uint8, or else float32. what: these samples, for the DataError of any that cannot be."""
    x = _tensor(value, what)
    if x.dim() < 2 or 0 in x.shape[1:]:
        raise DataError(f"{what} have shape {tuple(x.shape)}; give (n, d) or (n, channels, height, width)")
    return x if x.dtype == torch.uint8 else x.float()


def as_labels(value: Any, what: str, count: int) -> Tensor:
    """Labels (count,) int64, from whole numbers of any type, (count,) or (count, 1). what: as for `as_inputs`."""
    y = _tensor(value, what, "whole numbers, as numpy.unique(names, return_inverse=True)[1] makes of names")
    if y.shape not in ((count,), (count, 1)):
        raise DataError(
            f"{what} are {y.dtype} of shape {tuple(y.shape)} for {count} samples; give one integer a sample"
        )
    y = y.flatten() if y.is_floating_point() else y.flatten().long()
    labels = y.to(torch.int64, copy=True)  # the caller may use the array again
    bad = ((y != labels) | (labels < 0)).nonzero()
    if len(bad):
        at = int(bad[0])
        raise DataError(f"{what} must be 0, 1, 2, ..., not {y[at].item():.15g} (sample {at}); number them so")
    return labels


def _tensor(value: Any, what: str, numbers: str = "real numbers") -> Tensor:
    """A tensor in CPU memory from a tensor, an array, or nested lists; raises DataError if that is not possible.

    what, numbers: the value and its entries, for the error.
    """
    if np.ma.is_masked(value):
        raise DataError(f"{what} have masked entries; fill them, or leave their samples out")
    try:
        if isinstance(value, Tensor):
            found = value.detach().cpu().to_dense()
        else:
            array = np.asarray(value)
            # torch takes only writable arrays in C order and in the machine's order of bytes; others are copied
            found = torch.from_numpy(np.require(array, array.dtype.newbyteorder("="), ["C", "W"]))
        if found.is_complex() or found.is_quantized:
            raise TypeError(f"{found.dtype} is no type of real numbers")
    except (TypeError, ValueError, RuntimeError) as error:
        raise DataError(
            f"{what} are {described(value)}; give a tensor, an array or equally long lists, of {numbers}"
        ) from error
    return found


def assemble(
    name: str,
    images: Mapping[str, Tensor],
    samples: Sequence[tuple[Tensor, Tensor, Tensor, Tensor]],
    multi_head: bool,
    vocabulary: int | None = None,
) -> Stream:
    """Make a stream over one pool of several blocks of images.

    images: blocks (n, ...) of one sample shape, all uint8 or all float32, as `as_inputs` makes them, with their names;
    samples: (train rows, train labels, test rows, test labels) of each task; rows count through all blocks;
    vocabulary: of tokens, as in `Pool`.
    With multi_head a task's labels become 0, 1, ... in ascending order; otherwise every task has largest label + 1
    classes. Raises DataError for blocks of unequal shape or kind, and as Task and Stream.
    """
    if not images:
        raise DataError(f"stream '{name}' has no task; give at least one")
    kinds = {what: f"{block.dtype} of shape {tuple(block.shape[1:])}" for what, block in images.items()}
    first, *rest = kinds
    for what in rest:
        if kinds[what] != kinds[first]:
            raise DataError(
                f"{what} of stream '{name}' are {kinds[what]}, and {first} {kinds[first]}; "
                "bring all tasks to one shape and dtype"
            )
    pool = Pool(torch.cat(list(images.values())), vocabulary=vocabulary)
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
