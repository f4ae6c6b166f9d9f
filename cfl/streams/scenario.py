"""Scenarios of van de Ven et al. (Nature Machine Intelligence, 2022): what is known of a test sample's task.

- task: its task is given, and each task has a head;
- domain: the task is not given, and all tasks have the same labels and one head;
- class: the task is not given, and one head has the classes of all tasks so far; it grows at the start of each task.
"""

from dataclasses import replace

import torch

from cfl.core import ConfigError, unknown
from cfl.streams.store import Stream, Task

SCENARIOS = ("task", "class", "domain")


def with_scenario(stream: Stream, scenario: str | None) -> Stream:
    """Return a stream under a scenario; None: as it is.

    If its tasks share a head, each task's labels are numbered anew under "task" and "class", in their order: no output
    is then without samples.

    Raises ConfigError for an unknown scenario, for tasks of unequal sizes under "domain", and for another scenario than
    "class" if the stream numbers the classes of all tasks already.
    """
    if scenario in (None, stream.scenario):
        return stream
    if scenario not in SCENARIOS:
        raise unknown("scenario", str(scenario), SCENARIOS)
    if stream.growing:
        raise ConfigError(f"stream '{stream.name}' has targets of scenario=class, so it cannot run with {scenario}")
    if scenario != "domain" and not stream.multi_head:
        stream = replace(stream, tasks=_own_labels(stream.tasks), multi_head=True)
    if scenario == "class":
        return replace(stream, tasks=_numbered(stream), multi_head=True, growing=True)
    counts = [task.classes for task in stream.tasks]
    if scenario == "domain" and len(set(counts)) > 1:
        raise ConfigError(f"scenario=domain needs tasks with equal numbers of classes, and those of '{stream.name}' "
                          f"have {counts}; use scenario=task or class")  # fmt: skip
    return replace(stream, multi_head=scenario == "task")


def _own_labels(tasks: tuple[Task, ...]) -> tuple[Task, ...]:
    """Number the labels of each task from 0."""
    found = []
    for task in tasks:
        own = torch.cat([task.train.targets, task.test.targets]).unique()
        train, test = (replace(part, targets=torch.searchsorted(own, part.targets)) for part in (task.train, task.test))
        found.append(replace(task, train=train, test=test, classes=len(own)))
    return tuple(found)


def _numbered(stream: Stream) -> tuple[Task, ...]:
    """Number the classes of all tasks one after another."""
    found, before = list[Task](), 0
    for task in stream.tasks:
        train, test = (replace(samples, targets=samples.targets + before) for samples in (task.train, task.test))
        before += task.classes
        found.append(replace(task, train=train, test=test, classes=before))
    return tuple(found)
