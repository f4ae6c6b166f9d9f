"""The sum of a round's uploads, as they are; `cfl.aggregation.protected` has the one that hides and protects them."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from torch import Tensor

from cfl.contract.regularizer import Gathers
from cfl.contract.rounds import RoundInfo, TreesByOwner
from cfl.core import tree
from cfl.core.errors import RoundAborted, UpdateError
from cfl.core.tree import Tree


class UploadSum:
    """The uploads of one round put together, client by client, in any order.

    gathers: how the uploads of each regularizer come together; those of the strategy are averaged, those of `work`
    summed. noise, clipped, shortened: see `Outcome`.
    A sum over some of the clients, never opened nor closed, passes on what it has with `part`, to `merge` in another.
    """

    def __init__(self, info: RoundInfo, gathers: Mapping[str, Gathers]) -> None:
        self.info, self.gathers = info, {"strategy": "mean", **gathers, "work": "sum"}
        self.clipped = self.shortened = 0
        self.noise = 0.0
        self._like: TreesByOwner = {}
        self._first = -1  # whose uploads `_like` shows: of those added, the lowest id; -1 where there is none
        self._total: TreesByOwner = {}
        self._stacks: dict[int, TreesByOwner] = {}
        self._weights = 0.0
        self._bytes_up = 0

    def open(self) -> None:
        """What comes before the uploads. Raises RoundAborted where too few clients are left to go on."""

    def add(self, client: int, uploads: TreesByOwner, weight: float) -> bool:
        """Take in a client's uploads, or give False for some that are not finite.

        Raises UpdateError for other names or shapes than the first client sent.
        """
        self._bytes_up += sum(map(tree.nbytes, uploads.values()))
        if not all(map(tree.all_finite, uploads.values())):
            return False
        self._look(client, uploads)
        self._weights += weight
        for owner, upload in uploads.items():
            if self.gathers[owner] == "stack":
                self._stacks.setdefault(client, {})[owner] = upload
            else:
                _gather(self._total.setdefault(owner, {}), upload, weight if self.gathers[owner] == "mean" else 1.0)
        return True

    def part(self) -> dict[str, Any]:
        """All that has been added, as plain data and tensors."""
        names = ("clipped", "shortened", "_like", "_first", "_total", "_stacks", "_weights", "_bytes_up")
        return {name: getattr(self, name) for name in names}

    def merge(self, part: Mapping[str, Any]) -> None:
        """Take in what another sum of this round has; its tensors are not kept. Raises UpdateError as `add` does."""
        for name in ("clipped", "shortened", "_weights", "_bytes_up"):
            setattr(self, name, getattr(self, name) + part[name])
        if part["_first"] >= 0:
            self._look(part["_first"], part["_like"])
        for owner, total in part["_total"].items():
            _gather(self._total.setdefault(owner, {}), total, 1.0)
        for client, uploads in part["_stacks"].items():
            self._stacks[client] = {owner: tree.clone(upload) for owner, upload in uploads.items()}

    def close(self) -> TreesByOwner:
        """What the server gets. Raises RoundAborted where no client has answered."""
        if self._first < 0:
            raise RoundAborted("no client of the cohort has answered")
        parts = {
            owner: tree.scale(total, 1 / self._weights) if self.gathers[owner] == "mean" else total
            for owner, total in self._total.items()
        }
        for owner, total in parts.items():  # sums of counters mean nothing: they are the first client's
            total |= {name: leaf for name, leaf in self._like[owner].items() if not leaf.is_floating_point()}
        ordered = [self._stacks[client] for client in sorted(self._stacks)]
        return parts | {owner: tree.stack([each[owner] for each in ordered]) for owner in (ordered or [{}])[0]}

    def traffic(self) -> tuple[int, int]:
        """Bytes that went up from all clients, and down to them beside the broadcast, also of an aborted round."""
        return self._bytes_up, 0

    def _look(self, client: int, uploads: TreesByOwner) -> None:
        """Remember what uploads look like. Raises UpdateError where these look otherwise."""
        if self._first >= 0:
            _check_shapes(uploads, self._like, client, self.info)
        if self._first < 0 or client < self._first:
            self._like, self._first = {owner: tree.map(_outline, leaves) for owner, leaves in uploads.items()}, client


def _outline(leaf: Tensor) -> Tensor:
    """A leaf that looks the same, and takes no memory but for counters, which keep their values."""
    return leaf.new_zeros(()).expand(leaf.shape) if leaf.is_floating_point() else leaf.clone()


def _check_shapes(uploads: TreesByOwner, others: TreesByOwner, client: int, info: RoundInfo) -> None:
    """Raise UpdateError where a client's upload has other names or shapes than the first one."""
    own, expected = (
        {(owner, name): leaf.shape for owner, leaves in parts.items() for name, leaf in leaves.items()}
        for parts in (uploads, others)
    )
    if own != expected:
        place = next(place for place in {**own, **expected} if own.get(place) != expected.get(place))
        sent, other = (None if shape is None else tuple(shape) for shape in (own.get(place), expected.get(place)))
        raise UpdateError(
            f"client {client} sent '{'/'.join(place)}' with shape {sent}, others {other} "
            f"({info.place}); uploads of a round are summed"
        )


def _gather(total: Tree, upload: Tree, weight: float) -> None:
    """Add the floating-point leaves of an upload to those of others, in place."""
    for name, leaf in upload.items():
        if leaf.is_floating_point() and name in total:
            total[name].add_(leaf, alpha=weight)
        elif name not in total:
            total[name] = leaf * weight if leaf.is_floating_point() else leaf
