"""Streams of tasks over pools of images: the samples of a task are rows of a pool, gathered by index.

Each image is in memory once. Permuted tasks share one pool and permute pixels on gather.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from cfl.core import DataError, rng
from cfl.streams.augment import augment, check


@dataclass(frozen=True, eq=False)
class Pool:
    """All images of a data set, on one device.

    images: (N, C, H, W) or (N, d), uint8 or float32; `TaskSamples.gather` scales uint8 to [0, 1].
    mean, std: broadcastable to one image, e.g. (C, 1, 1), in units of the scaled image; None: no normalisation.
    Raises DataError for other dtypes.
    """

    images: Tensor
    mean: Tensor | None = None
    std: Tensor | None = None

    def __post_init__(self) -> None:
        if self.images.dtype not in (torch.uint8, torch.float32):
            raise DataError(f"images of a pool must be uint8 or float32, not {self.images.dtype}; convert them first")

    def to(self, device: torch.device | str) -> Pool:
        """The pool with its tensors on `device`."""
        mean, std = (None if t is None else t.to(device) for t in (self.mean, self.std))
        return Pool(self.images.to(device), mean, std)

    def normalise_(self, x: Tensor) -> Tensor:
        """Normalise scaled images (..., C, H, W) or samples (..., d) in place, with the pool's mean and deviation."""
        if self.mean is not None:
            x.sub_(self.mean)
        return x if self.std is None else x.div_(self.std)


@dataclass(frozen=True, eq=False)
class TaskSamples:
    """The train or test samples of one task.

    index: (n,) int64 rows of the pool, also the sample ids; targets: (n,) int64 in [0, classes of the head);
    permutation: (pixels,) int64, applied to the flattened image on gather (the shape is kept), or None;
    augment: kinds of random augmentation, of `cfl.streams.augment.KINDS`, that `gather` applies when it gets a key.
    Raises DataError if `index` and `targets` differ in length, ConfigError for an unknown augmentation and for an
    augmentation of samples that are not images.
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
            raise DataError(f"index and targets have shapes {shapes}; give one target a sample")

    def __len__(self) -> int:
        return len(self.index)

    @property
    def sample_bytes(self) -> int:
        """Size of a stored sample and its label, in bytes."""
        return self.pool.images[0].nbytes + self.targets[:1].nbytes

    def gather(self, rows: Tensor, key: int | None = None) -> tuple[Tensor, Tensor]:
        """Samples at positions `rows` (b,): x (b, ...) float32 and y (b,) int64.

        Images are normalised, then augmented, then permuted. key: of the augmentation's draws; None: no augmentation.
        """
        x = self.pool.images.index_select(0, self.index[rows])  # a copy: the rest may write in place
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
    """One task of a stream: its train and test samples and the number of classes of its head.

    Raises DataError for a task without train or test samples, a target outside [0, classes) and duplicate sample ids.
    """

    name: str
    train: TaskSamples
    test: TaskSamples
    classes: int

    def __post_init__(self) -> None:
        for which, samples in (("train", self.train), ("test", self.test)):
            if not len(samples):
                raise DataError(f"task '{self.name}' has no {which} samples; leave it out or add some")
            low, high = int(samples.targets.min()), int(samples.targets.max())
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

    input_shape: shape of one sample, (C, H, W) or (d,); multi_head: one head a task instead of one for all tasks;
    public: unlabelled inputs that the server and all clients have (their targets are zeros without meaning), or None.
    Raises DataError for a stream without tasks, samples of another shape, and a single head with unequal class counts.
    """

    name: str
    tasks: tuple[Task, ...]
    input_shape: tuple[int, ...]
    multi_head: bool
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
        named = [(f"task '{task.name}'", samples) for task in self.tasks for samples in (task.train, task.test)]
        if self.public is not None:
            named.append(("the public data", self.public))
        for which, samples in named:
            shape = tuple(samples.pool.images.shape[1:])
            if shape != tuple(self.input_shape):
                raise DataError(
                    f"{which} of stream '{self.name}' has samples of shape {shape}, not "
                    f"{tuple(self.input_shape)}; bring all to one shape"
                )

    def __len__(self) -> int:
        return len(self.tasks)

    def to(self, device: torch.device | str) -> Stream:
        """The stream with its tensors on `device`; samples that share a pool or a permutation still share it."""
        pools: dict[int, Pool] = {}
        permutations: dict[int, Tensor] = {}

        def move(samples: TaskSamples) -> TaskSamples:
            key = id(samples.pool)
            if key not in pools:
                pools[key] = samples.pool.to(device)
            permutation = samples.permutation
            if permutation is not None:
                permutation = permutations.setdefault(id(permutation), permutation.to(device))
            index, targets = samples.index.to(device), samples.targets.to(device)
            return replace(samples, pool=pools[key], index=index, targets=targets, permutation=permutation)

        tasks = tuple(replace(task, train=move(task.train), test=move(task.test)) for task in self.tasks)
        return replace(self, tasks=tasks, public=None if self.public is None else move(self.public))

    def with_augment(self, kinds: Sequence[str]) -> Stream:
        """The stream with these kinds of augmentation for the train samples of every task (see `TaskSamples`)."""
        tasks = tuple(replace(task, train=replace(task.train, augment=tuple(kinds))) for task in self.tasks)
        return replace(self, tasks=tasks)


def unlabelled(pool: Pool) -> TaskSamples:
    """All samples of a pool, in order, with zeros as targets: public data of a stream."""
    index = torch.arange(len(pool.images))
    return TaskSamples(pool, index, torch.zeros_like(index))
