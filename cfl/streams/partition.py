"""Dealing one task's train samples to clients: IID, by label shards, or by Dirichlet shares of each class.

FOT (Bakman et al., ICLR 2024), section 5 (IID, shards) and appendix G.1 (task heterogeneity); the shards are those of
McMahan et al. (2017), section 3; the Dirichlet shares those of Hsu et al. (2019) in one pass, without a minimum size.
FedSOL (Lee et al., CVPR 2024): `sharding`, and `lda`, Dirichlet shares with a cap and a minimum.
Every draw is keyed by seed and task, so each task is dealt independently of the others.
"""

from collections.abc import Callable
from dataclasses import dataclass
from functools import cached_property
from typing import NamedTuple

import numpy as np
import torch
from torch import Tensor

from cfl.core import rng
from cfl.core.errors import ConfigError, DataError, unknown

_REDRAWS = 300_000  # FedSOL's alpha of 0.05 on CIFAR-10 took 13,000 to 39,000 with seeds 0 to 2, at 0.4 ms each


class _Options(NamedTuple):
    owners: int
    alpha: float
    shards: int
    min_samples: int


@dataclass(frozen=True, eq=False)
class Deal:
    """Who holds which samples of a task.

    order: (n,) int64 positions in the task's train part, client after client, ascending within each; sizes: (clients,)
    int64, how many each client holds, perhaps none. Clients are no objects of their own: there may be millions.
    """

    order: Tensor
    sizes: np.ndarray

    @cached_property
    def ends(self) -> np.ndarray:
        """(clients,) int64: where in `order` each client's positions end."""
        return self.sizes.cumsum()

    def of(self, client: int) -> Tensor:
        """(n_i,) positions of a client's samples in the task's train part, ascending."""
        end = int(self.ends[client])
        return self.order[end - int(self.sizes[client]) : end]

    @cached_property
    def rows(self) -> tuple[Tensor, ...]:
        """What `of` gives for each client."""
        return self.order.split(self.sizes.tolist())

    @property
    def owners(self) -> tuple[int, ...]:
        """Ids of the clients that hold data, ascending."""
        return tuple(np.flatnonzero(self.sizes).tolist())

    @property
    def without_data(self) -> tuple[int, ...]:
        """Ids of the clients that hold none: those not drawn for the task, and those to whom chance gave nothing."""
        return tuple(np.flatnonzero(self.sizes == 0).tolist())


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
    """Deal the train samples of one task to clients.

    targets: (N,) int64 classes of the task's train part; clients: size of the population.
    name: one of
    - "iid": floor(N / owners) samples each, the rest dropped;
    - "shards": `shards` equal pieces each of the samples sorted by class, the rest dropped; a piece that lies across
      the border of two classes holds both;
    - "sharding": `shards` pieces each, every one of a single class, all samples dealt. Each class is cut into as many
      pieces, give or take one (the first classes have one more), which differ by one sample at most;
    - "dirichlet": each class in shares drawn from Dir(alpha), all samples dealt;
    - "lda": as "dirichlet", but owners that hold N / owners samples get no more of the later classes, and all is drawn
      anew until each owner has `min_samples`;
    - "classes": owner k holds all samples of the k-th class.
    task_share: fraction of the clients, in (0, 1], that owns data of this task: exactly round(clients * task_share)
    clients, drawn without replacement for each task.
    Raises ConfigError for an unknown name, an option out of range and "classes" with other than an owner a class;
    DataError where there are too few samples, or `min_samples` are not reached in a bounded number of draws.
    """
    if name not in _PARTITIONS:
        raise unknown("partition", name, _PARTITIONS)
    for option, value, valid in (
        ("clients", clients, clients >= 1),
        ("alpha", alpha, 0 < alpha < np.inf),
        ("task_share", task_share, 0 < task_share <= 1),
        ("shards", shards, shards >= 1),
        ("min_samples", min_samples, min_samples >= 1),
    ):
        if not valid:
            raise ConfigError(f"{option} must be {'in (0, 1]' if option == 'task_share' else 'positive'}, not {value}")
    count = round(clients * task_share)
    if count == 0:
        raise ConfigError(f"task_share {task_share} of {clients} clients leaves no owner; raise either")
    owners = np.sort(rng.numpy_generator(rng.key(seed, "owners", task)).choice(clients, count, replace=False))
    draws = rng.numpy_generator(rng.key(seed, "partition", name, task))
    holder = _PARTITIONS[name](targets.cpu().numpy(), _Options(count, alpha, shards, min_samples), draws)
    sizes = np.zeros(clients, dtype=np.int64)
    sizes[owners] = np.bincount(holder[holder >= 0], minlength=count)
    # stable: a client's positions ascend; those that nobody holds come first
    order = np.argsort(holder, kind="stable")[len(holder) - sizes.sum() :]
    return Deal(torch.from_numpy(order).to(targets.device), sizes)


# A partition gives each sample the place of its holder among the owners, (N,) int64; -1: nobody holds it.


def _iid(targets: np.ndarray, options: _Options, draws: np.random.Generator) -> np.ndarray:
    size = len(targets) // options.owners
    if size == 0:
        raise DataError(
            f"{len(targets)} samples cannot be dealt to {options.owners} owners; "
            "lower partition.clients or partition.task_share"
        )
    return _held(len(targets), draws.permutation(len(targets))[: options.owners * size].reshape(-1, size))


def _held(samples: int, pieces: np.ndarray) -> np.ndarray:
    """The holder of each sample, where row i of pieces (owners, size) is what the i-th owner holds."""
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
    # stable: the split must not depend on the sorting algorithm
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
    # array_split's sizes: those of the first pieces of a class are one larger
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
    for _ in range(_REDRAWS if possible else 0):
        counts = _capped_counts(sizes, options, draws)
        if counts.sum() == len(targets) and counts.sum(0).min() >= options.min_samples:
            break
    else:
        raise DataError(
            f"{len(targets)} samples do not give each of {options.owners} owners {options.min_samples} with alpha "
            f"{options.alpha}{f' in {_REDRAWS} draws' if possible else ''}; "
            "lower partition.min_samples or partition.clients, or raise partition.alpha"
        )
    holder = np.empty(len(targets), dtype=np.int64)
    for label, row in zip(labels, counts, strict=True):
        positions = draws.permutation(np.flatnonzero(targets == label))
        holder[positions] = np.repeat(np.arange(options.owners), row)
    return holder


def _capped_counts(sizes: np.ndarray, options: _Options, draws: np.random.Generator) -> np.ndarray:
    """Samples of each class for each owner, (classes, owners); a class whose shares all underflow has zeros."""
    counts = np.zeros((len(sizes), options.owners), dtype=np.int64)
    for row, size in zip(counts, sizes, strict=True):
        full = counts.sum(0) * options.owners >= sizes.sum()
        shares = np.cumsum(np.where(full, 0, draws.dirichlet(np.full(options.owners, options.alpha))))
        if shares[-1] > 0:  # and divided by this one, so that a share of 0 is no sample, at the end too
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
