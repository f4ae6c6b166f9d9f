"""What composes with any strategy: pure hooks of local training, and a server half where a method has one.

The one local step calls `augment`; then it takes the gradient of the mean loss plus all `penalty` terms, as changed by
`around`; then `adjust`; then comes the optimiser. `finish` and `send` run once, after the last step. The strategy's
hooks run first, then the regularizers' in the order in which the user lists them; `around` of the last is outermost;
hooks of a `hard_constraint` adjust last. On the server `provide` comes before a round, and after it `server_step` of
each in order (but see `turn`); the strategy's `absorb` is last, so what it guarantees of a step always holds.

Hooks are pure: they take tensors and return tensors, write to nothing that they are given, draw random numbers only
from generators made from ctx.key or info.key, and do not branch on the values of tensors.

A regularizer's trees, on the clients and on the server, are of one task: the next task begins with new ones.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any, ClassVar, Literal

from torch import Tensor

from cfl.contract.context import Ctx
from cfl.contract.data import Batch
from cfl.contract.rounds import RoundInfo
from cfl.core.tree import Tree
from cfl.models.handle import Model

GradFn = Callable[[Tree, Ctx], Tree]
Gathers = Literal["mean", "sum", "stack"]


@dataclass(frozen=True)
class LocalRegularizer:
    """An addition to federated training that composes with any strategy; as it stands, it changes nothing."""

    source: ClassVar[str] = ""
    sends: ClassVar[str] = ""
    """What a client sends for it, and when; empty where it adds nothing to the strategy's uploads."""
    per_sample: ClassVar[bool] = False
    """Whether samples enter its uploads and the clients' states through gradients of single samples' losses alone
    (and, in `work`, as `Privacy` says), as dp.level=example needs. Each class says it for itself; it is not inherited.
    """
    hard_constraint: ClassVar[bool] = False
    gathers: ClassVar[Gathers] = "mean"
    """How the uploads of `finish` reach `server_step`: as their weighted mean, as their plain sum, or stacked
    (clients, ...), which shows the server what each client sent and excludes secure aggregation."""
    needs_public: ClassVar[bool] = False
    """Whether it reads public data: `ctx.public` and `info.public` are then there."""
    lends: ClassVar[bool] = False
    """Whether `penalty` and `adjust` are terms whose gradient another one can borrow."""
    turn: ClassVar[int] = 0
    """When its `server_step` comes: 0 for rules that combine updates, in the user's order; then 1, what goes on from
    there, such as distillation; then 2, a momentum of the whole step."""
    decides: ClassVar[str] = ""
    """What only one regularizer of a run can decide, such as "the length of the server's step"; empty for nothing."""

    def refuses(self, run: Mapping[str, Any]) -> str | None:
        """Why it cannot run under a configuration, or None. run: the options as in config.yaml."""
        return None

    @property
    def borrows(self) -> str | None:
        """Name of the regularizer whose terms stay out of the update and become this one's `ctx.correction`."""
        return None

    @property
    def steps_see_state(self) -> bool:
        """Whether hooks of a step get `ctx.state`; if not, clients with states of any shapes train in one block."""
        return True

    def init_client(self, params: Tree, model: Model) -> Tree:
        """The state of a client that has not yet taken part; it then belongs to the client's id."""
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

    def send(self, update: Tree, ctx: Ctx, steps: int) -> Tree:
        """The strategy's upload as it leaves the client."""
        return update

    def init_shared(self, params: Tree, model: Model) -> Tree:
        """The server's own tree of this regularizer at the start of a task; params: what travels."""
        return {}

    def provide(self, own: Tree, info: RoundInfo) -> Tree:
        """What goes down to all clients as `ctx.sent`. own: the server's tree of this regularizer."""
        return {}

    def server_step(self, step: Tree, own: Tree, gathered: Tree, params: Tree, info: RoundInfo) -> tuple[Tree, Tree]:
        """The server's step, w_global - w_new, and the new tree of its own.

        step: the step so far, first the mean of the strategy's uploads; gathered: the uploads of `finish`, see
        `gathers`; params: the global model that went down; info.clients: those whose uploads are in the sums.
        """
        return step, own
