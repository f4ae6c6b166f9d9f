"""Dealing one task's train samples to clients: IID, by label shards, or by Dirichlet shares of each class.

FOT (Bakman et al., ICLR 2024), section 5 (IID, shards) and appendix G.1 (task heterogeneity); the shards are those of
McMahan et al. (2017), section 3; the Dirichlet shares those of Hsu et al. (2019) in one pass, without a minimum size.
Every draw is keyed by seed and task, so each task is dealt independently of the others.
"""

from collections.abc import Callable
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from cfl import rng
from cfl.errors import ConfigError, DataError, unknown


@dataclass(frozen=True, eq=False)
class Deal:
    """Who holds which samples of a task.

    rows: client id -> (n_i,) int64 positions in the task's train part, ascending; disjoint, perhaps empty.
    """

    rows: tuple[Tensor, ...]

    @property
    def owners(self) -> tuple[int, ...]:
        """Ids of the clients that hold data, ascending."""
        return tuple(client for client, rows in enumerate(self.rows) if len(rows))

    @property
    def without_data(self) -> tuple[int, ...]:
        """Ids of the clients that hold none: those not drawn for the task, and those to whom chance gave nothing."""
        return tuple(client for client, rows in enumerate(self.rows) if not len(rows))


def deal(
    targets: Tensor,
    task: int,
    *,
    name: str,
    clients: int,
    alpha: float = 0.5,
    task_share: float = 1.0,
    shards: int = 2,
    seed: int,
) -> Deal:
    """Deal the train samples of one task to clients.

    targets: (N,) int64 classes of the task's train part; clients: size of the population.
    name: "iid" (floor(N / owners) samples each, the rest dropped), "shards" (`shards` equal pieces each of the samples
    sorted by class, the rest dropped) or "dirichlet" (each class in shares drawn from Dir(alpha), all samples dealt).
    task_share: fraction of the clients, in (0, 1], that owns data of this task: exactly round(clients * task_share)
    clients, drawn without replacement for each task.
    Raises ConfigError for an unknown name or an option out of range, DataError where there are too few samples.
    """
    if name not in _PARTITIONS:
        raise unknown("partition", name, _PARTITIONS)
    for option, value, valid in (
        ("clients", clients, clients >= 1),
        ("alpha", alpha, 0 < alpha < np.inf),
        ("task_share", task_share, 0 < task_share <= 1),
        ("shards", shards, shards >= 1),
    ):
        if not valid:
            raise ConfigError(f"{option} must be {'in (0, 1]' if option == 'task_share' else 'positive'}, not {value}")
    count = round(clients * task_share)
    if count == 0:
        raise ConfigError(f"task_share {task_share} of {clients} clients leaves no owner; raise either")
    owners = rng.numpy_generator(rng.key(seed, "owners", task)).choice(clients, count, replace=False)
    draws = rng.numpy_generator(rng.key(seed, "partition", name, task))
    pieces = _PARTITIONS[name](targets.cpu().numpy(), count, alpha, shards, draws)
    rows = [torch.empty(0, dtype=torch.int64)] * clients
    for owner, piece in zip(np.sort(owners), pieces, strict=True):
        rows[owner] = torch.from_numpy(np.sort(piece)).long()
    return Deal(tuple(rows))


def _iid(targets: np.ndarray, owners: int, alpha: float, shards: int, draws: np.random.Generator) -> list[np.ndarray]:
    size = len(targets) // owners
    if size == 0:
        raise DataError(
            f"{len(targets)} samples cannot be dealt to {owners} owners; "
            "lower partition.clients or partition.task_share"
        )
    order = draws.permutation(len(targets))
    return [order[i * size : (i + 1) * size] for i in range(owners)]


def _shards(
    targets: np.ndarray, owners: int, alpha: float, shards: int, draws: np.random.Generator
) -> list[np.ndarray]:
    size = len(targets) // (owners * shards)
    if size == 0:
        raise DataError(
            f"{len(targets)} samples cannot be cut into {owners} x {shards} = {owners * shards} shards; "
            "lower partition.shards, partition.clients or partition.task_share"
        )
    # stable: the split must not depend on the sorting algorithm
    pieces = np.argsort(targets, kind="stable")[: owners * shards * size].reshape(-1, size)
    return list(pieces[draws.permutation(len(pieces))].reshape(owners, -1))


def _dirichlet(
    targets: np.ndarray, owners: int, alpha: float, shards: int, draws: np.random.Generator
) -> list[np.ndarray]:
    parts: list[list[np.ndarray]] = [[] for _ in range(owners)]
    for label in np.unique(targets):
        positions = draws.permutation(np.flatnonzero(targets == label))
        shares = np.cumsum(draws.dirichlet(np.full(owners, alpha)))[:-1]
        cuts = np.floor(np.minimum(shares, 1) * len(positions)).astype(np.int64)
        for mine, piece in zip(parts, np.split(positions, cuts), strict=True):
            mine.append(piece)
    return [np.concatenate(mine) for mine in parts]


_PARTITIONS: dict[str, Callable[[np.ndarray, int, float, int, np.random.Generator], list[np.ndarray]]] = {
    "iid": _iid,
    "shards": _shards,
    "dirichlet": _dirichlet,
}
