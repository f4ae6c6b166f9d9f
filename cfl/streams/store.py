"""Streams of tasks over pools of samples: the samples of a task are rows of a pool, gathered by index.

Each sample is in memory once. Permuted tasks share one pool and permute pixels on gather.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from cfl.core import DataError, content, rng
from cfl.core.typed import typed, typed_fields
from cfl.streams import checks
from cfl.streams.augment import augment, check
from cfl.streams.pool import Pool
from cfl.streams.tokens import Encoder


@dataclass(frozen=True, eq=False)
class TaskSamples:
    """The train or test samples of one task.

    index: (n,) int64 rows of the pool, also the sample ids; targets: (n,) int64 in [0, classes of the head);
    permutation: (pixels,) int64, applied to the flattened image on gather (the shape is kept), or None;
    augment: kinds of random augmentation, of `cfl.streams.augment.KINDS`, that `gather` applies when it gets a key.
    Raises DataError if `index` and `targets` are not int64 or differ in length, for a row that the pool does not have,
    for a permutation of other pixels, and for one of tokens; ConfigError for fields of another type, an unknown
    augmentation, and an augmentation of samples that are not images.
    """

    pool: Pool
    index: Tensor
    targets: Tensor
    permutation: Tensor | None = None
    augment: tuple[str, ...] = ()

    def __post_init__(self) -> None:
        typed_fields(self)
        check(self.augment, self.pool.images.shape[1:])
        checks.check_rows(self.index, self.targets, self.pool.images)
        if self.permutation is not None and self.pool.vocabulary is not None:
            raise DataError("token ids and their mask cannot be permuted like pixels; leave permutation out")
        checks.check_permutation(self.permutation, self.pool.images[:1].numel())

    def __len__(self) -> int:
        return len(self.index)

    def __repr__(self) -> str:
        permuted = ", permuted" if self.permutation is not None else ""
        return f"TaskSamples({len(self)} samples, {tuple(self.pool.images.shape[1:])}{permuted})"

    @property
    def sample_bytes(self) -> int:
        """Size of a stored sample and its label, in bytes."""
        return self.pool.images[0].nbytes + self.targets[:1].nbytes

    def gather(self, rows: Tensor, key: int | None = None) -> tuple[Tensor, Tensor]:
        """Samples at positions `rows` (b,): x (b, ...) as `Pool.inputs` returns them, and y (b,) int64.

        Images are normalised, then augmented, then permuted. key: of the augmentation's draws; None: no augmentation.
        """
        x = self.pool.inputs(self.index[rows])
        if key is not None and self.augment:
            black = x.new_zeros(x.shape[1:])
            black = self.pool.normalise_(black) if "crop" in self.augment else black
            x = augment(x, self.augment, rng.generator(key), black)
        if self.permutation is not None:
            x = x.flatten(1).index_select(1, self.permutation).view(x.shape)
        return x, self.targets[rows]


@dataclass(frozen=True, eq=False)
class Task:
    """One task of a stream: its train and test samples and the number of classes of its head.

    clients: (n,) int64 client that holds each train sample, for partition.name=stream; None if the stream does not say.
    Raises ConfigError for fields of another type; DataError for a task without train or test samples, a target outside
    [0, classes), duplicate sample ids, and clients that are not one number from 0 for each train sample.
    """

    name: str
    train: TaskSamples
    test: TaskSamples
    classes: int
    clients: Tensor | None = None

    def __repr__(self) -> str:
        return f"Task({self.name!r}, {self.classes} classes, {len(self.train)} train and {len(self.test)} test samples)"

    @property
    def labels(self) -> checks.Labels:
        """Name and targets of the task."""
        return checks.Labels(self.name, self.train.targets, self.test.targets)

    def __post_init__(self) -> None:
        typed_fields(self)
        checks.check_targets(self.labels, self.classes)
        checks.check_clients(self.name, self.clients, len(self.train))
        ids = torch.cat([self.train.index, self.test.index])
        if len(ids.unique()) != len(ids):
            raise DataError(
                f"task '{self.name}' has a sample id twice; give each train and test sample its own pool row"
            )


@dataclass(frozen=True, eq=False)
class Stream:
    """The ordered tasks of a benchmark.

    input_shape: shape of one sample, (C, H, W), (d,), or (2, length) of tokens;
    multi_head: one head a task instead of one for all tasks;
    growing: the heads are parts of one head, and a task's targets and `classes` count those of earlier tasks, too;
    public: unlabelled inputs that the server and all clients have (their targets are zeros without meaning), or None;
    encoder: makes samples of texts, in a stream of texts; None otherwise.
    Raises ConfigError for fields of another type; DataError for a stream without tasks, samples of another shape, a
    single head with unequal class counts or one that grows, a head with more than 1,000 classes and fewer train
    samples, a test label without train samples (of the task, or with a single head of any task), a sample with NaN or
    infinity, and empty public data.
    """

    name: str
    tasks: tuple[Task, ...]
    input_shape: tuple[int, ...]
    multi_head: bool
    public: TaskSamples | None = None
    growing: bool = False
    encoder: Encoder | None = None

    def __post_init__(self) -> None:
        typed_fields(self)
        if not self.tasks:
            raise DataError(f"stream '{self.name}' has no task; give at least one")
        counts = sorted({task.classes for task in self.tasks})
        if self.growing and not self.multi_head:
            raise DataError(f"stream '{self.name}' has growing=True, so its head has parts: set multi_head=True")
        if not self.multi_head and len(counts) > 1:
            raise DataError(
                f"tasks of the single-head stream '{self.name}' have {counts} classes; "
                "give all the same number or set multi_head=True"
            )
        sets = [
            (f"task '{task.name}'", which, getattr(task, which)) for task in self.tasks for which in ("train", "test")
        ]
        if self.public is not None:
            if not len(self.public):
                raise DataError(f"the public data of stream '{self.name}' have no samples; give some, or None")
            sets.append(("the public data", "public", self.public))
        for owner, which, samples in sets:
            shape = tuple(samples.pool.images.shape[1:])
            if shape != tuple(self.input_shape):
                raise DataError(
                    f"{owner} of stream '{self.name}' has samples of shape {shape}, not "
                    f"{tuple(self.input_shape)}; bring all to one shape"
                )
            if samples.pool.vocabulary != self.vocabulary:
                raise DataError(
                    f"{owner} of stream '{self.name}' has a vocabulary of {samples.pool.vocabulary} token ids, not "
                    f"{self.vocabulary}; encode all texts of a stream by one tokenizer"
                )
            checks.check_finite(f"{owner} of stream '{self.name}'", which, samples.index, samples.pool.broken)
        for tasks in [[task] for task in self.tasks] if self.multi_head else [self.tasks]:
            checks.check_head(self.name, tasks[0].classes, [task.labels for task in tasks])

    def __len__(self) -> int:
        return len(self.tasks)

    def __repr__(self) -> str:
        train, test = (sum(len(getattr(task, which)) for task in self.tasks) for which in ("train", "test"))
        public = "" if self.public is None else f", {len(self.public)} public"
        return (
            f"Stream({self.name!r}, tasks={len(self)}, scenario={self.scenario!r}, input_shape={self.input_shape}, "
            f"{train} train and {test} test{public} samples)"
        )

    @property
    def vocabulary(self) -> int | None:
        """Number of token ids in a stream of texts, for the network's embedding; None for other samples."""
        return self.tasks[0].train.pool.vocabulary

    @property
    def scenario(self) -> str:
        """What tells the task of a test sample: "task", "class" or "domain", see `cfl.streams.scenario`."""
        return "class" if self.growing else "task" if self.multi_head else "domain"

    @property
    def heads(self) -> tuple[int, ...]:
        """Number of outputs that each task adds to those of a model with a head, or a part of the head, a task."""
        counts = [task.classes for task in self.tasks]
        return tuple(new - old for new, old in zip(counts, [0, *counts])) if self.growing else tuple(counts)

    def to(self, device: torch.device | str) -> Stream:
        """The stream with its tensors on `device`; samples that share a pool or a permutation still share it.

        Raises ConfigError for a device that torch does not have.
        """
        device = checks.check_device(device)
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

        def moved(task: Task) -> Task:
            clients = None if task.clients is None else task.clients.to(device)
            return replace(task, train=move(task.train), test=move(task.test), clients=clients)

        tasks = tuple(map(moved, self.tasks))
        return replace(self, tasks=tasks, public=None if self.public is None else move(self.public))

    @typed
    def with_augment(self, kinds: Sequence[str]) -> Stream:
        """The stream with these kinds of augmentation for the train samples of every task (see `TaskSamples`)."""
        tasks = tuple(replace(task, train=replace(task.train, augment=tuple(kinds))) for task in self.tasks)
        return replace(self, tasks=tasks)

    def digests(self, public: bool) -> dict[str, str]:
        """Hash the data of each task and, if wanted, the public data: 32 hex digits by a name for messages."""
        rows: dict[tuple[int, int], str] = {}  # permuted tasks share theirs

        def parts(samples: TaskSamples) -> list[object]:
            pool, key = samples.pool, (id(samples.pool), id(samples.index))
            if key not in rows:
                rows[key] = content.of_rows(pool.images, samples.index)
            return [rows[key], pool.mean, pool.std, samples.index, samples.targets, samples.permutation]

        found: dict[str, str] = {}
        for number, task in enumerate(self.tasks):
            name = f"the data of task '{task.name}'"
            own = [number, self.multi_head, self.growing, task.classes, parts(task.train), parts(task.test)]
            own += [] if task.clients is None else [task.clients]
            found[name] = content.digest([found.get(name), *own])  # two tasks may have one name
        if public and self.public is not None:
            found["the public data"] = content.digest(parts(self.public))
        return found


def unlabelled(pool: Pool) -> TaskSamples:
    """All samples of a pool, in order, with zeros as targets: public data of a stream."""
    index = torch.arange(len(pool.images))
    return TaskSamples(pool, index, torch.zeros_like(index))
