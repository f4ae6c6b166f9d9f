"""Sum of a round's uploads without protection; `cfl.aggregation.protected` adds secure aggregation and privacy."""

from collections.abc import Mapping
from typing import Any, ClassVar

import torch
from torch import Tensor

from cfl.contract import Gathers, RoundInfo, TreesByOwner
from cfl.contract.combining import STRATEGY, WEIGHTS
from cfl.core import RoundAborted, Tree, UpdateError, tree


class UploadSum:
    """Sum of the uploads of one round; clients may be added in any order.

    Workers build partial sums: export one with `part()`, combine with `merge()`. Only the combined sum is opened and
    closed.

    gathers: how the uploads of each owner are combined; stacked: owners whose uploads are stacked, and with them the
    clients' weights if the strategy is one.
    clipped: entries beyond the range of integers; shortened: clients whose upload was scaled down to dp.clip; zeroed:
    ids of the clients among them whose upload was not finite and counts as zero; noise: standard deviation of the noise
    in each entry of the sum.
    """

    # _outlines describes the uploads of client _lowest, the lowest id added; -1 before the first client.
    _added: ClassVar = ["clipped", "shortened", "zeroed", "_weight", "_bytes_up"]
    _exported: ClassVar = [*_added, "_outlines", "_lowest", "_sums", "_stacks"]

    def __init__(self, info: RoundInfo, gathers: Mapping[str, Gathers]) -> None:
        self.info, self.gathers = info, gathers
        self.stacked = {owner for owner, how in self.gathers.items() if how == "stack"}
        if STRATEGY in self.stacked:
            self.stacked.add(WEIGHTS)
        self.clipped = self.shortened = 0
        self.zeroed: list[int] = []
        self.noise = 0.0
        self._outlines: TreesByOwner = {}
        self._lowest = -1
        self._sums: TreesByOwner = {}
        self._stacks: dict[int, TreesByOwner] = {}
        self._weight = 0.0
        self._bytes_up = 0

    def open(self) -> None:
        """Prepare for the uploads. Raises RoundAborted if too few clients are left to go on."""

    def add(self, client: int, uploads: TreesByOwner, weight: float) -> bool:
        """Add a client's uploads; return False, and leave them out, if they are not finite.

        Raises UpdateError if their names or shapes differ from those of another client.
        """
        self._bytes_up += sum(map(tree.nbytes, uploads.values()))
        if not all(map(tree.all_finite, uploads.values())):
            return False
        if WEIGHTS in self.stacked:
            uploads = {**uploads, WEIGHTS: {"": torch.tensor(weight, dtype=torch.float64)}}
        self._match(client, uploads)
        self._weight += weight
        for owner, upload in uploads.items():
            if owner in self.stacked:
                self._stacks.setdefault(client, {})[owner] = upload
            else:
                _accumulate(self._sums.setdefault(owner, {}), upload, weight if self.gathers[owner] == "mean" else 1.0)
        return True

    def part(self) -> dict[str, Any]:
        """Return all that was added, as plain data and tensors."""
        return {name: getattr(self, name) for name in self._exported}

    def merge(self, part: Mapping[str, Any]) -> None:
        """Add another sum of this round, and copy its tensors. Raises UpdateError as `add` does."""
        for name in self._added:
            setattr(self, name, getattr(self, name) + part[name])
        if part["_lowest"] >= 0:
            self._match(part["_lowest"], part["_outlines"])
        for owner, total in part["_sums"].items():
            _accumulate(self._sums.setdefault(owner, {}), total, 1.0)
        for client, uploads in part["_stacks"].items():
            self._stacks[client] = {owner: tree.clone(upload) for owner, upload in uploads.items()}

    def close(self) -> TreesByOwner:
        """Return the combined uploads for the server. Raises RoundAborted if no client has answered."""
        if self._lowest < 0:
            raise RoundAborted("no client of the cohort has answered")
        combined = {
            owner: tree.scale(total, 1 / self._weight) if self.gathers[owner] == "mean" else total
            for owner, total in self._sums.items()
        }
        for owner, total in combined.items():  # counters are not summed: those of the lowest id stay
            total |= {name: leaf for name, leaf in self._outlines[owner].items() if not leaf.is_floating_point()}
        stacks = [self._stacks[client] for client in sorted(self._stacks)]
        owners = stacks[0] if stacks else ()
        return combined | {owner: tree.stack([each[owner] for each in stacks]) for owner in owners}

    def traffic(self) -> tuple[int, int]:
        """Bytes that all clients uploaded, and downloaded beside the broadcast; also of an aborted round."""
        return self._bytes_up, 0

    def _match(self, client: int, uploads: TreesByOwner) -> None:
        """Keep the outlines of the lowest client's uploads. Raises UpdateError if uploads differ in names or shapes."""
        if self._lowest >= 0:
            _check_shapes(uploads, self._outlines, client, self.info)
        if self._lowest < 0 or client < self._lowest:
            self._outlines = {owner: tree.map(_outline, leaves) for owner, leaves in uploads.items()}
            self._lowest = client


def _outline(leaf: Tensor) -> Tensor:
    """A leaf of the same shape and type that takes no memory; counters are copied with their values."""
    return leaf.new_zeros(()).expand(leaf.shape) if leaf.is_floating_point() else leaf.clone()


def _check_shapes(uploads: TreesByOwner, others: TreesByOwner, client: int, info: RoundInfo) -> None:
    """Raise UpdateError if the names or shapes of a client's uploads differ from those of others."""
    own, expected = (
        {(owner, name): leaf.shape for owner, leaves in trees.items() for name, leaf in leaves.items()}
        for trees in (uploads, others)
    )
    if own != expected:
        path = next(path for path in {**own, **expected} if own.get(path) != expected.get(path))
        sent, other = (
            f"with shape {tuple(shapes[path])}" if path in shapes else "not at all" for shapes in (own, expected)
        )
        raise UpdateError(
            f"client {client} sent '{'/'.join(path)}' {sent}, and others {other} ({info.place}); to be summed, uploads "
            "of a round must have the same names and shapes"
        )


def _accumulate(total: Tree, upload: Tree, weight: float) -> None:
    """Add weight * upload to `total` in place; integer leaves stay those of the first upload."""
    for name, leaf in upload.items():
        if name not in total:
            total[name] = leaf * weight if leaf.is_floating_point() else leaf
        elif leaf.is_floating_point():
            total[name].add_(leaf, alpha=weight)
