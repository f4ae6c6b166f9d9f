"""The hooks of a run's strategy and regularizers as one, each with its own state and its own part of the broadcast."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import cached_property
from typing import cast

import torch
from torch import Tensor

from cfl.contract.context import Ctx
from cfl.contract.data import MEMORY, Batch
from cfl.contract.regularizer import GradFn, LocalRegularizer
from cfl.contract.rounds import RoundInfo, Server, TreesByOwner
from cfl.contract.strategy import Strategy
from cfl.core import tree
from cfl.core.tree import Tree
from cfl.models.handle import Model

STRATEGY = "strategy"


@dataclass(frozen=True)
class ComposedMethod:
    """members: owner ("strategy", then the regularizers' names in the user's order) to hooks.

    The Ctx that a chain gets has the states of all owners flattened as "owner/name"; each member sees its own alone.
    A regularizer's tree on the server, and what it sends down, are "local/<owner>" in the server's trees and the parts.
    """

    members: Mapping[str, LocalRegularizer]

    @property
    def strategy(self) -> Strategy:
        """The run's strategy."""
        return cast("Strategy", self.members[STRATEGY])

    @cached_property
    def regularizers(self) -> dict[str, LocalRegularizer]:
        """All members but the strategy."""
        return {owner: member for owner, member in self.members.items() if owner != STRATEGY}

    @cached_property
    def borrowed(self) -> frozenset[str]:
        """Owners whose terms stay out of the update, see `LocalRegularizer.borrows`."""
        return frozenset(member.borrows for member in self.members.values() if member.borrows)

    def client_state(self, stored: Tree | None, params: Tree, model: Model) -> Tree:
        """A client's state at its first round of a task: all new, but for what is stored of the strategy."""
        state: Tree = {}
        for owner, member in self.members.items():
            if owner == STRATEGY and stored is not None:
                own = own_state(stored, owner)
            else:
                own = member.init_client(params, model)
            state |= {f"{owner}/{name}": leaf for name, leaf in own.items()}
        return state

    def step_state(self, state: Tree) -> Tree:
        """What the hooks of a step get of a client's state; of a memory they get samples, as ctx.memory, not places."""
        hidden = tuple(f"{owner}/" for owner, member in self.members.items() if not member.steps_see_state)
        kept = (name for name in state if name != f"{STRATEGY}/{MEMORY}" and not name.startswith(hidden))
        return tree.select(state, kept)

    def end_task(self, server: Server, clients: Mapping[int, Tree]) -> tuple[Server, dict[int, Tree]]:
        """The trees of server and clients without those of the regularizers, which are of one task."""
        kept = {
            id: {name: leaf for name, leaf in state.items() if name.startswith(f"{STRATEGY}/")}
            for id, state in clients.items()
        }
        return {name: leaves for name, leaves in server.items() if not name.startswith("local/")}, kept

    def broadcast(self, server: Server, info: RoundInfo) -> TreesByOwner:
        """All that goes down in a round."""
        parts = self.strategy.broadcast(server, info)
        for owner, member in self.regularizers.items() if info.phase.train else ():
            if sent := member.provide(self._shared(server, owner, parts["params"], info), info):
                parts = {**parts, _place(owner): sent}
        return parts

    def absorb(self, server: Server, parts: TreesByOwner, mean: TreesByOwner, info: RoundInfo, lr: float) -> Server:
        """The server's trees after the round: all `server_step` in order, then `absorb`. parts: what went down."""
        trees: Server = {}
        acting = sorted(self.regularizers.items(), key=lambda item: item[1].turn)
        for owner, member in acting if STRATEGY in mean else ():
            own = self._shared(server, owner, parts["params"], info)
            step, own = member.server_step(mean[STRATEGY], own, mean.get(owner, {}), parts["params"], info)
            mean = {**mean, STRATEGY: step}
            trees[_place(owner)] = own
        after = self.strategy.absorb(server, mean, info, lr)
        kept = {name: leaves for name, leaves in server.items() if name.startswith("local/")}
        return {**after, **kept, **trees}

    def augment(self, batch: Batch, ctx: Ctx) -> Batch:
        for owner, member in self.acting["augment"]:
            batch = member.augment(batch, _own(ctx, owner)._replace(batch=batch))
        return batch

    def loss(self, logits: Tensor, ctx: Ctx) -> Tensor:
        return self.strategy.loss(logits, _own(ctx, STRATEGY))

    def penalty(self, params: Tree, logits: Tensor, ctx: Ctx) -> Tensor | float:
        return sum(member.penalty(params, logits, _own(ctx, owner)) for owner, member in self.acting["penalty"])

    def around(self, grad_fn: GradFn) -> GradFn:
        for owner, member in self.acting["around"]:
            grad_fn = self._scoped(member, owner, grad_fn)
        return grad_fn

    def adjust(self, grads: Tree, params: Tree, ctx: Ctx) -> Tree:
        for owner, member in sorted(self.acting["adjust"], key=lambda item: item[1].hard_constraint):
            grads = member.adjust(grads, params, _own(ctx, owner))
        return grads

    @cached_property
    def acting(self) -> dict[str, list[tuple[str, LocalRegularizer]]]:
        """The hooks of a step to the members that have them, less those whose terms are borrowed."""
        return {
            hook: [
                (owner, member)
                for owner, member in self.members.items()
                if getattr(type(member), hook) is not getattr(LocalRegularizer, hook)
                and (hook == "augment" or owner not in self.borrowed)
            ]
            for hook in ("augment", "penalty", "around", "adjust")
        }

    def finish(self, params: Tree, ctx: Ctx, steps: int) -> tuple[TreesByOwner, Tree]:
        uploads: TreesByOwner = {}
        states: Tree = {}
        for owner, member in self.members.items():
            upload, state = member.finish(params, _own(ctx, owner)._replace(lent=owner in self.borrowed), steps)
            states |= {f"{owner}/{name}": leaf for name, leaf in state.items()}
            if upload:
                uploads[owner] = upload
        for owner, member in self.regularizers.items() if STRATEGY in uploads else ():
            uploads[STRATEGY] = member.send(uploads[STRATEGY], _own(ctx, owner), steps)
        return uploads, states

    def _shared(self, server: Server, owner: str, params: Tree, info: RoundInfo) -> Tree:
        """The server's tree of a regularizer."""
        place = _place(owner)
        return server[place] if place in server else self.members[owner].init_shared(params, info.model)

    def _scoped(self, member: LocalRegularizer, owner: str, inner: GradFn) -> GradFn:
        """`around` of one member: its function sees its own state, the one that it wraps sees all states."""

        def outer(params: Tree, ctx: Ctx) -> Tree:
            scoped = member.around(
                lambda at, seen: inner(at, seen._replace(state=ctx.state, sent=ctx.sent, correction=ctx.correction))
            )
            own = _own(ctx, owner)
            if lender := member.borrows:
                own = own._replace(correction=self._correction(lender, ctx))
            return scoped(params, own)

        return outer

    def _correction(self, owner: str, ctx: Ctx) -> Callable[[Tree], Tree]:
        """The gradient by params of one member's penalty, plus what it would add to a gradient."""
        member, own = self.members[owner], _own(ctx, owner)

        def penalty(params: Tree) -> Tensor:
            with ctx.model.watched_features() as seen:
                logits = ctx.forward(params, ctx.batch)
            return torch.as_tensor(member.penalty(params, logits, own._replace(features=seen[-1] if seen else None)))

        return lambda params: member.adjust(torch.func.grad(penalty)(params), params, own)


def own_state(state: Tree, owner: str) -> Tree:
    """The leaves of one owner, under its own names."""
    return {name.partition("/")[2]: leaf for name, leaf in state.items() if name.startswith(f"{owner}/")}


def _place(owner: str) -> str:
    return f"local/{owner}"


def _own(ctx: Ctx, owner: str) -> Ctx:
    return ctx._replace(state=own_state(ctx.state, owner), sent=ctx.shared.get(_place(owner), {}))
