"""The border to Avalanche: it makes the stream, and its experiences are read once into rows of a pool.

Avalanche is given data sets of indices, not of images, since its way of a sample is far too slow for a training loop.
Its "experience" is called task here. Nothing else in the package imports Avalanche, which takes seconds.
"""

from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import Tensor
from torch.utils.data import TensorDataset

from cfl.core import rng
from cfl.core.errors import ConfigError, DataError, unknown
from cfl.streams.datasets import Arrays
from cfl.streams.store import Pool, Stream, Task, TaskSamples, assemble, class_name
from cfl.streams.torchvision_fix import import_torchvision


class _Indices:
    """A data set whose samples are (row, target), so that a stream made from it says which rows each task has."""

    def __init__(self, targets: Tensor) -> None:
        self.targets = targets.tolist()

    def __len__(self) -> int:
        return len(self.targets)

    def __getitem__(self, row: int) -> tuple[int, int]:
        return row, self.targets[row]


def split(
    name: str,
    arrays: Arrays,
    tasks: int,
    *,
    seed: int,
    class_order: str,
    pool: Pool,
    keep: int | None = None,
    source: str = "",
) -> Stream:
    """A class-incremental stream: the classes in equal groups, one head a task, class ids from zero in each.

    tasks: number of groups; class_order: "random" (Avalanche's order for `seed`) or "natural" (0, 1, 2, ...);
    pool: train images, then test images (see `datasets.pooled`); keep: number of first tasks to return (default: all).
    A task's test part is the official test samples of its classes.
    Raises ConfigError for an unknown class order and classes that `tasks` does not divide, DataError for a class
    without training samples.
    """
    if class_order not in ("random", "natural"):
        raise unknown("class order", class_order, ("random", "natural"))
    classes = len(arrays.y_train.unique())
    if classes != int(arrays.y_train.max()) + 1:
        raise DataError(f"'{name}' lacks training samples of some classes; number the classes 0, 1, ... without gaps")
    if tasks < 1 or classes % tasks:
        raise ConfigError(f"tasks {tasks} does not divide the {classes} classes of '{name}'; choose one that does")
    import_torchvision()
    from avalanche.benchmarks import nc_benchmark

    with torch.random.fork_rng(devices=[]):  # Avalanche seeds torch's global generator
        benchmark = nc_benchmark(
            _Indices(arrays.y_train),
            _Indices(arrays.y_test),
            n_experiences=tasks,
            task_labels=True,
            seed=seed,
            fixed_class_order=list(range(classes)) if class_order == "natural" else None,
            class_ids_from_zero_in_each_exp=True,
        )
    found = []
    for train, test in list(zip(benchmark.train_stream, benchmark.test_stream, strict=True))[:keep]:
        rows, targets = _rows(train.dataset)
        test_rows, test_targets = _rows(test.dataset)
        head = torch.empty(classes // tasks, dtype=torch.int64)
        head[targets] = arrays.y_train[rows]
        test_part = TaskSamples(pool, test_rows + len(arrays.y_train), test_targets)
        found.append(Task(class_name(head), TaskSamples(pool, rows, targets), test_part, classes=len(head)))
    return Stream(name, tuple(found), tuple(pool.images.shape[1:]), multi_head=True, source=source)


def permuted(name: str, arrays: Arrays, tasks: int, *, seed: int, pool: Pool, source: str = "") -> Stream:
    """A stream of the same samples with permuted pixels: task 0 as they are, later ones each by its own permutation.

    One head for all tasks; pool: train images, then test images (see `datasets.pooled`), shared by all tasks.
    The permutation of task t is drawn with key(seed, "permutation", t), so more tasks leave the first ones as they are.
    """
    import_torchvision()
    from avalanche.benchmarks import benchmark_from_datasets
    from avalanche.benchmarks.utils import as_classification_dataset

    data = [as_classification_dataset(_Indices(y)) for y in (arrays.y_train, arrays.y_test)]
    benchmark = benchmark_from_datasets(train=data[:1] * tasks, test=data[1:] * tasks)
    classes, pixels = int(arrays.y_train.max()) + 1, pool.images[0].numel()
    found: list[Task] = []
    known: dict[int, tuple[Tensor, Tensor]] = {}  # all tasks have the same two data sets: each is read once
    for number, (train, test) in enumerate(zip(benchmark.train_stream, benchmark.test_stream, strict=True)):
        for dataset in (train.dataset, test.dataset):
            if id(dataset) not in known:
                known[id(dataset)] = _rows(dataset)
        (rows, targets), (test_rows, test_targets) = known[id(train.dataset)], known[id(test.dataset)]
        draws = rng.numpy_generator(rng.key(seed, "permutation", number))
        order = torch.from_numpy(draws.permutation(pixels)) if number else None
        train_part = TaskSamples(pool, rows, targets, order)
        test_part = TaskSamples(pool, test_rows + len(arrays.y_train), test_targets, order)
        found.append(Task(f"permutation {number}", train_part, test_part, classes))
    return Stream(name, tuple(found), tuple(pool.images.shape[1:]), multi_head=False, source=source)


def joined(name: str, sets: Mapping[str, tuple[Arrays, Pool]], *, classes: int, source: str = "") -> Stream:
    """A stream of one data set a task, in the order of `sets`, one head of `classes` each; tasks have the sets' names.

    sets: name to a data set and its pool, train images, then test images (see `datasets.pooled`). Sample ids are rows
    of a task's own pool.
    """
    import_torchvision()
    from avalanche.benchmarks import benchmark_from_datasets, task_incremental_benchmark
    from avalanche.benchmarks.utils import as_classification_dataset

    parts = {
        part: [as_classification_dataset(_Indices(getattr(arrays, f"y_{part}"))) for arrays, _ in sets.values()]
        for part in ("train", "test")
    }
    benchmark = task_incremental_benchmark(benchmark_from_datasets(**parts))
    found = []
    for train, test in zip(benchmark.train_stream, benchmark.test_stream, strict=True):
        label = list(sets)[train.task_label]
        arrays, pool = sets[label]
        rows, targets = _rows(train.dataset)
        test_rows, test_targets = _rows(test.dataset)
        test_part = TaskSamples(pool, test_rows + len(arrays.y_train), test_targets)
        found.append(Task(label, TaskSamples(pool, rows, targets), test_part, classes))
    return Stream(name, tuple(found), tuple(found[0].train.pool.images.shape[1:]), multi_head=True, source=source)


def from_benchmark(benchmark: Any, name: str = "custom", multi_head: bool | None = None) -> Stream:
    """A stream with the tasks of any Avalanche benchmark: one train and one test experience a task.

    multi_head: one head a task; None: where each task has its own task label and the tasks' classes are disjoint.
    Samples pass Avalanche's evaluation transforms once, so random augmentation is not applied; uint8 tensors are scaled
    to [0, 1] later. With multi-head a task's labels become 0, 1, ...; otherwise they stay as they are.
    Raises DataError for unequal numbers of train and test experiences and samples that are not tensors.
    """
    import_torchvision()
    pairs = list(benchmark.train_stream), list(benchmark.test_stream)
    if len(pairs[0]) != len(pairs[1]):
        raise DataError(
            f"benchmark '{name}' has {len(pairs[0])} train and {len(pairs[1])} test experiences; "
            "give each task one of both"
        )
    images = _Images(name)
    samples = [(*images.read(a, "train"), *images.read(b, "test")) for a, b in zip(*pairs, strict=True)]
    if multi_head is None:
        classes = getattr(benchmark, "original_classes_in_exp", None)
        multi_head = _own_heads(pairs[0], classes or [set(labels.tolist()) for _, labels, _, _ in samples])
    return assemble(name, images.blocks, samples, multi_head)


def _rows(dataset: Any) -> tuple[Tensor, Tensor]:
    """Rows and targets, both (n,), of an experience over `_Indices`, by ascending row (Avalanche sorts by class)."""
    from avalanche.benchmarks.utils.dataset_traversal_utils import single_flat_dataset

    flat = single_flat_dataset(dataset)
    rows = torch.tensor(flat[1] if flat else [dataset[i][0] for i in range(len(dataset))])
    rows, order = rows.sort()
    return rows, torch.tensor(list(dataset.targets))[order]


def _own_heads(experiences: Sequence[Any], classes: Sequence[set[int]]) -> bool:
    """Whether each of several tasks has one task label of its own and classes of its own."""
    labels = [tuple(getattr(experience, "task_labels", None) or ()) for experience in experiences]
    distinct = len(set(labels)) == len(labels) > 1 and all(len(label) == 1 for label in labels)
    return distinct and sum(map(len, classes)) == len(set().union(*classes))


class _Images:
    """Blocks of images of a benchmark: a tensor data set that several tasks share becomes one block."""

    def __init__(self, name: str) -> None:
        self.name, self.size = name, 0
        self.blocks: list[Tensor] = []
        self._known: dict[tuple[int, str], tuple[Any, int]] = {}  # holds the leaf too, so that its id stays its own

    def read(self, experience: Any, which: str) -> tuple[Tensor, Tensor]:
        """Rows of the blocks put end to end and labels, both (n,) int64, of the `which` part of a task."""
        dataset = experience.dataset.eval()
        if not len(dataset):
            raise DataError(f"a {which} experience of benchmark '{self.name}' has no samples; leave it out")
        flat = _flat_tensors(dataset)
        if flat:
            leaf, indices = flat
            key = (id(leaf), which)
            if key not in self._known:
                self._known[key] = leaf, self._add(leaf.tensors[0])
            return torch.tensor(indices) + self._known[key][1], torch.tensor([int(y) for y in dataset.targets])
        samples = [dataset[i] for i in range(len(dataset))]
        if not all(isinstance(sample[0], Tensor) for sample in samples):
            raise DataError(
                f"samples of benchmark '{self.name}' are {type(samples[0][0]).__name__}, not tensors; "
                "add torchvision.transforms.ToTensor() to its evaluation transform"
            )
        if len({sample[0].shape for sample in samples}) > 1:
            raise DataError(f"samples of benchmark '{self.name}' differ in shape; add a resize to its transforms")
        start = self._add(torch.stack([sample[0] for sample in samples]))
        return torch.arange(start, self.size), torch.tensor([int(sample[1]) for sample in samples])

    def _add(self, block: Tensor) -> int:
        start, self.size = self.size, self.size + len(block)
        self.blocks.append(block)
        return start


def _flat_tensors(dataset: Any) -> tuple[TensorDataset, list[int]] | None:
    """The tensor data set under an Avalanche one and the rows taken, where no transform touches the images."""
    from avalanche.benchmarks.utils.dataset_traversal_utils import single_flat_dataset

    flat = single_flat_dataset(dataset)
    if not flat or not hasattr(dataset, "targets"):
        return None
    leaf, indices, transforms = flat
    # a user's own subclass may do anything on access; Avalanche's only turns labels into integers
    plain = (
        type(leaf) is TensorDataset or isinstance(leaf, TensorDataset) and type(leaf).__module__.startswith("avalanche")
    )
    untouched = all(getattr(transform, "transforms", [transform])[:1] == [None] for transform in transforms)
    return (leaf, indices) if plain and untouched else None
