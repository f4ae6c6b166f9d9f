"""The interface to Avalanche: it makes the stream, and its experiences are read once into rows of a pool.

Avalanche gets data sets of row numbers instead of images, because loading images through it is too slow for a training
loop. An Avalanche experience is a task here. No other module uses Avalanche, whose import takes seconds.
"""

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor
from torch.utils.data import TensorDataset

from cfl.core import ConfigError, DataError, rng
from cfl.core.typed import described, typed
from cfl.streams.datasets import Arrays
from cfl.streams.store import Pool, Stream, Task, TaskSamples
from cfl.streams.tensors import as_inputs, as_labels, assemble, class_name
from cfl.streams.torchvision_fix import import_torchvision


class _Rows:
    """A data set whose samples are (row, target): a stream made from it tells the rows of each task."""

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
) -> Stream:
    """A class-incremental stream: equal groups of classes as tasks, one head a task, class ids from zero in each task.

    tasks: number of groups; class_order: "random" (Avalanche's order for `seed`) or "natural" (0, 1, 2, ...);
    pool: train images, then test images (see `datasets.pooled`); keep: return the first `keep` tasks (default: all).
    The test samples of a task are the official test samples of its classes.
    Raises ConfigError for a number of classes that `tasks` does not divide, DataError for a class that has no train
    samples.
    """
    classes = len(arrays.y_train.unique())
    if classes != int(arrays.y_train.max()) + 1:
        raise DataError(f"'{name}' lacks training samples of some classes; number the classes 0, 1, ... without gaps")
    if tasks < 1 or classes % tasks:
        raise ConfigError(f"tasks {tasks} does not divide the {classes} classes of '{name}'; choose one that does")
    import_torchvision()
    from avalanche.benchmarks import nc_benchmark

    with torch.random.fork_rng(devices=[]):  # Avalanche seeds torch's global generator
        benchmark = nc_benchmark(
            _Rows(arrays.y_train),
            _Rows(arrays.y_test),
            n_experiences=tasks,
            task_labels=True,
            seed=seed % 2**64,  # torch takes no larger seeds
            fixed_class_order=list(range(classes)) if class_order == "natural" else None,
            class_ids_from_zero_in_each_exp=True,
        )
    found = []
    for train, test in list(zip(benchmark.train_stream, benchmark.test_stream, strict=True))[:keep]:
        samples = _samples(train.dataset, pool)
        head = torch.empty(classes // tasks, dtype=torch.int64)
        head[samples.targets] = arrays.y_train[samples.index]
        test_samples = _samples(test.dataset, pool, start=len(arrays.y_train))
        found.append(Task(class_name(head), samples, test_samples, classes=len(head)))
    return Stream(name, tuple(found), tuple(pool.images.shape[1:]), multi_head=True)


def permuted(name: str, arrays: Arrays, tasks: int, *, seed: int, pool: Pool) -> Stream:
    """A stream of the same samples with permuted pixels: one permutation for each task, the identity for task 0.

    All tasks share one head and the pool: train images, then test images (see `datasets.pooled`).
    The permutation of task t is drawn with key(seed, "permutation", t), so it does not depend on the number of tasks.
    """
    import_torchvision()
    from avalanche.benchmarks import benchmark_from_datasets
    from avalanche.benchmarks.utils import as_classification_dataset

    data = [as_classification_dataset(_Rows(y)) for y in (arrays.y_train, arrays.y_test)]
    benchmark = benchmark_from_datasets(train=data[:1] * tasks, test=data[1:] * tasks)
    classes, pixels = int(arrays.y_train.max()) + 1, pool.images[0].numel()
    found: list[Task] = []
    known: dict[int, TaskSamples] = {}  # all tasks have the same two data sets; each is read once
    for number, (train, test) in enumerate(zip(benchmark.train_stream, benchmark.test_stream, strict=True)):
        draws = rng.numpy_generator(rng.key(seed, "permutation", number))
        order = torch.from_numpy(draws.permutation(pixels)) if number else None
        pair = []
        for dataset, start in ((train.dataset, 0), (test.dataset, len(arrays.y_train))):
            if id(dataset) not in known:
                known[id(dataset)] = _samples(dataset, pool, start)
            pair.append(replace(known[id(dataset)], permutation=order))
        found.append(Task(f"permutation {number}", pair[0], pair[1], classes))
    return Stream(name, tuple(found), tuple(pool.images.shape[1:]), multi_head=False)


def joined(name: str, sets: Mapping[str, tuple[Arrays, Pool]], *, classes: int) -> Stream:
    """A stream with one data set a task, in the order of `sets`, and one head of `classes` outputs a task.

    sets: name of the task to a data set and its pool: train images, then test images (see `datasets.pooled`). Sample
    ids are rows of the task's own pool.
    """
    import_torchvision()
    from avalanche.benchmarks import benchmark_from_datasets, task_incremental_benchmark
    from avalanche.benchmarks.utils import as_classification_dataset

    benchmark = task_incremental_benchmark(
        benchmark_from_datasets(
            train=[as_classification_dataset(_Rows(arrays.y_train)) for arrays, _ in sets.values()],
            test=[as_classification_dataset(_Rows(arrays.y_test)) for arrays, _ in sets.values()],
        )
    )
    found = []
    for train, test in zip(benchmark.train_stream, benchmark.test_stream, strict=True):
        label = list(sets)[train.task_label]
        arrays, pool = sets[label]
        test_samples = _samples(test.dataset, pool, start=len(arrays.y_train))
        found.append(Task(label, _samples(train.dataset, pool), test_samples, classes))
    return Stream(name, tuple(found), tuple(found[0].train.pool.images.shape[1:]), multi_head=True)


@typed
def from_benchmark(benchmark: Any, name: str = "custom", multi_head: bool | None = None) -> Stream:
    """Convert any Avalanche benchmark to a stream: one train and one test experience make a task.

    multi_head: one head a task; None: only if each task has its own task label and the tasks' classes are disjoint.
    Samples pass Avalanche's evaluation transforms once, without random augmentation; uint8 tensors are scaled to [0, 1]
    later. With multi_head a task's labels become 0, 1, ... in ascending order; otherwise they do not change.
    Raises ConfigError for arguments of another type; DataError for unequal numbers of train and test experiences, for
    samples that are not tensors, and as `from_tensors` for what they hold.
    """
    if not all(isinstance(getattr(benchmark, f"{which}_stream", None), Iterable) for which in ("train", "test")):
        raise ConfigError(
            f"from_benchmark: benchmark must be an Avalanche benchmark, with train_stream and test_stream, not "
            f"{described(benchmark)}; give tensors to from_tensors"
        )
    import_torchvision()
    pairs = list(benchmark.train_stream), list(benchmark.test_stream)
    if len(pairs[0]) != len(pairs[1]):
        raise DataError(
            f"benchmark '{name}' has {len(pairs[0])} train and {len(pairs[1])} test experiences; "
            "give each task one of each"
        )
    images = _Images(name)
    samples = [
        (*images.read(a, "train", number), *images.read(b, "test", number))
        for number, (a, b) in enumerate(zip(*pairs, strict=True))
    ]
    if multi_head is None:
        classes = getattr(benchmark, "original_classes_in_exp", None)
        multi_head = _own_heads(pairs[0], classes or [set(labels.tolist()) for _, labels, _, _ in samples])
    return assemble(name, images.blocks, samples, multi_head)


def _samples(dataset: Any, pool: Pool, start: int = 0) -> TaskSamples:
    """Samples of an experience over `_Rows`, by ascending row (Avalanche sorts by class); start: pool row of row 0."""
    from avalanche.benchmarks.utils.dataset_traversal_utils import single_flat_dataset

    flat = single_flat_dataset(dataset)
    rows = torch.tensor(flat[1] if flat else [dataset[i][0] for i in range(len(dataset))])
    rows, order = rows.sort()
    return TaskSamples(pool, rows + start, torch.tensor(list(dataset.targets))[order])


def _own_heads(experiences: Sequence[Any], classes: Sequence[set[int]]) -> bool:
    """True for two tasks or more that share neither task labels nor classes, with one label a task."""
    labels = [tuple(getattr(experience, "task_labels", None) or ()) for experience in experiences]
    distinct = len(set(labels)) == len(labels) > 1 and all(len(label) == 1 for label in labels)
    return distinct and sum(map(len, classes)) == len(set().union(*classes))


class _Images:
    """Blocks of images of a benchmark, by name; a tensor data set that several tasks share is one block."""

    def __init__(self, name: str) -> None:
        self.name, self.size = name, 0
        self.blocks: dict[str, Tensor] = {}
        self._known: dict[tuple[int, str], tuple[Any, int]] = {}  # with the data set, so that its id stays unique

    def read(self, experience: Any, which: str, number: int) -> tuple[Tensor, Tensor]:
        """Rows, counted through all blocks, and labels, both (n,) int64, of a task's train or test experience."""
        what = f"{which} samples of task {number} of benchmark '{self.name}'"
        dataset: Any = getattr(experience, "dataset", None)
        if not hasattr(dataset, "eval"):
            raise DataError(
                f"{what} are {described(dataset)}, not an Avalanche data set; use as_classification_dataset"
            )
        dataset = dataset.eval()
        if not len(dataset):
            raise DataError(f"{what} are none; leave the task out")
        flat = _flat_tensors(dataset)
        if flat:
            leaf, indices = flat
            key = (id(leaf), which)
            if key not in self._known:
                self._known[key] = leaf, self._add(leaf.tensors[0], what)
            rows, labels = torch.tensor(indices) + self._known[key][1], list(dataset.targets)
        else:
            samples = [dataset[i] for i in range(len(dataset))]
            if not all(isinstance(sample[0], Tensor) for sample in samples):
                raise DataError(
                    f"{what} are {type(samples[0][0]).__name__}, not tensors; "
                    "add torchvision.transforms.ToTensor() to its evaluation transform"
                )
            if len({sample[0].shape for sample in samples}) > 1:
                raise DataError(f"{what} differ in shape; add a resize to its transforms")
            start = self._add(torch.stack([sample[0] for sample in samples]), what)
            rows, labels = torch.arange(start, self.size), [sample[1] for sample in samples]
        return rows, as_labels(labels, what.replace("samples", "labels", 1), len(rows))

    def _add(self, block: Tensor, what: str) -> int:
        start, self.size = self.size, self.size + len(block)
        self.blocks[what] = as_inputs(block, what)
        return start


def _flat_tensors(dataset: Any) -> tuple[TensorDataset, list[int]] | None:
    """The tensor data set under an Avalanche one and the rows taken; None if a transform may change the images."""
    from avalanche.benchmarks.utils.dataset_traversal_utils import single_flat_dataset

    flat = single_flat_dataset(dataset)
    if not flat or not hasattr(dataset, "targets"):
        return None
    leaf, indices, transforms = flat
    # a user's subclass may change samples on access; Avalanche's subclass only converts labels to integers
    plain = (
        type(leaf) is TensorDataset or isinstance(leaf, TensorDataset) and type(leaf).__module__.startswith("avalanche")
    )
    untouched = all(getattr(transform, "transforms", [transform])[:1] == [None] for transform in transforms)
    return (leaf, indices) if plain and untouched else None
