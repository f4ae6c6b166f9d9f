"""A block: clients that train together, their stacked weights, and the batches of their steps."""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import partial
from itertools import accumulate, zip_longest
from operator import itemgetter
from typing import NamedTuple

import torch
from torch import Tensor

from cfl.contract import Batch, Client
from cfl.contract.samples import equally_long
from cfl.core import Tree, rng, tree
from cfl.engines.step import Local

ALL = slice(None)
AHEAD = 1 << 20  # bytes: samples of so many steps are gathered at once; more would not stay in a core's cache


class Group(NamedTuple):
    """Clients of a block that take a step together.

    at: positions in the block; places: the same as an index; drawn: samples that each client draws from its memory.
    """

    at: list[int]
    places: slice | Tensor
    drawn: list[Batch]


@dataclass
class Block:
    """Clients that train together, those with the most steps first.

    local: stacked weights; state: stacked states, as far as the hooks of a step may see them; plans: for each client
    and step, the positions of the batch in the client's data and the parts of the key of random augmentation;
    memories: for each client, the samples that it draws from its memory at each step; width: batches with fewer samples
    are padded to so many, if none is augmented.
    """

    clients: list[Client]
    local: Local
    state: Tree
    plans: list[list[tuple[Tensor, tuple[int, int]]]]
    memories: list[Iterator[Batch]]
    width: int = 1

    def __post_init__(self) -> None:
        self.ids = torch.tensor([client.id for client in self.clients])
        self.sizes = [[len(part) for part, _ in plan] for plan in self.plans]
        self.steps = [len(plan) for plan in self.plans]
        self._memory: tuple[list[Batch], Tree] = [], {}
        self._samples = self.clients[0].shares[self.clients[0].task].samples
        self._plain = not self._samples.augment and all(client.now == (client.task,) for client in self.clients)
        if self._plain:
            self._rows, self._mask = self._all_rows()
            step = self._rows[0].numel() * self._samples.gather(self._rows[0, 0, :1])[0].nbytes
            self._ahead = max(1, AHEAD // max(1, step))
            self._gathered: tuple[int, Tree] = 0, {"y": self._rows[:0]}

    def weights(self, places: slice | Tensor) -> Local:
        """Return the weights of some clients, as views if `places` is a slice."""
        return self.local if places is ALL else Local(*(tree.map(itemgetter(places), part) for part in self.local))

    def inputs(self, group: Group, index: int) -> dict[str, Tree]:
        """Return the inputs of a group's step `index` that differ between clients: leaves (clients, ...)."""
        return {
            "batch": self._batch(group.at, index),
            "memory": self._recalled(group.drawn),
            "state": tree.map(itemgetter(group.places), self.state),
            "client": {"id": self.ids[group.places]},
        }

    def write(self, places: slice | Tensor, weights: Local) -> None:
        """Write weights of some clients back. With a slice, all but the buffers are views and written already."""
        copies = isinstance(places, Tensor)
        pairs = zip(self.local, weights, strict=True) if copies else [(self.local.buffers, weights.buffers)]
        for whole, part in pairs:
            for name, leaf in part.items():
                whole[name][places] = leaf

    def _all_rows(self) -> tuple[Tensor, Tensor]:
        """Return the sample rows and the masks of all batches: both (steps, clients, batch), padded with 0."""
        sizes = torch.tensor([*zip_longest(*self.sizes, fillvalue=0)])
        mask = torch.arange(max(self.width, int(sizes.max()))) < sizes[:, :, None]
        held = [client.shares[client.task].rows for client in self.clients]
        positions = torch.cat([part for plan in self.plans for part, _ in plan])
        first = torch.tensor([0, *accumulate(map(len, held[:-1]))], device=positions.device)
        positions += first.repeat_interleave(torch.tensor([*map(sum, self.sizes)], device=positions.device))
        rows = torch.zeros(mask.shape, dtype=torch.int64, device=held[0].device)
        mask = mask.to(rows.device)
        rows.transpose(0, 1)[mask.transpose(0, 1)] = torch.cat(held)[positions]
        return rows, mask.to(torch.float32)

    def _gather(self, index: int) -> Tree:
        """Return the batches of all clients that take step `index`, from there on: leaves (steps, clients, batch, ...).

        One gather serves several small steps.
        """
        steps, live = slice(index, index + self._ahead), sum(index < count for count in self.steps)
        rows, mask = self._rows[steps, :live], self._mask[steps, :live]
        flat = rows.flatten()
        x, y = self._samples.gather(flat)
        leaves = {"x": x, "y": y, "ids": self._samples.index[flat]}
        return {"mask": mask, **{name: leaf.unflatten(0, rows.shape) for name, leaf in leaves.items()}}

    def _batch(self, at: list[int], index: int) -> Tree:
        """Return the batches of step `index` of some clients, padded to the longest: leaves (clients, batch, ...)."""
        if not self._plain:
            mine = ((self.clients[i], *self.plans[i][index]) for i in at)
            return _stacked([client.batch(part, rng.key(*change)) for client, part, change in mine])
        begin, ahead = self._gathered
        if index >= begin + len(ahead["y"]):
            begin, ahead = self._gathered = index, self._gather(index)
        width = max(self.width, *(self.sizes[i][index] for i in at))
        which = slice(len(at)) if at[-1] + 1 == len(at) else at
        parts = {name: ahead[name][index - begin, which, :width] for name in ("x", "y", "mask", "ids")}
        # Of a single client, `contiguous` would keep a stride of the padded batch, and so require another trace.
        alike = partial(torch.clone, memory_format=torch.contiguous_format) if len(at) == 1 else Tensor.contiguous
        return tree.map(alike, parts)

    def _recalled(self, drawn: list[Batch]) -> Tree:
        """Stack draws from memories, padded to the longest. Keeps the last stack: most draws repeat at every step."""
        before, stacked = self._memory
        if len(before) != len(drawn) or any(a is not b for a, b in zip(before, drawn, strict=True)):
            stacked = _stacked(drawn)
            self._memory = drawn, stacked
        return stacked


def _stacked(batches: Sequence[Batch]) -> Tree:
    """Stack batches by field, padded to the longest, without the fields that are None."""
    fields = {name: equally_long([getattr(batch, name) for batch in batches]) for name in batches[0]._fields
              if getattr(batches[0], name) is not None}  # fmt: skip
    width = max(len(batch.y) for batch in batches)
    return {name: torch.stack([_padded(leaf, width, name) for leaf in leaves]) for name, leaves in fields.items()}


def _padded(leaf: Tensor, width: int, name: str) -> Tensor:
    """Repeat the first sample, which any network takes; a mask, and a leaf without samples, are padded with zeros."""
    missing = (width - len(leaf), *leaf.shape[1:])
    if not missing[0]:
        return leaf
    return torch.cat([leaf, leaf.new_zeros(missing) if name == "mask" or not len(leaf) else leaf[:1].expand(missing)])
