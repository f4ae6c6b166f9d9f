"""The streams of the built-in benchmarks: the classes of a data set in groups, permuted pixels, or several data sets.

Their tasks are those of Avalanche's `nc_benchmark` and `benchmark_from_datasets` with the same seed; a test compares
them. The samples of a task are in the order of their rows.
"""

from collections.abc import Mapping
from dataclasses import replace

import torch
from torch import Tensor

from cfl.core import ConfigError, DataError, rng
from cfl.streams.datasets import Arrays
from cfl.streams.store import Pool, Stream, Task, TaskSamples
from cfl.streams.tensors import class_name


def split(
    name: str,
    arrays: Arrays,
    tasks: int,
    *,
    seed: int,
    class_order: str,
    pool: Pool,
    keep: int | None = None,
) -> Stream:
    """A stream that splits the classes: equal groups of them as tasks, one head a task, class ids from zero in each.

    tasks: number of groups; class_order: "random" (that of Avalanche's `nc_benchmark` for `seed`) or "natural" (0, 1,
    2, ...); pool: train images, then test images (see `datasets.pooled`); keep: return the first `keep` tasks
    (default: all). The test samples of a task are the official test samples of its classes.
    Raises ConfigError for a number of classes that `tasks` does not divide, DataError for train labels that are not 0,
    1, 2, ... without gaps, and for a test label that no train sample has.
    """
    labels = arrays.y_train.unique()
    classes = len(labels)
    if not labels.equal(torch.arange(classes)):
        raise DataError(
            f"train labels of '{name}' are {classes} numbers from {labels[0]} to {labels[-1]}, so samples of some "
            "classes are missing; replace its files, or number the classes 0, 1, ... without gaps"
        )
    outside = (arrays.y_test < 0) | (arrays.y_test >= classes)
    if outside.any():
        at = int(outside.nonzero()[0])
        raise DataError(
            f"test label {arrays.y_test[at]} of '{name}' (sample {at}) has no train sample; replace its files, or "
            "leave such test samples out"
        )
    if tasks < 1 or classes % tasks:
        raise ConfigError(f"tasks {tasks} does not divide the {classes} classes of '{name}'; choose one that does")
    # Seeds of torch have 64 bits.
    drawn = torch.randperm(classes, generator=rng.generator(seed % 2**64))
    order = torch.arange(classes) if class_order == "natural" else drawn
    found = []
    for head in order.view(tasks, -1)[:keep]:
        train = _of_classes(head, arrays.y_train, pool)
        test = _of_classes(head, arrays.y_test, pool, start=len(arrays.y_train))
        found.append(Task(class_name(head), train, test, len(head)))
    return Stream(name, tuple(found), tuple(pool.images.shape[1:]), multi_head=True)


def permuted(name: str, arrays: Arrays, tasks: int, *, seed: int, pool: Pool) -> Stream:
    """A stream of the same samples with permuted pixels: one permutation for each task, the identity for task 0.

    All tasks share one head and the pool: train images, then test images (see `datasets.pooled`).
    The permutation of task t is drawn with key(seed, "permutation", t), so it does not depend on the number of tasks.
    """
    classes, pixels = int(arrays.y_train.max()) + 1, pool.images[0].numel()
    train, test = _official(arrays, pool)
    found: list[Task] = []
    for number in range(tasks):
        draws = rng.numpy_generator(rng.key(seed, "permutation", number))
        order = torch.from_numpy(draws.permutation(pixels)) if number else None
        pair = replace(train, permutation=order), replace(test, permutation=order)
        found.append(Task(f"permutation {number}", *pair, classes=classes))
    return Stream(name, tuple(found), tuple(pool.images.shape[1:]), multi_head=False)


def joined(name: str, sets: Mapping[str, tuple[Arrays, Pool]], *, classes: int) -> Stream:
    """A stream with one data set a task, in the order of `sets`, and one head of `classes` outputs a task.

    sets: name of the task to a data set and its pool: train images, then test images (see `datasets.pooled`). Sample
    ids are rows of the task's own pool.
    """
    found = [Task(label, *_official(arrays, pool), classes=classes) for label, (arrays, pool) in sets.items()]
    return Stream(name, tuple(found), tuple(found[0].train.pool.images.shape[1:]), multi_head=True)


def whole(name: str, arrays: Arrays, pool: Pool, *, classes: int) -> Stream:
    """A stream whose only task is a whole data set, with a head of `classes` outputs."""
    task = Task(name, *_official(arrays, pool), classes=classes)
    return Stream(name, (task,), tuple(pool.images.shape[1:]), multi_head=False)


def _of_classes(classes: Tensor, labels: Tensor, pool: Pool, start: int = 0) -> TaskSamples:
    """The samples of some classes, which become 0, 1, ... in the order of `classes`. start: pool row of the labels."""
    rows, targets = (labels[:, None] == classes).nonzero(as_tuple=True)
    return TaskSamples(pool, rows + start, targets)


def _official(arrays: Arrays, pool: Pool) -> tuple[TaskSamples, TaskSamples]:
    """All train samples and all test samples of a data set."""
    train, test = torch.arange(len(pool.images)).split([len(arrays.y_train), len(arrays.y_test)])
    return TaskSamples(pool, train, arrays.y_train), TaskSamples(pool, test, arrays.y_test)
