"""The sum of a round's uploads, as they are; `cfl.privacy.chain` has the one that hides and protects them."""

from __future__ import annotations

from collections.abc import Mapping

import torch

from cfl import tree
from cfl.errors import RoundAborted, UpdateError
from cfl.local.base import Gathers
from cfl.tree import Tree
from cfl.types import Parts, RoundInfo


class Sum:
    """The uploads of one round put together, client by client.

    gathers: how the uploads of each regularizer come together; those of the strategy are averaged, those of `work`
    summed. noise, clipped, shortened: see `Outcome`.
    """

    def __init__(self, info: RoundInfo, gathers: Mapping[str, Gathers]) -> None:
        self.info, self.gathers = info, {**gathers, "strategy": "mean", "work": "sum"}
        self.clipped = self.shortened = 0
        self.noise = 0.0
        self._like: Parts = {}
        self._total: Parts = {}
        self._weights = 0.0
        self._bytes_up = 0

    def open(self) -> None:
        """What comes before the uploads. Raises RoundAborted where too few clients are left to go on."""

    def add(self, client: int, uploads: Parts, weight: float) -> bool:
        """Take in a client's uploads, or give False for some that are not finite.

        Raises UpdateError for other names or shapes than the first client sent.
        """
        self._bytes_up += sum(map(tree.nbytes, uploads.values()))
        if not self._usable(client, uploads):
            return False
        self._weights += weight
        for owner, upload in uploads.items():
            _gather(self._total.setdefault(owner, {}), upload, self.gathers[owner], weight)
        return True

    def close(self) -> Parts:
        """What the server gets. Raises RoundAborted where no client has sent anything."""
        if not self._like:
            raise RoundAborted("no client of the cohort has answered")
        return {
            owner: tree.scale(total, 1 / self._weights) if self.gathers[owner] == "mean" else total
            for owner, total in self._total.items()
        }

    def traffic(self) -> tuple[int, int]:
        """Bytes that went up from all clients, and down to them beside the broadcast, also of an aborted round."""
        return self._bytes_up, 0

    def _usable(self, client: int, uploads: Parts) -> bool:
        if not all(map(tree.all_finite, uploads.values())):
            return False
        self._like = self._like or uploads
        _check_shapes(uploads, self._like, client, self.info)
        return True


def _check_shapes(uploads: Parts, others: Parts, client: int, info: RoundInfo) -> None:
    """Raise UpdateError where a client's upload has other names or shapes than the first one."""
    own, expected = (
        {f"{owner}/{name}": tuple(leaf.shape) for owner, leaves in parts.items() for name, leaf in leaves.items()}
        for parts in (uploads, others)
    )
    for name in {**own, **expected}:
        if own.get(name) != expected.get(name):
            raise UpdateError(
                f"client {client} sent '{name}' with shape {own.get(name)}, others {expected.get(name)} "
                f"({info.place}); uploads of a round are summed"
            )


def _gather(total: Tree, upload: Tree, how: str, weight: float) -> None:
    """Put an upload to what others sent, in place; in sums integer leaves (counters) are the first client's."""
    for name, leaf in upload.items():
        if how == "stack":
            total[name] = torch.cat([total[name], leaf[None]]) if name in total else leaf[None]
        elif name not in total:
            total[name] = leaf * (weight if how == "mean" else 1.0) if leaf.is_floating_point() else leaf
        elif leaf.is_floating_point():
            total[name] += leaf * (weight if how == "mean" else 1.0)
