"""The `vmapped` engine: the local steps of a block of clients at once, by `torch.func.vmap` over the one local step.

Clients of a block are sorted by their steps, so those that are done drop off its end. Batches of unequal size are
padded and masked; in a network with batch statistics, which would see the padding, batches of equal size go together.
Random draws inside a step, dropout above all, are those of the block: equal in law to one client at a time.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import NamedTuple

import torch
from torch import Tensor
from torch.nn.modules.batchnorm import _BatchNorm
from torch.nn.utils.rnn import pad_sequence

from cfl import rng, tree
from cfl.engines.loop import LoopEngine, Trained, named
from cfl.engines.step import Local, LocalStep
from cfl.local.chain import STRATEGY
from cfl.tree import Tree
from cfl.types import MEMORY, Batch, Client, Parts, RoundInfo

_UNSEEN = f"{STRATEGY}/{MEMORY}"  # hooks see the samples themselves, as ctx.memory


class Member(NamedTuple):
    """A client of a block. state: what hooks see of it; parts: positions of each step's batch; keys: of its changes."""

    client: Client
    state: Tree
    parts: list[Tensor]
    keys: list[int | None]
    memories: Iterator[Batch]


@dataclass(frozen=True)
class VmappedEngine(LoopEngine):
    """Clients in blocks of `block`; those whose states have other shapes than all others' go alone."""

    block: int = 16

    def trained(
        self, step: LocalStep, info: RoundInfo, shared: Parts, states: Mapping[int, Tree], clients: Sequence[Client]
    ) -> Iterator[Trained]:
        for block in self.blocks(clients, states):
            with named("local training", block, info):
                if len(block) == 1:
                    yield self._train(step, info, shared, states[block[0].id], block[0])
                else:
                    yield from self._train_block(step, info, shared, states, block)

    def blocks(self, clients: Sequence[Client], states: Mapping[int, Tree]) -> list[list[Client]]:
        """Clients with states of equal shapes, those with the most steps first, `block` at a time."""
        alike: dict[object, list[Client]] = {}
        for client in clients:
            kinds = tuple((name, leaf.shape, leaf.dtype) for name, leaf in states[client.id].items() if name != _UNSEEN)
            alike.setdefault(kinds, []).append(client)
        found = []
        for group in alike.values():
            ordered = sorted(group, key=lambda client: (-client.steps(self.batch_size), -len(client), client.id))
            found += [ordered[begin : begin + self.block] for begin in range(0, len(ordered), self.block)]
        return found

    def _train_block(
        self, step: LocalStep, info: RoundInfo, shared: Parts, states: Mapping[int, Tree], block: list[Client]
    ) -> Iterator[Trained]:
        members = [self._member(info, states[client.id], client) for client in block]
        steps = [len(member.parts) for member in members]
        state = tree.stack([member.state for member in members])
        ids = torch.tensor([client.id for client in block])
        start = step.start(shared["params"])
        params, buffers = (
            tree.map(lambda leaf: leaf.repeat(len(block), *[1] * leaf.dim()), part) for part in start[:2]
        )
        local = Local(params, buffers, step.optimizer.init(params))
        losses = torch.zeros(len(block), steps[0], device=block[0].device)
        self.model.module.train()
        with rng.fork(rng.key(info.key, "local", *ids.tolist()), block[0].device):
            for index in range(steps[0]):
                live = members[: sum(index < count for count in steps)]
                key = rng.key(info.key, "step", block[0].id, index)
                for at, batch, memory in self._batches(live, index):
                    losses[at, index] = _advance(
                        step, local, at, batch, memory, shared, state, ids, lr=info.lr, index=index, key=key
                    )
        for number, client in enumerate(block):
            last = losses[number, steps[number] - steps[number] // self.epochs : steps[number]]
            # copies: a client's leaf that stays would keep the whole block in memory
            leaves = {name: leaf[number].clone() for name, leaf in {**local.params, **local.buffers}.items()}
            yield Trained(client, leaves, steps[number], last.mean())

    def _member(self, info: RoundInfo, state: Tree, client: Client) -> Member:
        parts: list[Tensor] = []
        keys: list[int | None] = []
        for epoch in range(self.epochs):
            positions, changes = self.plan(info, client, epoch)
            keys += [rng.key(changes, number) for number in range(len(positions))]
            parts += positions
        seen = {name: leaf for name, leaf in state.items() if name != _UNSEEN}
        return Member(client, seen, parts, keys, self.memories(info, state, client))

    def _batches(self, live: list[Member], index: int) -> Iterator[tuple[Tensor | slice, Tree, Tree]]:
        """Places in the block, and the stacked batches and memories there: all at once where padding does no harm."""
        memories = [next(member.memories) for member in live]
        if not self._batch_statistics:
            yield slice(len(live)), _gathered(live, index), _stacked(memories)
            return
        sizes: dict[tuple[int, int], list[int]] = {}
        for place, (member, memory) in enumerate(zip(live, memories, strict=True)):
            sizes.setdefault((len(member.parts[index]), len(memory.y)), []).append(place)
        for places in sizes.values():
            at = slice(len(live)) if len(places) == len(live) else torch.tensor(places)
            yield at, _gathered([live[place] for place in places], index), _stacked([memories[i] for i in places])

    @cached_property
    def _batch_statistics(self) -> bool:
        return any(isinstance(layer, _BatchNorm) for layer in self.model.module.modules())


def _advance(
    step: LocalStep,
    local: Local,
    at: Tensor | slice,
    batch: Tree,
    memory: Tree,
    shared: Parts,
    state: Tree,
    ids: Tensor,
    *,
    lr: float,
    index: int,
    key: int,
) -> Tensor:
    """One local step of the clients at some places of a block, in place; their losses (clients,)."""

    def gradient(
        params: Tree, buffers: Tree, batch: Tree, memory: Tree, state: Tree, client: Tensor
    ) -> tuple[Tree, Tree, Tensor]:
        ctx = step.context(shared, state, index, key, Batch(**batch), Batch(**memory), buffers, lr, client)
        return step.gradient(params, buffers, ctx)

    own = Local(*({name: leaf[at] for name, leaf in leaves.items()} for leaves in local))
    mine = {name: leaf[at] for name, leaf in state.items()}
    grads, buffers, losses = torch.func.vmap(gradient, randomness="different")(
        own.params, own.buffers, batch, memory, mine, ids[at]
    )
    step.optimizer.update(grads, own.optimizer, own.params, lr, index)
    for name, leaf in buffers.items():
        local.buffers[name][at] = leaf
    if isinstance(at, Tensor):  # a slice is a view of the block, and written already
        for whole, part in ((local.params, own.params), (local.optimizer, own.optimizer)):
            for name, leaf in part.items():
                whole[name][at] = leaf
    return losses


def _gathered(live: list[Member], index: int) -> Tree:
    """The batches of step `index`, padded to the longest: leaves (clients, batch, ...)."""
    parts = [member.parts[index] for member in live]
    shares = [member.client.shares[member.client.task] for member in live]
    samples = shares[0].samples
    if samples.augment or any(member.client.now != (member.client.task,) for member in live):
        return _stacked(
            [member.client.batch(part, member.keys[index]) for member, part in zip(live, parts, strict=True)]
        )
    held = [share.rows[part] if len(part) else share.rows[:1] for share, part in zip(shares, parts, strict=True)]
    rows, sizes = pad_sequence(held, batch_first=True), torch.tensor([len(part) for part in parts])
    x, y = samples.gather(rows.flatten())
    mask = (torch.arange(rows.shape[1]) < sizes[:, None]).to(x)
    return {"x": x.unflatten(0, rows.shape), "y": y.view_as(rows), "mask": mask, "ids": samples.index[rows]}


def _stacked(batches: Sequence[Batch]) -> Tree:
    """Batches padded to the longest and stacked, by field, without those that are None."""
    fields = [name for name, leaf in batches[0]._asdict().items() if leaf is not None]
    return {name: pad_sequence([getattr(batch, name) for batch in batches], batch_first=True) for name in fields}
