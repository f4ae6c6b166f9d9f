"""The `vmapped` engine: the local steps of a block of clients at once, by `torch.func.vmap` over the one local step.

Clients of a block are sorted by their steps, so those that are done drop off its end. Batches of unequal size are
padded and masked; in a network with batch statistics, which would see the padding, batches of equal size go together.
Random draws inside a step, dropout above all, are those of the block: equal in law to one client at a time.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property, partial
from itertools import repeat
from operator import itemgetter

import torch
from torch import Tensor
from torch.nn.modules.batchnorm import _BatchNorm
from torch.nn.utils.rnn import pad_sequence

from cfl.contract.context import Ctx
from cfl.contract.data import Batch, Client
from cfl.contract.rounds import RoundInfo, TreesByOwner
from cfl.core import rng, tree
from cfl.core.tree import Tree
from cfl.engines.loop import LoopEngine, Trained, named, recorded
from cfl.engines.step import Local, LocalStep
from cfl.engines.traced import Traces

_ALL = slice(None)


@dataclass
class Block:
    """Clients that train together, those with the most steps first. state: what hooks see of them, stacked.

    plans: for each client and each of its steps, the positions in its data of the batch, and what gives the key of
    random changes to it; memories: what each draws from its memory, step by step.
    """

    clients: list[Client]
    state: Tree
    plans: list[list[tuple[Tensor, tuple[int, int]]]]
    memories: list[Iterator[Batch]]

    def __post_init__(self) -> None:
        self.steps = [len(plan) for plan in self.plans]
        self._sizes = [[len(part) for part, _ in plan] for plan in self.plans]
        self._seen: tuple[list[Batch], Tree] = [], {}
        shares = [client.shares[client.task] for client in self.clients]
        self._samples = shares[0].samples
        self._plain = not self._samples.augment and all(client.now == (client.task,) for client in self.clients)
        if self._plain:  # one gather a step for all clients: rows of the samples (clients, steps, batch)
            most = max(self.steps)
            every = torch.tensor([sizes + [0] * (most - len(sizes)) for sizes in self._sizes])
            mask = torch.arange(max(1, int(every.max()))) < every[:, :, None]
            held = [
                share.rows[torch.cat([part for part, _ in plan])]
                for share, plan in zip(shares, self.plans, strict=True)
            ]
            self._mask = mask.to(held[0].device)
            self._rows = torch.zeros(mask.shape, dtype=torch.int64, device=held[0].device)
            self._rows[self._mask] = torch.cat(held)
            self._mask = self._mask.to(torch.float32)

    def sizes(self, index: int, live: int) -> list[int]:
        """Samples in the batch of step `index` of each of the first `live` clients."""
        return [sizes[index] for sizes in self._sizes[:live]]

    def batch(self, index: int, at: list[int]) -> Tree:
        """The batches of step `index` of some clients, padded to the longest: leaves (clients, batch, ...)."""
        if not self._plain:
            mine = ((self.clients[i], *self.plans[i][index]) for i in at)
            return _stacked([client.batch(part, rng.key(*change)) for client, part, change in mine])
        width = max(1, *(self._sizes[i][index] for i in at))
        which = slice(len(at)) if at[-1] + 1 == len(at) else at
        rows, mask = self._rows[which, index, :width], self._mask[which, index, :width].contiguous()
        flat = rows.flatten()
        x, y = self._samples.gather(flat)
        ids = self._samples.index[flat]
        return {"x": x.unflatten(0, rows.shape), "y": y.view(rows.shape), "mask": mask, "ids": ids.view(rows.shape)}

    def memory(self, drawn: list[Batch]) -> Tree:
        """Draws from memories, padded to the longest and stacked; most clients have the same at every step."""
        before, stacked = self._seen
        if len(before) != len(drawn) or any(a is not b for a, b in zip(before, drawn, strict=True)):
            stacked = _stacked(drawn)
            self._seen = drawn, stacked
        return stacked


@dataclass(frozen=True)
class VmappedEngine(LoopEngine):
    """Clients in blocks of `block`; those whose hooks see states of other shapes than all others' go alone."""

    block: int = 16
    traces: Traces = field(default_factory=Traces, compare=False)

    def trained(
        self,
        step: LocalStep,
        info: RoundInfo,
        shared: TreesByOwner,
        states: Mapping[int, Tree],
        clients: Sequence[Client],
    ) -> Iterator[Trained]:
        for block in self.blocks(clients, states):
            with named("local training", block, info):
                if len(block) == 1:
                    yield self._train(step, info, shared, states[block[0].id], block[0])
                else:
                    yield from self._train_block(step, info, shared, states, block)

    def blocks(self, clients: Sequence[Client], states: Mapping[int, Tree]) -> list[list[Client]]:
        """Clients whose hooks see states of equal shapes, those with the most steps first, `block` at a time."""
        alike: dict[object, list[Client]] = {}
        for client in clients:
            seen = self.composed.step_state(states[client.id])
            kinds = tuple((name, leaf.shape, leaf.dtype) for name, leaf in seen.items())
            alike.setdefault(kinds, []).append(client)
        found = []
        for group in alike.values():
            ordered = sorted(group, key=lambda client: (-client.steps(self.batch_size), -len(client), client.id))
            found += [ordered[begin : begin + self.block] for begin in range(0, len(ordered), self.block)]
        return found

    def _train_block(
        self, step: LocalStep, info: RoundInfo, shared: TreesByOwner, states: Mapping[int, Tree], block: list[Client]
    ) -> Iterator[Trained]:
        together = self._block(info, states, block)
        start = step.start(shared["params"])
        params, buffers = (
            tree.map(lambda leaf: leaf.expand(len(block), *leaf.shape).clone(), part) for part in start[:2]
        )
        local, steps = Local(params, buffers, step.optimizer.init(params)), together.steps
        ids = torch.tensor([client.id for client in block])
        dtype = next((leaf.dtype for leaf in params.values()), torch.float32)
        losses = torch.zeros(len(block), steps[0], device=block[0].device, dtype=dtype)
        self.model.module.train()
        with rng.fork(rng.key(info.key, "local", *ids.tolist()), block[0].device):
            for index in range(steps[0]):
                live = sum(index < count for count in steps)
                drawn = [next(memory) for memory in together.memories[:live]]
                for at in self._alike(together.sizes(index, live), drawn):
                    places = _places(at, live, len(block))
                    own = {
                        "batch": together.batch(index, at),
                        "memory": together.memory([drawn[i] for i in at]),
                        "state": tree.map(itemgetter(places), together.state),
                        "client": {"id": ids[places]},
                    }
                    losses[places, index] = self._advance(step, local, places, own, shared, info, index).to(losses)
        losses = _last(losses, torch.tensor(steps, device=losses.device), self.epochs)
        leaves = local.params | local.buffers
        for client, count, loss, *parts in zip(block, steps, losses, *leaves.values(), strict=True):
            yield Trained(client, dict(zip(leaves, parts, strict=True)), count, loss)

    def _block(self, info: RoundInfo, states: Mapping[int, Tree], clients: list[Client]) -> Block:
        plans = []
        for client in clients:
            epochs = [self.plan(info, client, epoch) for epoch in range(self.epochs)]
            plans.append([(part, (key, number)) for parts, key in epochs for number, part in enumerate(parts)])
        seen = [self.composed.step_state(states[client.id]) for client in clients]
        return Block(clients, tree.stack(seen), plans, list(self._memories(info, states, clients)))

    def _memories(
        self, info: RoundInfo, states: Mapping[int, Tree], clients: list[Client]
    ) -> Iterator[Iterator[Batch]]:
        """What each client draws from its memory; those that have none draw the same nothing."""
        nothing: dict[int, Iterator[Batch]] = {}
        for client in clients:
            state, samples = states[client.id], id(client.shares[client.task].samples)
            if len(recorded(state, client)):
                yield self.memories(info, state, client)
            else:
                if samples not in nothing:
                    nothing[samples] = repeat(next(self.memories(info, state, client)))
                yield nothing[samples]

    def _alike(self, sizes: list[int], drawn: list[Batch]) -> list[list[int]]:
        """Places in a block that take a step together: all, or those without need of padding where it does harm."""
        if not self._batch_statistics:
            return [list(range(len(sizes)))]
        groups: dict[tuple[int, int], list[int]] = {}
        for place, (size, memory) in enumerate(zip(sizes, drawn, strict=True)):
            groups.setdefault((size, len(memory.y)), []).append(place)
        return list(groups.values())

    def _advance(
        self,
        step: LocalStep,
        local: Local,
        at: Tensor | slice,
        own: dict[str, Tree],
        shared: TreesByOwner,
        info: RoundInfo,
        index: int,
    ) -> Tensor:
        """One local step of the clients at some places of a block, in place; their losses (clients,).

        own: what differs between clients beside their weights: "batch", "memory", "state" and "client".
        """
        key = rng.key(info.key, "step", int(own["client"]["id"][0]), index)

        def gradients(inputs: Mapping[str, Tree], kind: type[Ctx]) -> Mapping[str, Tree]:
            sent = {owner.removeprefix("shared/"): leaves for owner, leaves in inputs.items() if owner not in mine}

            def gradient(params: Tree, buffers: Tree, batch: Tree, memory: Tree, state: Tree, client: Tree) -> tuple:
                seen = Batch(**batch), Batch(**memory)
                ctx = step.context(sent, state, index, key, *seen, buffers, info.lr, client["id"])
                return step.gradient(params, buffers, kind(*ctx))

            grads, buffers, losses = torch.func.vmap(gradient, randomness="different")(*(inputs[name] for name in mine))
            return {"grads": grads, "buffers": buffers, "losses": {"": losses}}

        now = local if at is _ALL else Local(*(tree.map(itemgetter(at), leaves) for leaves in local))
        mine = {"params": now.params, "buffers": now.buffers, **own}
        inputs = mine | {f"shared/{owner}": leaves for owner, leaves in shared.items()}
        alike = not self.model.multi_head and not self.model.buffers_per_task
        found = self.traces(gradients, inputs, info.task, alike)
        step.optimizer.update(found["grads"], now.optimizer, now.params, info.lr, index)
        for name, leaf in found["buffers"].items():
            local.buffers[name][at] = leaf
        if isinstance(at, Tensor):  # a slice is a view of the block, and written already
            for whole, part in ((local.params, now.params), (local.optimizer, now.optimizer)):
                for name, leaf in part.items():
                    whole[name][at] = leaf
        return found["losses"][""]

    @cached_property
    def _batch_statistics(self) -> bool:
        return any(isinstance(layer, _BatchNorm) for layer in self.model.module.modules())


def _places(at: list[int], live: int, clients: int) -> slice | Tensor:
    """Places in a block as an index; a slice, whose leaves are views of the block's, where they are all that train."""
    if len(at) == live:
        return _ALL if live == clients else slice(live)
    return torch.tensor(at)


def _last(losses: Tensor, steps: Tensor, epochs: int) -> Tensor:
    """The mean over each client's last epoch (clients,) of losses (clients, steps), of which each made `steps`."""
    index, first = torch.arange(losses.shape[1], device=losses.device), steps - steps // epochs
    chosen = (first[:, None] <= index) & (index < steps[:, None])
    return losses.where(chosen, 0).sum(1) / (steps - first)


def _stacked(batches: Sequence[Batch]) -> Tree:
    """Batches padded to the longest and stacked, by field, without those that are None."""
    fields = [name for name, leaf in batches[0]._asdict().items() if leaf is not None]
    alike = len({len(batch.y) for batch in batches}) == 1
    stack = torch.stack if alike else partial(pad_sequence, batch_first=True)
    return {name: stack([getattr(batch, name) for batch in batches]) for name in fields}
