"""Validation data: training samples that no client gets, by which hyper-parameters can be chosen."""

from collections.abc import Iterable, Sequence
from dataclasses import replace
from fractions import Fraction

import numpy as np
import torch

from cfl.core import ConfigError, rng
from cfl.core.typed import typed
from cfl.streams.store import Stream, TaskSamples


@typed
def held_out(stream: Stream, fraction: float, seed: int) -> tuple[Stream, tuple[TaskSamples, ...]]:
    """Hold training samples of each task out. Returns the stream without them, and those of each task.

    fraction: of the samples of each class of a task, in [0, 1). Numbers are rounded down, so every class keeps training
    samples. With 0 the stream stays as it is, and the second part is empty.
    The rows of a pool are drawn with key(seed, "validation"), so tasks of the same images hold out the same ones.
    Public inputs that equal a held-out sample are left out, too.
    Raises ConfigError for an argument of another type, a fraction out of range, and a task whose classes are too small.
    """
    if not 0 <= fraction < 1:
        raise ConfigError(f"the fraction of held-out samples must be in [0, 1), not {fraction:g}")
    if not fraction:
        return stream, ()
    tasks, held = [], []
    for task in stream.tasks:
        drawn = _drawn(task.train, fraction, seed)
        if not drawn.any():
            raise ConfigError(
                f"validation={fraction:g} holds out no sample of task '{task.name}', whose largest class has "
                f"{int(task.train.targets.bincount().max())} training samples; raise it"
            )
        held.append(_taken(task.train, drawn))
        kept = None if task.clients is None else task.clients[~drawn]
        tasks.append(replace(task, train=_taken(task.train, ~drawn), clients=kept))
    public = None if stream.public is None else _without(stream.public, held)
    return replace(stream, tasks=tuple(tasks), public=public), tuple(held)


def _drawn(samples: TaskSamples, fraction: float, seed: int) -> torch.Tensor:
    """Mark the samples to hold out, (n,) bool: of each class those whose rows come first in a random order."""
    order = rng.numpy_generator(rng.key(seed, "validation")).permutation(len(samples.pool.images))
    places, targets = order[samples.index.cpu().numpy()], samples.targets.cpu().numpy()
    drawn = np.zeros(len(samples), dtype=bool)
    for label in np.unique(targets):
        own = np.flatnonzero(targets == label)
        count = int(Fraction(str(fraction)) * len(own))  # of the number as written, not of its nearest float
        drawn[own[np.argsort(places[own])[:count]]] = True
    return torch.from_numpy(drawn).to(samples.index.device)


def _taken(samples: TaskSamples, marked: torch.Tensor) -> TaskSamples:
    return replace(samples, index=samples.index[marked], targets=samples.targets[marked])


def _without(public: TaskSamples, held: Sequence[TaskSamples]) -> TaskSamples:
    """Public data without the inputs that are held out, which may be in a pool of their own."""
    unseen = {row for samples in held for row in _rows(samples)}
    return _taken(public, torch.tensor([row not in unseen for row in _rows(public)]).to(public.index.device))


def _rows(samples: TaskSamples) -> Iterable[bytes]:
    return (row.tobytes() for row in samples.pool.images[samples.index].cpu().numpy())
