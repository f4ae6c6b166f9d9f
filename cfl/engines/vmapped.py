"""The `vmapped` engine: the local steps of a block of clients at once, by `torch.func.vmap` over the local step.

A block is sorted by number of steps, so clients that have finished drop off its end. Batches of unequal size are padded
and masked. Batch statistics would include the padding, so with batch normalisation only clients with batches of equal
size take a step together. Random draws inside a step, above all of dropout, are made for the whole block: their values
differ from those of the `loop` engine, their distribution does not.
"""

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from itertools import repeat
from operator import itemgetter
from textwrap import shorten

import torch
from torch import Tensor

from cfl.contract import Batch, Client, Ctx, RoundInfo, RoundInputs, TreesByOwner
from cfl.core import HookError, Tree, rng, tree
from cfl.engines.block import ALL, Block, Group
from cfl.engines.loop import LoopEngine, Trained, check_writes, count_writes, named, recorded
from cfl.engines.step import LocalStep, StepInputs
from cfl.engines.traced import Traces, Trees


class _NeedsKeys(Exception):
    """A hook reads `ctx.key`, which differs between clients, so the clients cannot train as a block."""


class _OfBlock(Ctx):
    """The context of several clients at once."""

    @property
    def key(self) -> int:
        raise _NeedsKeys


@dataclass(frozen=True)
class VmappedEngine(LoopEngine):
    """Blocks of up to `block` clients. Clients of a block have states of equal shapes, as far as a step sees them.

    compile: compile the steps of whole blocks with whole batches, see `compiled`; with block=1 those of each client.
    """

    block: int = 16
    compile: bool = False
    traces: Traces = field(default_factory=Traces, compare=False)

    def trained(self, step: LocalStep, inputs: RoundInputs) -> Iterator[Trained]:
        for block in self.blocks(inputs.clients, inputs.states):
            with named("local training", block, inputs.info):
                try:
                    together = len(block) > 1 or self._compiles_single
                    trained = self._train_block(step, inputs, block) if together else None
                except _NeedsKeys:
                    trained = None
                except (RuntimeError, HookError) as error:
                    if not any(part in str(error) for part in ("vmap", "functorch", "atching rule")):
                        raise
                    why = shorten(str(error), 120, placeholder=" ...")
                    raise RuntimeError(f"clients cannot train as a block: {why}; set engine=loop or pool") from error
            yield from trained or super().trained(step, inputs._replace(clients=block))

    def blocks(self, clients: Sequence[Client], states: Mapping[int, Tree]) -> list[list[Client]]:
        """Group clients by the task's samples and the shapes of the states that a step sees, sort by steps, and cut."""
        alike: dict[object, list[Client]] = {}
        for client in clients:
            seen = self.composed.step_state(states[client.id])
            kinds = tuple((name, leaf.shape, leaf.dtype) for name, leaf in seen.items())
            alike.setdefault((id(client.shares[client.task].samples), kinds), []).append(client)
        found = []
        for group in alike.values():
            ordered = sorted(group, key=lambda client: (-self.steps(client), -len(client), client.id))
            found += [ordered[begin : begin + self.block] for begin in range(0, len(ordered), self.block)]
        return found

    def fault(self, inputs: RoundInputs, client: Client) -> str:
        # Hooks of a trace do not run, so they could not be watched.
        return super(VmappedEngine, replace(self, compile=False)).fault(inputs, client)

    def _train_block(self, step: LocalStep, inputs: RoundInputs, clients: list[Client]) -> list[Trained]:
        """Train the clients of a block for their local epochs. Raises _NeedsKeys if a hook reads `ctx.key`."""
        info, block, device = inputs.info, self._block(step, inputs, clients), clients[0].device
        dtype = next((leaf.dtype for leaf in block.local.params.values()), torch.float32)
        losses = torch.zeros(len(clients), block.steps[0], device=device, dtype=dtype)
        rate = torch.tensor(info.lr, dtype=torch.float64)
        before = count_writes({}, {clients[0].id: block.state})  # a copy, which `collect` does not see
        with self.model.lowered(), rng.fork(rng.key(info.key, "local", *block.ids.tolist()), device):
            for index in range(block.steps[0]):
                for group in self._groups(block, index):
                    local = block.weights(group.places)
                    own = {"params": local.params, "buffers": local.buffers, **block.inputs(group, index)}
                    own["noise"] = self._noise(info, [clients[i].id for i in group.at], local.params, index)
                    found = self._gradients(step, info, inputs.shared, own, index, rate)
                    if found["grads"]:
                        step.optimizer.update(found["grads"], local.optimizer, local.params, info.lr, index)
                    block.write(group.places, local._replace(buffers=found["buffers"]))
                    losses[group.places, index] = found["losses"][""].to(losses)
        check_writes(before, count_writes({}, {clients[0].id: block.state}), info)
        losses = _last(losses, torch.tensor(block.steps, device=device), self.epochs)
        # `finish` sees contiguous leaves, whatever the layout of the steps.
        leaves = tree.map(Tensor.contiguous, block.local.params | block.local.buffers)
        return [
            Trained(client, dict(zip(leaves, parts, strict=True)), count, loss)
            for client, count, loss, *parts in zip(clients, block.steps, losses, *leaves.values(), strict=True)
        ]

    def _block(self, step: LocalStep, inputs: RoundInputs, clients: list[Client]) -> Block:
        """Return a block before its first step: every client starts from the broadcast."""

        def stacked(leaf: Tensor) -> Tensor:
            """A copy of a leaf for each client."""
            if self._compiles_single and self._fast_layout:
                return self.model.layout.copy_of(leaf, compiled=True)[None]
            return leaf.expand(len(clients), *leaf.shape).clone()

        local = step.start(inputs.shared["params"], stacked)
        local = local._replace(buffers=tree.map(stacked, local.buffers))
        plans = []
        for client in clients:
            epochs = [self.plan(inputs.info, client, epoch) for epoch in range(self.epochs)]
            plans.append([(part, (key, number)) for parts, key in epochs for number, part in enumerate(parts)])
        state = tree.stack([self.composed.step_state(inputs.states[client.id]) for client in clients])
        memories = list(self._memories(inputs, clients))
        # One shape for all steps of a block, so that one compilation serves them; batch statistics forbid padding.
        width = self.batch_size if self.compile and not self.model.couples_samples else 1
        return Block(clients, local, state, plans, memories, width)

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
        if self.model.couples_samples:
            alike: dict[tuple[int, int], list[int]] = {}
            for place, memory in enumerate(drawn):
                alike.setdefault((block.sizes[place][index], len(memory.y)), []).append(place)
            groups = list(alike.values())
        return [Group(at, _places(at, live, len(block.clients)), [drawn[i] for i in at]) for at in groups]

    def _gradients(
        self, step: LocalStep, info: RoundInfo, shared: TreesByOwner, own: dict[str, Tree], index: int, lr: Tensor
    ) -> Trees:
        """Compute the gradients, the buffers after step `index`, and the losses (clients,) of a group.

        Gradients that one kernel can apply are applied to the weights and left out; the others are not applied.
        own: what differs between clients: "params", "buffers", "batch", "memory", "state", "client" and "noise";
        lr: the learning rate () float64.
        """

        def gradients(inputs: Trees, kind: type[Ctx]) -> Trees:
            sent = {owner.removeprefix("shared/"): inputs[owner] for owner in inputs if owner.startswith("shared/")}

            def gradient(
                params: Tree, buffers: Tree, batch: Tree, memory: Tree, state: Tree, client: Tree, noise: Tree
            ) -> tuple:
                given = StepInputs(sent, Batch(**batch), Batch(**memory), state, info.lr, index, client=client["id"])
                return step.gradient(params, buffers, kind(*step.context(given, buffers)), noise)

            grads, buffers, losses = torch.func.vmap(gradient, randomness="different")(*(inputs[name] for name in own))
            if step.optimizer.fuses(grads, inputs["params"]):
                step.optimizer.update(grads, {}, inputs["params"], inputs["lr"][""], index)
                grads = {}
            return {"grads": grads, "buffers": buffers, "losses": {"": losses}}

        inputs = own | {f"shared/{owner}": leaves for owner, leaves in shared.items()} | {"lr": {"": lr}}
        alike = not self.model.multi_head and not self.model.buffers_per_task
        # Which steps are compiled depends on nothing but their shapes, so that a resumed run compiles the same ones.
        whole = self.compile and own["batch"]["y"].shape == (self.block, self.batch_size)
        return self.traces(gradients, inputs, info.task, alike, info.lr, _OfBlock, compile=whole)

    @property
    def _compiles_single(self) -> bool:
        """Whether the steps of single clients are compiled."""
        return self.compile and self.block == 1


def _places(at: list[int], live: int, clients: int) -> slice | Tensor:
    """Return positions in a block as an index: a slice, which gives views, if they are all clients that still train."""
    if len(at) == live:
        return ALL if live == clients else slice(live)
    return torch.tensor(at)


def _last(losses: Tensor, steps: Tensor, epochs: int) -> Tensor:
    """Return the mean loss (clients,) over each client's last epoch. losses: (clients, steps); steps: by client."""
    index, first = torch.arange(losses.shape[1], device=losses.device), steps - steps // epochs
    chosen = (first[:, None] <= index) & (index < steps[:, None])
    return losses.where(chosen, 0).sum(1) / (steps - first)
