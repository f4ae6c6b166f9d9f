"""The hooks of a run's strategy and regularizers as one, each with its own state and its own part of the broadcast."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, cast

from torch import Tensor

from cfl.local.base import GradFn, LocalRegularizer
from cfl.models.handle import Model
from cfl.tree import Tree
from cfl.types import Batch, Ctx, Parts

if TYPE_CHECKING:
    from cfl.strategies.base import Strategy

STRATEGY = "strategy"


@dataclass(frozen=True)
class Chain:
    """members: owner ("strategy", then the regularizers' names in the user's order) to hooks.

    The Ctx that a chain gets has the states of all owners flattened as "owner/name"; each member sees its own alone.
    """

    members: Mapping[str, LocalRegularizer]

    def init_client(self, params: Tree, model: Model) -> Tree:
        return {
            f"{owner}/{name}": leaf
            for owner, member in self.members.items()
            for name, leaf in member.init_client(params, model).items()
        }

    def augment(self, batch: Batch, ctx: Ctx) -> Batch:
        for owner, member in self.members.items():
            batch = member.augment(batch, _own(ctx, owner)._replace(batch=batch))
        return batch

    def loss(self, logits: Tensor, ctx: Ctx) -> Tensor:
        return cast("Strategy", self.members[STRATEGY]).loss(logits, _own(ctx, STRATEGY))

    def penalty(self, params: Tree, logits: Tensor, ctx: Ctx) -> Tensor | float:
        return sum(member.penalty(params, logits, _own(ctx, owner)) for owner, member in self.members.items())

    def around(self, grad_fn: GradFn) -> GradFn:
        for owner, member in self.members.items():
            grad_fn = _scoped(member, owner, grad_fn)
        return grad_fn

    def adjust(self, grads: Tree, params: Tree, ctx: Ctx) -> Tree:
        for owner, member in sorted(self.members.items(), key=lambda item: item[1].hard_constraint):
            grads = member.adjust(grads, params, _own(ctx, owner))
        return grads

    def finish(self, params: Tree, ctx: Ctx, steps: int) -> tuple[Parts, Tree]:
        uploads: Parts = {}
        states: Tree = {}
        for owner, member in self.members.items():
            upload, state = member.finish(params, _own(ctx, owner), steps)
            states |= {f"{owner}/{name}": leaf for name, leaf in state.items()}
            if upload:
                uploads[owner] = upload
        return uploads, states


def own_state(state: Tree, owner: str) -> Tree:
    """The leaves of one owner, under its own names."""
    return {name.partition("/")[2]: leaf for name, leaf in state.items() if name.startswith(f"{owner}/")}


def _own(ctx: Ctx, owner: str) -> Ctx:
    return ctx._replace(state=own_state(ctx.state, owner)) if ctx.state else ctx


def _scoped(member: LocalRegularizer, owner: str, inner: GradFn) -> GradFn:
    """`around` of one member: its function sees its own state, the one that it wraps sees all states."""

    def outer(params: Tree, ctx: Ctx) -> Tree:
        scoped = member.around(lambda at, seen: inner(at, seen._replace(state=ctx.state)))
        return scoped(params, _own(ctx, owner))

    return outer
