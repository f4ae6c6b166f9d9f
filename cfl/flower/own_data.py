"""Data of a node's own, in place of a part of the run's benchmark: a file for each task, or a registered benchmark."""

import json
from dataclasses import asdict, dataclass, replace
from itertools import zip_longest
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor

from cfl import streams
from cfl.config.schema import RunConfig
from cfl.core import DataError, plugins
from cfl.core.errors import FEW_NAMES, few
from cfl.runtime.population import Population
from cfl.streams import Stream, TextOptions, checks, npz
from cfl.streams.partition import Deal
from cfl.streams.scenario import with_scenario
from cfl.streams.store import Pool, Task, TaskSamples
from cfl.streams.tensors import as_inputs, as_labels


def described(stream: Stream, config: RunConfig) -> str:
    """Return as JSON what nodes have to know of the run's tasks: all but samples.

    stream: of the run's benchmark, whose labels those of the nodes' data are. The tasks are those under the scenario of
    the run; a node cannot apply the scenario itself, since it may have samples of some labels only.
    """

    def listed(value: Tensor | None) -> Any:
        return None if value is None else value.tolist()

    run, tasks = with_scenario(stream, config.scenario), list[dict[str, Any]]()
    for before, task, outputs in zip(stream.tasks, run.tasks, run.heads, strict=True):
        pool, labels = task.train.pool, _numbers(before, task, outputs)
        sizes = {"classes": task.classes, "benchmark_classes": before.classes}
        tasks.append({"name": task.name, **sizes, "labels": labels, "mean": listed(pool.mean), "std": listed(pool.std)})
    heads = {"multi_head": run.multi_head, "growing": run.growing}
    text = {} if run.encoder is None else asdict(run.encoder.options)
    build = {"tasks": config.tasks, "seed": config.seed, "class_order": config.class_order}
    return json.dumps({
        "name": run.name, "input_shape": run.input_shape, **heads, "tasks": tasks, "vocabulary": run.vocabulary,
        "build": build, "text": text,
    })  # fmt: skip


def read(source: str, description: str, data_root: Path | None) -> Stream:
    """Return a node's data as a stream with the tasks of the run.

    source: a folder with task0.npz, task1.npz, ..., each with arrays x (n, ...) and y (n,) as in `cfl.from_tensors`, or
    the name of a registered benchmark with the same tasks, which is built with the seed and the order of classes of the
    run. A task without a file has no samples on this node.
    Raises DataError for data that do not fit the run.
    """
    check(source)
    run = json.loads(description)
    tasks, shape = run["tasks"], tuple(run["input_shape"])
    if source in plugins.benchmarks.names():
        built = streams.build(source, **run["build"], data_root=data_root, text=TextOptions(**run["text"]))
        _check_tasks(source, built, tasks)
        found = [task.train for task in built.tasks]
    else:
        files = [Path(source, f"task{number}.npz") for number in range(len(tasks))]
        found = [_samples(file, task, shape, run["vocabulary"]) for file, task in zip(files, tasks, strict=True)]
    if not any(map(len, found)):
        raise DataError(
            f"'{source}' has no data of the run's tasks; name the files task0.npz to task{len(tasks) - 1}.npz"
        )
    for number, samples in enumerate(found):
        own = tuple(samples.pool.images.shape[1:])
        if own != shape:
            raise DataError(f"samples of task {number} in '{source}' have shape {own}, those of the run {shape}")
        if samples.pool.vocabulary != run["vocabulary"]:
            raise DataError(
                f"samples of task {number} in '{source}' have a vocabulary of {samples.pool.vocabulary} token ids, "
                f"those of the run {run['vocabulary']}; use the run's tokenizer"
            )
    made = []
    for task, samples in zip(tasks, found, strict=True):
        samples = replace(samples, targets=_in_run(samples.targets, task, source))
        made.append(_OwnTask(task["name"], samples, samples, task["classes"]))
    return _OwnStream(run["name"], tuple(made), shape, run["multi_head"], growing=run["growing"])


def check(source: str) -> None:
    """Raise DataError if a node's data are neither a folder nor a registered benchmark."""
    if source not in plugins.benchmarks.names() and not Path(source).is_dir():
        raise DataError(f"'{source}' is neither a folder nor a benchmark; give a folder with task0.npz, task1.npz, ...")


class OwnPopulation(Population):
    """One client with all samples of a stream; `owners` counts every client, since a node cannot know."""

    def __init__(self, stream: Stream, config: RunConfig, client: int) -> None:
        self.id = client
        super().__init__(stream, config)

    def _deal(self, task: int) -> Deal:
        size = len(self.stream.tasks[task].train)
        return Deal(
            torch.arange(size), np.array([size if id == self.id else 0 for id in range(self.config.partition.clients)])
        )

    def _samples(self, tasks: tuple[int, ...]) -> np.ndarray:
        return np.ones(self.config.partition.clients, dtype=np.int64)


@dataclass(frozen=True, eq=False)
class _OwnTask(Task):
    """A task of which a node may have few samples, or none; the server has its test samples."""

    def __post_init__(self) -> None:
        """Check nothing: `_in_run` has checked the labels, and a node may have no samples of the task."""


@dataclass(frozen=True, eq=False)
class _OwnStream(Stream):
    """The tasks of a run with the samples of one node."""

    def __post_init__(self) -> None:
        for task in self.tasks:
            checks.check_finite(f"task '{task.name}'", "train", task.train.index, task.train.pool.broken)


def _numbers(before: Task, after: Task, outputs: int) -> list[list[int]]:
    """Pairs of the labels of a task in its benchmark and in the run, where its part of the head has `outputs`."""
    if outputs == before.classes:  # in their order, also labels of which the benchmark has no samples
        return [[label, after.classes - outputs + label] for label in range(outputs)]
    old, new = (torch.cat([task.train.targets, task.test.targets]) for task in (before, after))
    pairs: list[list[int]] = torch.stack([old, new], dim=1).unique(dim=0).tolist()
    return pairs


def _in_run(labels: Tensor, task: dict[str, Any], source: str) -> Tensor:
    """Return the labels in the run of labels (n,) of its benchmark. Raises DataError for one that its task lacks."""
    known, numbers = torch.tensor(task["labels"]).unbind(1)
    strange = labels[~torch.isin(labels, known)]
    if len(strange):
        raise DataError(
            f"labels of task '{task['name']}' in '{source}' must be {few([*map(str, known.tolist())], FEW_NAMES)}, as "
            f"in the run's benchmark, not {strange[0]}"
        )
    return numbers[torch.searchsorted(known.contiguous(), labels)]


def _check_tasks(source: str, stream: Stream, tasks: list[dict[str, Any]]) -> None:
    """Raise DataError unless a benchmark has the tasks of the run: its labels would mean other classes."""
    own = [f"'{task.name}' of {task.classes} classes" for task in stream.tasks]
    wanted = [f"'{task['name']}' of {task['benchmark_classes']} classes" for task in tasks]
    for number, (here, there) in enumerate(zip_longest(own, wanted, fillvalue="missing")):
        if here != there:
            raise DataError(
                f"task {number} of benchmark '{source}' is {here}, that of the run is {there}; give a benchmark with "
                "the run's tasks, or a folder"
            )


def _samples(file: Path, task: dict[str, Any], shape: tuple[int, ...], vocabulary: int | None) -> TaskSamples:
    """Read the samples of a task; none if there is no file. vocabulary: of texts, whose samples are tokens."""
    if not file.exists():
        none = torch.empty(0, dtype=torch.int64)
        return TaskSamples(_pool(torch.empty(0, *shape), None, None, vocabulary), none, none)
    x, y = npz.read(file, ("x", "y")).values()
    inputs = as_inputs(x, f"samples in {file}")
    given = [task[name] if inputs.dtype == torch.uint8 else None for name in ("mean", "std")]  # others are as they are
    mean, std = (None if value is None else torch.tensor(value) for value in given)
    return TaskSamples(
        _pool(inputs, mean, std, vocabulary), torch.arange(len(inputs)), as_labels(y, f"labels in {file}", len(inputs))
    )


def _pool(inputs: Tensor, mean: Tensor | None, std: Tensor | None, vocabulary: int | None) -> Pool:
    return Pool(inputs, mean, std) if vocabulary is None else Pool(inputs.int(), vocabulary=vocabulary)
