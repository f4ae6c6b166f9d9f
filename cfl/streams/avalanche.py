"""Streams from Avalanche benchmarks, whose experiences are read once into rows of a pool.

An Avalanche experience is a task here. No other module uses Avalanche, whose import takes seconds.
"""

from collections.abc import Iterable, Sequence
from typing import Any

import torch
from torch import Tensor
from torch.utils.data import TensorDataset

from cfl.core import ConfigError, DataError, packages
from cfl.core.typed import described, typed
from cfl.streams.store import Stream
from cfl.streams.tensors import as_inputs, as_labels, assemble


@typed
def from_benchmark(benchmark: Any, name: str = "custom", multi_head: bool | None = None) -> Stream:
    """Convert any Avalanche benchmark to a stream: one train and one test experience make a task.

    multi_head: one head a task; None: only if each task has its own task label and the tasks' classes are disjoint.
    Samples pass Avalanche's evaluation transforms once, without random augmentation; uint8 tensors are scaled to [0, 1]
    later. With multi_head a task's labels become 0, 1, ... in ascending order; otherwise they do not change.
    Raises ConfigError for arguments of another type and without Avalanche; DataError for unequal numbers of train and
    test experiences, for samples that are not tensors, and as `from_tensors` for what they hold.
    """
    if not all(isinstance(getattr(benchmark, f"{which}_stream", None), Iterable) for which in ("train", "test")):
        raise ConfigError(
            f"from_benchmark: benchmark must be an Avalanche benchmark, with train_stream and test_stream, not "
            f"{described(benchmark)}; give tensors to from_tensors"
        )
    packages.need("avalanche", "from_benchmark")
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
    """The tensor data set under an Avalanche one and the rows taken; None if a transform may change a sample."""
    from avalanche.benchmarks.utils.dataset_traversal_utils import single_flat_dataset

    flat = single_flat_dataset(dataset)
    if not flat or not hasattr(dataset, "targets"):
        return None
    leaf, indices, transforms = flat
    # a user's subclass may change samples on access; Avalanche's subclass only converts labels to integers
    plain = (
        type(leaf) is TensorDataset or isinstance(leaf, TensorDataset) and type(leaf).__module__.startswith("avalanche")
    )
    untouched = all(part is None for group in transforms for part in getattr(group, "transforms", [group]))
    return (leaf, indices) if plain and untouched else None
