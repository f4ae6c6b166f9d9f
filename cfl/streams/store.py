"""Streams of tasks over images kept once in memory: parts of a task are rows of a pool, gathered by index.

Permuted tasks share one pool and permute on gather; a task's parts never copy an image.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from cfl.core import rng
from cfl.core.errors import DataError
from cfl.streams.augment import augment, check


@dataclass(frozen=True, eq=False)
class Pool:
    """Images of a data set, kept once on the device.

    images: (N, C, H, W) or (N, d), uint8 or float32; uint8 is scaled to [0, 1] when gathered.
    mean, std: broadcastable against one image, e.g. (C, 1, 1), in units of the scaled image; None: no normalisation.
    Raises DataError for other dtypes.
    """

    images: Tensor
    mean: Tensor | None = None
    std: Tensor | None = None

    def __post_init__(self) -> None:
        if self.images.dtype not in (torch.uint8, torch.float32):
            raise DataError(f"images of a pool must be uint8 or float32, not {self.images.dtype}; convert them first")

    def to(self, device: torch.device | str) -> Pool:
        """The same pool on another device."""
        mean, std = (None if t is None else t.to(device) for t in (self.mean, self.std))
        return Pool(self.images.to(device), mean, std)

    def normalise_(self, x: Tensor) -> Tensor:
        """Scaled images (..., C, H, W) or samples (..., d), with the pool's mean and deviation; written in place."""
        if self.mean is not None:
            x.sub_(self.mean)
        return x if self.std is None else x.div_(self.std)


@dataclass(frozen=True, eq=False)
class TaskSamples:
    """The train or test samples of one task.

    index: (n,) int64 rows of the pool, also the sample ids; targets: (n,) int64 in [0, classes of the head);
    permutation: (pixels,) int64, applied to the flattened image on gather (the shape is kept), or None.
    augment: what `gather` does to images where it is given a key, of `cfl.streams.augment.KINDS`.
    Raises DataError where `index` and `targets` differ in length, ConfigError for an unknown augmentation and for one
    of samples that are not images.
    """

    pool: Pool
    index: Tensor
    targets: Tensor
    permutation: Tensor | None = None
    augment: tuple[str, ...] = ()

    def __post_init__(self) -> None:
        check(self.augment, self.pool.images.shape[1:])
        if self.index.shape != self.targets.shape or self.index.dim() != 1:
            shapes = f"{tuple(self.index.shape)} and {tuple(self.targets.shape)}"
            raise DataError(f"index and targets of a part have shapes {shapes}; give one target a sample")

    def __len__(self) -> int:
        return len(self.index)

    @property
    def sample_bytes(self) -> int:
        """Size of a stored sample and its label, in bytes."""
        return self.pool.images[0].nbytes + self.targets[:1].nbytes

    def gather(self, rows: Tensor, key: int | None = None) -> tuple[Tensor, Tensor]:
        """Samples at positions `rows` (b,): x (b, ...) float32, normalised and then permuted, and y (b,) int64.

        key: of the draws of the part's augmentation, which comes between the two; None: no augmentation.
        """
        x = self.pool.images.index_select(0, self.index[rows])  # a copy, so that the rest can be done in place
        if x.dtype == torch.uint8:
            x = x.float().div_(255)
        x = self.pool.normalise_(x)
        if key is not None and self.augment:
            black = x.new_zeros(x.shape[1], 1, 1)
            black = self.pool.normalise_(black) if "crop" in self.augment else black
            x = augment(x, self.augment, rng.generator(key), black)
        if self.permutation is not None:
            x = x.flatten(1).index_select(1, self.permutation).view(x.shape)
        return x, self.targets[rows]


@dataclass(frozen=True, eq=False)
class Task:
    """One task of a stream: its train and test parts and the number of classes of its head.

    Raises DataError for an empty part, a target outside [0, classes) and sample ids that occur twice.
    """

    name: str
    train: TaskSamples
    test: TaskSamples
    classes: int

    def __post_init__(self) -> None:
        for which, part in (("train", self.train), ("test", self.test)):
            if not len(part):
                raise DataError(f"task '{self.name}' has no {which} samples; leave it out or add some")
            low, high = int(part.targets.min()), int(part.targets.max())
            if low < 0 or high >= self.classes:
                raise DataError(
                    f"{which} targets of task '{self.name}' lie in [{low}, {high}]; "
                    f"map them to 0..{self.classes - 1} or give the head more classes"
                )
        ids = torch.cat([self.train.index, self.test.index])
        if len(ids.unique()) != len(ids):
            raise DataError(
                f"task '{self.name}' has a sample id twice; give each train and test sample its own pool row"
            )


@dataclass(frozen=True, eq=False)
class Stream:
    """The ordered tasks of a benchmark.

    input_shape: shape of one sample, (C, H, W) or (d,); multi_head: one head a task instead of one for all;
    source: paper and section; public: unlabelled inputs that the server and all clients have (its targets are zeros,
    which mean nothing), or None.
    Raises DataError for a stream without tasks, samples of another shape, and one head with unequal class counts.
    """

    name: str
    tasks: tuple[Task, ...]
    input_shape: tuple[int, ...]
    multi_head: bool
    source: str = ""
    public: TaskSamples | None = None

    def __post_init__(self) -> None:
        if not self.tasks:
            raise DataError(f"stream '{self.name}' has no task; give at least one")
        counts = sorted({task.classes for task in self.tasks})
        if not self.multi_head and len(counts) > 1:
            raise DataError(
                f"tasks of the single-head stream '{self.name}' have {counts} classes; "
                "give all the same number or set multi_head=True"
            )
        parts = [(f"task '{task.name}'", part) for task in self.tasks for part in (task.train, task.test)]
        if self.public is not None:
            parts.append(("the public part", self.public))
        for which, part in parts:
            shape = tuple(part.pool.images.shape[1:])
            if shape != tuple(self.input_shape):
                raise DataError(
                    f"{which} of stream '{self.name}' has samples of shape {shape}, not "
                    f"{tuple(self.input_shape)}; bring all to one shape"
                )

    def __len__(self) -> int:
        return len(self.tasks)

    def to(self, device: torch.device | str) -> Stream:
        """The same stream on another device; parts that share a pool or a permutation still do."""
        pools: dict[int, Pool] = {}
        permutations: dict[int, Tensor] = {}

        def move(part: TaskSamples) -> TaskSamples:
            key = id(part.pool)
            if key not in pools:
                pools[key] = part.pool.to(device)
            permutation = part.permutation
            if permutation is not None:
                permutation = permutations.setdefault(id(permutation), permutation.to(device))
            index, targets = part.index.to(device), part.targets.to(device)
            return replace(part, pool=pools[key], index=index, targets=targets, permutation=permutation)

        tasks = tuple(replace(task, train=move(task.train), test=move(task.test)) for task in self.tasks)
        return replace(self, tasks=tasks, public=None if self.public is None else move(self.public))

    def with_augment(self, kinds: Sequence[str]) -> Stream:
        """The same stream, whose train parts augment by `kinds` (see `TaskSamples`) where they are given a key."""
        tasks = tuple(replace(task, train=replace(task.train, augment=tuple(kinds))) for task in self.tasks)
        return replace(self, tasks=tasks)


def assemble(
    name: str,
    images: Sequence[Tensor],
    samples: Sequence[tuple[Tensor, Tensor, Tensor, Tensor]],
    multi_head: bool,
) -> Stream:
    """A stream over one pool made of several blocks of images.

    images: blocks (n, ...) of one sample shape, all uint8 or all of other dtypes (which become float32);
    samples: for each task the rows (in the blocks put end to end) and labels of its train, then of its test samples.
    With multi_head a task's labels become 0, 1, ... in ascending order; else all tasks have largest label + 1 classes.
    Raises DataError for blocks of unequal shape or kind, and what Task and Stream raise.
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


def unlabelled(pool: Pool) -> TaskSamples:
    """All samples of a pool as a public part, in their order; its targets are zeros."""
    index = torch.arange(len(pool.images))
    return TaskSamples(pool, index, torch.zeros_like(index))


def class_name(classes: Tensor) -> str:
    """The name of a task of those classes (k,), given in the order of the head: "classes 4 7"."""
    return "classes " + " ".join(str(label) for label in classes.tolist())
