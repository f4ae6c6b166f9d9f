"""Partitions of one task's train samples over clients: IID, by label shards, or by Dirichlet shares of each class.

IID and shards: FOT (Bakman et al., ICLR 2024), section 5; the shards are those of McMahan et al. (2017), section 3.
Share of the clients that own a task: FOT, appendix G.1 (task heterogeneity). Dirichlet shares: Hsu et al. (2019), in
one pass and without a minimum size. `sharding`, and `lda`, Dirichlet shares with a cap and a minimum: FedSOL (Lee et
al., CVPR 2024). Every draw is keyed by seed and task, so the partitions of different tasks are independent.
"""

from collections.abc import Callable
from dataclasses import dataclass
from functools import cached_property
from typing import NamedTuple

import numpy as np
import torch
from torch import Tensor

from cfl.core import ConfigError, DataError, rng, unknown, warn
from cfl.core.typed import typed

_LEAST_ALPHA = 1e-15  # below, no draw of Dirichlet shares divides a class among owners
_LIMITS = {"clients": 10**8, "alpha": 1e300}  # 800 MB a task for the sizes alone; sums of draws beyond overflow
_REDRAWS = 300_000  # FedSOL's alpha of 0.05 on CIFAR-10 took 13,000 to 39,000 draws with seeds 0 to 2, 0.4 ms each
_LONG = 50_000  # draws after which a warning says that more follow


class _Options(NamedTuple):
    owners: int
    alpha: float
    shards: int
    min_samples: int


@dataclass(frozen=True, eq=False)
class Deal:
    """A partition of a task's train samples: which client holds which samples.

    order: (n,) int64 positions in the task's train samples, client after client, ascending for each client;
    sizes: (clients,) int64 number of samples of each client, possibly 0.
    Two arrays instead of an object for each client, because the clients may be millions.
    """

    order: Tensor
    sizes: np.ndarray

    @cached_property
    def ends(self) -> np.ndarray:
        """(clients,) int64 end of each client's positions in `order`."""
        return self.sizes.cumsum()

    def of(self, client: int) -> Tensor:
        """(n_i,) positions of a client's samples in the task's train samples, ascending."""
        end = int(self.ends[client])
        return self.order[end - int(self.sizes[client]) : end]

    @cached_property
    def rows(self) -> tuple[Tensor, ...]:
        """Positions `of` each client."""
        return self.order.split(self.sizes.tolist())

    @property
    def owners(self) -> tuple[int, ...]:
        """Ids of the clients that hold data, ascending."""
        return tuple(np.flatnonzero(self.sizes).tolist())


@typed
def deal(
    targets: Tensor,
    task: int,
    *,
    name: str,
    clients: int,
    alpha: float = 0.5,
    task_share: float = 1.0,
    shards: int = 2,
    min_samples: int = 10,
    seed: int,
) -> Deal:
    """Deal the train samples of one task to its owners, the clients drawn for the task.

    targets: (N,) int64 classes of the task's train samples; clients: size of the population;
    task_share: fraction of the clients, in (0, 1], that are owners: exactly round(clients * task_share) clients, drawn
    without replacement for each task.
    name: one of
    - "iid": floor(N / owners) samples for each owner; the rest is dropped;
    - "shards": sort by class, cut into equal pieces, `shards` pieces for each owner; the rest is dropped. A piece that
      spans the border of two classes holds both;
    - "sharding": `shards` pieces for each owner, each piece of a single class; all samples are dealt. Classes have
      equal numbers of pieces, except that the first ones may have one more. Pieces of a class differ by at most one
      sample;
    - "dirichlet": shares of each class drawn from Dir(alpha); all samples are dealt;
    - "lda": as "dirichlet", but an owner with N / owners samples or more gets nothing of later classes, and the draw is
      repeated until each owner has `min_samples`, 300,000 times at most;
    - "classes": owner k holds all samples of the k-th class.
    Raises ConfigError for an argument of another type, an unknown name, an option out of range, and "classes" unless
    each class has one owner; DataError for targets that are not (N,) int64, for too few samples, and if no draw of a
    bounded number gives each owner `min_samples`.
    """
    if name not in _PARTITIONS:
        raise unknown("partition", name, _PARTITIONS)
    if not 0 < task_share <= 1:
        raise ConfigError(f"task_share must be in (0, 1], not {task_share}")
    for option, value in {"clients": clients, "alpha": alpha, "shards": shards, "min_samples": min_samples}.items():
        most = _LIMITS.get(option, np.inf)
        if not 0 < value <= most:
            limit = f" and at most {most:g}" if option in _LIMITS else ""
            raise ConfigError(f"{option} must be positive{limit}, not {value}")
    count = round(clients * task_share)
    if count == 0:
        raise ConfigError(f"task_share {task_share} of {clients} clients leaves no owner; raise either")
    if targets.dim() != 1 or targets.dtype != torch.int64 or not len(targets):
        raise DataError(f"targets of task {task} are {targets.dtype} of shape {tuple(targets.shape)}; give (N,) int64")
    draws = rng.numpy_generator(rng.key(seed, "partition", name, task))
    try:
        holder = _PARTITIONS[name](targets.cpu().numpy(), _Options(count, alpha, shards, min_samples), draws)
    except (ConfigError, DataError) as error:
        raise type(error)(f"task {task}: {error}") from None
    owners = np.sort(rng.numpy_generator(rng.key(seed, "owners", task)).choice(clients, count, replace=False))
    sizes = np.zeros(clients, dtype=np.int64)
    sizes[owners] = np.bincount(holder[holder >= 0], minlength=count)
    # stable: a client's positions ascend; dropped samples come first
    order = np.argsort(holder, kind="stable")[len(holder) - sizes.sum() :]
    return Deal(torch.from_numpy(order).to(targets.device), sizes)


def stated(clients: Tensor | None, task: int, count: int) -> Deal:
    """Return the partition of one task that its stream states.

    clients: (N,) int64 client that holds each train sample, None if the stream does not say; count: size of the
    population. Raises ConfigError if the stream does not say, and for a client beyond the population.
    """
    if clients is None:
        raise ConfigError(
            "partition.name=stream needs a stream that says which client holds which sample; pass `clients` to "
            "from_tensors, or choose another partition"
        )
    if (last := int(clients.max())) >= count:
        raise ConfigError(
            f"task {task} has samples of client {last}; set partition.clients to {last + 1} or more, or number the "
            "clients of all tasks without gaps, as numpy.unique(ids, return_inverse=True)[1] does"
        )
    return Deal(clients.argsort(stable=True), clients.bincount(minlength=count).cpu().numpy())


# A partition returns the holder of each sample, (N,) int64: an index among the owners, or -1 for a dropped sample.


def _iid(targets: np.ndarray, options: _Options, draws: np.random.Generator) -> np.ndarray:
    size = len(targets) // options.owners
    if size == 0:
        raise DataError(
            f"{len(targets)} samples cannot be dealt to {options.owners} owners; "
            "lower partition.clients or partition.task_share"
        )
    return _held(len(targets), draws.permutation(len(targets))[: options.owners * size].reshape(-1, size))


def _held(samples: int, pieces: np.ndarray) -> np.ndarray:
    """Holder of each sample, for pieces (owners, size) whose row i has the positions of the i-th owner's samples."""
    holder = np.full(samples, -1)
    holder[pieces] = np.arange(len(pieces))[:, None]
    return holder


def _shards(targets: np.ndarray, options: _Options, draws: np.random.Generator) -> np.ndarray:
    owners, shards = options.owners, options.shards
    size = len(targets) // (owners * shards)
    if size == 0:
        raise DataError(
            f"{len(targets)} samples cannot be cut into {owners} x {shards} = {owners * shards} shards; "
            "lower partition.shards, partition.clients or partition.task_share"
        )
    # stable: the result must not depend on the sorting algorithm
    pieces = np.argsort(targets, kind="stable")[: owners * shards * size].reshape(-1, size)
    return _held(len(targets), pieces[draws.permutation(len(pieces))].reshape(owners, -1))


def _sharding(targets: np.ndarray, options: _Options, draws: np.random.Generator) -> np.ndarray:
    labels, sizes = np.unique(targets, return_counts=True)
    least, more = divmod(options.owners * options.shards, len(labels))
    counts = [least + (place < more) for place in range(len(labels))]
    for label, size, count in zip(labels, sizes, counts, strict=True):
        if size < count or not count:
            raise DataError(
                f"{options.owners} x {options.shards} shards are {count} of class {label}, which has {size} samples; "
                f"{'lower' if count else 'raise'} partition.shards or partition.clients"
            )
    # sizes as of np.array_split: the first pieces of a class are one larger
    cuts = [
        size // count + (place < size % count)
        for size, count in zip(sizes, counts, strict=True)
        for place in range(count)
    ]
    owner = np.empty(len(cuts), dtype=np.int64)
    owner[draws.permutation(len(cuts))] = np.repeat(np.arange(options.owners), options.shards)
    holder = np.empty(len(targets), dtype=np.int64)
    holder[np.argsort(targets, kind="stable")] = np.repeat(owner, cuts)
    return holder


def _dirichlet(targets: np.ndarray, options: _Options, draws: np.random.Generator) -> np.ndarray:
    holder = np.empty(len(targets), dtype=np.int64)
    for label in np.unique(targets):
        positions = draws.permutation(np.flatnonzero(targets == label))
        shares = np.cumsum(draws.dirichlet(np.full(options.owners, options.alpha)))[:-1]
        cuts = np.floor(np.minimum(shares, 1) * len(positions)).astype(np.int64)
        counts = np.diff(cuts, prepend=0, append=len(positions))
        holder[positions] = np.repeat(np.arange(options.owners), counts)
    return holder


def _lda(targets: np.ndarray, options: _Options, draws: np.random.Generator) -> np.ndarray:
    labels, sizes = np.unique(targets, return_counts=True)
    possible = options.owners * options.min_samples <= len(targets)
    possible &= options.alpha > _LEAST_ALPHA or options.owners <= len(labels)
    for number in range(_REDRAWS if possible else 0):
        if number == _LONG:
            warn(
                f"none of {number:,} draws of partition.name=lda gives each of {options.owners} clients "
                f"{options.min_samples} samples; up to {_REDRAWS - number:,} more follow, which may take minutes; "
                "a larger partition.alpha needs fewer"
            )
        counts = _capped_counts(sizes, options, draws)
        if counts.sum() == len(targets) and counts.sum(0).min() >= options.min_samples:
            break
    else:
        raise DataError(
            f"{len(targets)} samples do not give each of {options.owners} owners {options.min_samples} with alpha "
            f"{options.alpha}{f' in {_REDRAWS:,} draws' if possible else ''}; "
            "lower partition.min_samples or partition.clients, or raise partition.alpha"
        )
    holder = np.empty(len(targets), dtype=np.int64)
    for label, row in zip(labels, counts, strict=True):
        positions = draws.permutation(np.flatnonzero(targets == label))
        holder[positions] = np.repeat(np.arange(options.owners), row)
    return holder


def _capped_counts(sizes: np.ndarray, options: _Options, draws: np.random.Generator) -> np.ndarray:
    """Number of samples of each class for each owner, (classes, owners); all 0 for a class whose shares underflow."""
    counts = np.zeros((len(sizes), options.owners), dtype=np.int64)
    for row, size in zip(counts, sizes, strict=True):
        full = counts.sum(0) * options.owners >= sizes.sum()
        shares = np.cumsum(np.where(full, 0, draws.dirichlet(np.full(options.owners, options.alpha))))
        if shares[-1] > 0:  # division by the last sum makes it exactly 1: an owner with share 0 gets no sample
            row[:] = np.diff(np.floor(shares / shares[-1] * size).astype(np.int64), prepend=0)
    return counts


def _classes(targets: np.ndarray, options: _Options, draws: np.random.Generator) -> np.ndarray:
    labels, holder = np.unique(targets, return_inverse=True)
    if len(labels) != options.owners:
        raise ConfigError(
            f"partition 'classes' needs a client for each of the {len(labels)} classes, not {options.owners}; "
            f"set partition.clients to {len(labels)} and partition.task_share to 1"
        )
    return holder


_PARTITIONS: dict[str, Callable[[np.ndarray, _Options, np.random.Generator], np.ndarray]] = {
    "iid": _iid,
    "shards": _shards,
    "dirichlet": _dirichlet,
    "sharding": _sharding,
    "lda": _lda,
    "classes": _classes,
}
