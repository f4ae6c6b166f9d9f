"""The client half of a method: pure hooks that the one local step calls in a fixed order.

The order is: `augment`, then the gradient of the mean loss plus all `penalty` terms, as changed by `around`; `adjust`;
the optimiser's step. `finish` runs once, after the last step. The strategy's hooks run first, then the regularizers' in
the order in which the user lists them; `around` of the last is outermost; hooks of a `hard_constraint` adjust last.

Hooks are pure: they take tensors and return tensors, write to nothing that they are given, draw random numbers only
from generators made from ctx.key, and do not branch on the values of tensors.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import ClassVar

from torch import Tensor

from cfl.models.handle import Model
from cfl.tree import Tree
from cfl.types import Batch, Ctx

GradFn = Callable[[Tree, Ctx], Tree]


@dataclass(frozen=True)
class LocalRegularizer:
    """An addition to local training that composes with any strategy; as it stands, it changes nothing."""

    source: ClassVar[str] = ""
    hard_constraint: ClassVar[bool] = False

    def init_client(self, params: Tree, model: Model) -> Tree:
        """The state of a client that has never taken part; it then belongs to the client's id."""
        return {}

    def augment(self, batch: Batch, ctx: Ctx) -> Batch:
        """The batch to train on; replayed samples join here."""
        return batch

    def penalty(self, params: Tree, logits: Tensor, ctx: Ctx) -> Tensor | float:
        """A term to add to the mean loss. params: the trainable leaves; logits: (batch, classes)."""
        return 0.0

    def around(self, grad_fn: GradFn) -> GradFn:
        """A gradient function made from the given one: it may be evaluated elsewhere, or twice."""
        return grad_fn

    def adjust(self, grads: Tree, params: Tree, ctx: Ctx) -> Tree:
        """The gradient that the optimiser gets."""
        return grads

    def finish(self, params: Tree, ctx: Ctx, steps: int) -> tuple[Tree, Tree]:
        """What goes up, and the client's new state. params: trained leaves and buffers; steps: steps made."""
        return {}, ctx.state
