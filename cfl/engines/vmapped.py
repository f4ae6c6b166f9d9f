"""The `vmapped` engine: the local steps of a block of clients at once, by `torch.func.vmap` over the local step.

A block is sorted by number of steps, so clients that have finished drop off its end. Batches of unequal size are padded
and masked. Batch statistics would include the padding, so with batch normalisation only clients with batches of equal
size take a step together. Random draws inside a step, above all of dropout, are made for the whole block: their values
differ from those of the `loop` engine, their distribution does not.
"""

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property, partial
from itertools import repeat, zip_longest
from operator import itemgetter
from typing import NamedTuple

import torch
from torch import Tensor
from torch.nn.modules.batchnorm import _BatchNorm
from torch.nn.utils.rnn import pad_sequence

from cfl.contract import Batch, Client, Ctx, RoundInfo, RoundInputs, TreesByOwner
from cfl.core import Tree, rng, tree
from cfl.engines.loop import LoopEngine, Trained, named, recorded
from cfl.engines.step import Local, LocalStep, StepInputs
from cfl.engines.traced import Traces, Trees

_ALL = slice(None)


class _NeedsKeys(Exception):
    """A hook reads `ctx.key`, which differs between clients, so the clients cannot train as a block."""


class _OfBlock(Ctx):
    """The context of several clients at once."""

    @property
    def key(self) -> int:
        raise _NeedsKeys


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
    memories: for each client, the samples that it draws from its memory at each step.
    """

    clients: list[Client]
    local: Local
    state: Tree
    plans: list[list[tuple[Tensor, tuple[int, int]]]]
    memories: list[Iterator[Batch]]

    def __post_init__(self) -> None:
        self.ids = torch.tensor([client.id for client in self.clients])
        self.sizes = [[len(part) for part, _ in plan] for plan in self.plans]
        self.steps = [len(plan) for plan in self.plans]
        self._memory: tuple[list[Batch], Tree] = [], {}
        self._samples = self.clients[0].shares[self.clients[0].task].samples
        self._plain = not self._samples.augment and all(client.now == (client.task,) for client in self.clients)
        if self._plain:
            self._rows, self._mask = self._all_rows()

    def weights(self, places: slice | Tensor) -> Local:
        """Return the weights of some clients, as views if `places` is a slice."""
        return self.local if places is _ALL else Local(*(tree.map(itemgetter(places), part) for part in self.local))

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
        """Return the sample rows and the masks of all batches: both (clients, steps, batch), padded with 0.

        One gather a step then serves all clients.
        """
        sizes = torch.tensor([*zip_longest(*self.sizes, fillvalue=0)]).T.contiguous()
        mask = torch.arange(max(1, int(sizes.max()))) < sizes[:, :, None]
        held = [
            client.shares[client.task].rows[torch.cat([part for part, _ in plan])]
            for client, plan in zip(self.clients, self.plans, strict=True)
        ]
        rows = torch.zeros(mask.shape, dtype=torch.int64, device=held[0].device)
        mask = mask.to(rows.device)
        rows[mask] = torch.cat(held)
        return rows, mask.to(torch.float32)

    def _batch(self, at: list[int], index: int) -> Tree:
        """Return the batches of step `index` of some clients, padded to the longest: leaves (clients, batch, ...)."""
        if not self._plain:
            mine = ((self.clients[i], *self.plans[i][index]) for i in at)
            return _stacked([client.batch(part, rng.key(*change)) for client, part, change in mine])
        width = max(1, *(self.sizes[i][index] for i in at))
        which = slice(len(at)) if at[-1] + 1 == len(at) else at
        rows, mask = self._rows[which, index, :width], self._mask[which, index, :width].contiguous()
        flat = rows.flatten()
        x, y = self._samples.gather(flat)
        ids = self._samples.index[flat]
        return {"x": x.unflatten(0, rows.shape), "y": y.view(rows.shape), "mask": mask, "ids": ids.view(rows.shape)}

    def _recalled(self, drawn: list[Batch]) -> Tree:
        """Stack draws from memories, padded to the longest. Keeps the last stack: most draws repeat at every step."""
        before, stacked = self._memory
        if len(before) != len(drawn) or any(a is not b for a, b in zip(before, drawn, strict=True)):
            stacked = _stacked(drawn)
            self._memory = drawn, stacked
        return stacked


@dataclass(frozen=True)
class VmappedEngine(LoopEngine):
    """Blocks of up to `block` clients. Clients of a block have states of equal shapes, as far as a step sees them."""

    block: int = 16
    traces: Traces = field(default_factory=Traces, compare=False)

    def trained(self, step: LocalStep, inputs: RoundInputs) -> Iterator[Trained]:
        for block in self.blocks(inputs.clients, inputs.states):
            with named("local training", block, inputs.info):
                try:
                    trained = self._train_block(step, inputs, block) if len(block) > 1 else None
                except _NeedsKeys:
                    trained = None
                yield from trained or (self._train(step, inputs, client) for client in block)

    def blocks(self, clients: Sequence[Client], states: Mapping[int, Tree]) -> list[list[Client]]:
        """Group clients by the shapes of the states that a step sees, sort by steps, and cut into blocks."""
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

    def _train_block(self, step: LocalStep, inputs: RoundInputs, clients: list[Client]) -> list[Trained]:
        """Train the clients of a block for their local epochs. Raises _NeedsKeys if a hook reads `ctx.key`."""
        info, block, device = inputs.info, self._block(step, inputs, clients), clients[0].device
        dtype = next((leaf.dtype for leaf in block.local.params.values()), torch.float32)
        losses = torch.zeros(len(clients), block.steps[0], device=device, dtype=dtype)
        self.model.module.train()
        with rng.fork(rng.key(info.key, "local", *block.ids.tolist()), device):
            for index in range(block.steps[0]):
                for group in self._groups(block, index):
                    local = block.weights(group.places)
                    own = {"params": local.params, "buffers": local.buffers, **block.inputs(group, index)}
                    own["noise"] = self._noise(info, [clients[i].id for i in group.at], local.params, index)
                    found = self._gradients(step, info, inputs.shared, own, index)
                    step.optimizer.update(found["grads"], local.optimizer, local.params, info.lr, index)
                    block.write(group.places, local._replace(buffers=found["buffers"]))
                    losses[group.places, index] = found["losses"][""].to(losses)
        losses = _last(losses, torch.tensor(block.steps, device=device), self.epochs)
        leaves = block.local.params | block.local.buffers
        return [
            Trained(client, dict(zip(leaves, parts, strict=True)), count, loss)
            for client, count, loss, *parts in zip(clients, block.steps, losses, *leaves.values(), strict=True)
        ]

    def _block(self, step: LocalStep, inputs: RoundInputs, clients: list[Client]) -> Block:
        """Return a block before its first step: every client starts from the broadcast."""
        params, buffers = (
            tree.map(lambda leaf: leaf.expand(len(clients), *leaf.shape).clone(), part)
            for part in step.start(inputs.shared["params"])[:2]
        )
        plans = []
        for client in clients:
            epochs = [self.plan(inputs.info, client, epoch) for epoch in range(self.epochs)]
            plans.append([(part, (key, number)) for parts, key in epochs for number, part in enumerate(parts)])
        state = tree.stack([self.composed.step_state(inputs.states[client.id]) for client in clients])
        memories = list(self._memories(inputs, clients))
        return Block(clients, Local(params, buffers, step.optimizer.init(params)), state, plans, memories)

    def _memories(self, inputs: RoundInputs, clients: list[Client]) -> Iterator[Iterator[Batch]]:
        """Yield the draws of each client from its memory. Clients without a memory share one empty batch."""
        empty: dict[int, Iterator[Batch]] = {}
        for client in clients:
            state, samples = inputs.states[client.id], id(client.shares[client.task].samples)
            if len(recorded(state, client)):
                yield self.memories(inputs.info, state, client)
            else:
                if samples not in empty:
                    empty[samples] = repeat(next(self.memories(inputs.info, state, client)))
                yield empty[samples]

    def _noise(self, info: RoundInfo, ids: list[int], params: Tree, index: int) -> Tree:
        """Draw the noise of step `index` for clients of a block: leaves (clients, ...); none without DP-SGD."""
        if self.noise is None:
            return {}
        like = tree.map(itemgetter(0), params)
        return tree.stack([self.noise.draw(like, rng.key(info.key, "step", id, index)) for id in ids])

    def _groups(self, block: Block, index: int) -> list[Group]:
        """Return who takes step `index` together: all clients, or with batch statistics those that need no padding."""
        live = sum(index < count for count in block.steps)
        drawn = [next(memory) for memory in block.memories[:live]]
        groups = [list(range(live))]
        if self._batch_statistics:
            alike: dict[tuple[int, int], list[int]] = {}
            for place, memory in enumerate(drawn):
                alike.setdefault((block.sizes[place][index], len(memory.y)), []).append(place)
            groups = list(alike.values())
        return [Group(at, _places(at, live, len(block.clients)), [drawn[i] for i in at]) for at in groups]

    def _gradients(
        self, step: LocalStep, info: RoundInfo, shared: TreesByOwner, own: dict[str, Tree], index: int
    ) -> Trees:
        """Compute the gradients, the buffers after step `index`, and the losses (clients,) of a group, without updates.

        own: what differs between clients: "params", "buffers", "batch", "memory", "state", "client" and "noise".
        """

        def gradients(inputs: Trees, kind: type[Ctx]) -> Trees:
            sent = {owner.removeprefix("shared/"): leaves for owner, leaves in inputs.items() if owner not in own}

            def gradient(
                params: Tree, buffers: Tree, batch: Tree, memory: Tree, state: Tree, client: Tree, noise: Tree
            ) -> tuple:
                given = StepInputs(sent, Batch(**batch), Batch(**memory), state, info.lr, index, client=client["id"])
                return step.gradient(params, buffers, kind(*step.context(given, buffers)), noise)

            grads, buffers, losses = torch.func.vmap(gradient, randomness="different")(*(inputs[name] for name in own))
            return {"grads": grads, "buffers": buffers, "losses": {"": losses}}

        inputs = own | {f"shared/{owner}": leaves for owner, leaves in shared.items()}
        alike = not self.model.multi_head and not self.model.buffers_per_task
        return self.traces(gradients, inputs, info.task, alike, info.lr, _OfBlock)

    @cached_property
    def _batch_statistics(self) -> bool:
        return any(isinstance(layer, _BatchNorm) for layer in self.model.module.modules())


def _places(at: list[int], live: int, clients: int) -> slice | Tensor:
    """Return positions in a block as an index: a slice, which gives views, if they are all clients that still train."""
    if len(at) == live:
        return _ALL if live == clients else slice(live)
    return torch.tensor(at)


def _last(losses: Tensor, steps: Tensor, epochs: int) -> Tensor:
    """Return the mean loss (clients,) over each client's last epoch. losses: (clients, steps); steps: by client."""
    index, first = torch.arange(losses.shape[1], device=losses.device), steps - steps // epochs
    chosen = (first[:, None] <= index) & (index < steps[:, None])
    return losses.where(chosen, 0).sum(1) / (steps - first)


def _stacked(batches: Sequence[Batch]) -> Tree:
    """Stack batches by field, padded to the longest, without the fields that are None."""
    fields = [name for name, leaf in batches[0]._asdict().items() if leaf is not None]
    alike = len({len(batch.y) for batch in batches}) == 1
    stack = torch.stack if alike else partial(pad_sequence, batch_first=True)
    return {name: stack([getattr(batch, name) for batch in batches]) for name in fields}
