"""The hooks of a local regularizer; a strategy has them too, and adds its own.

Most methods need only some of these five hooks:

    penalty                 a term of the local loss
    adjust                  the gradient before the optimiser's step
    finish                  the client's upload and new state after local training
    plan, work              a strategy's further phases, and a client's part in them
    server_step or absorb   the server's step from the aggregated uploads: a regularizer's, a strategy's

The hooks of `LocalRegularizer` stand in the order in which a round calls them:

    server, before training    init_shared, provide
    client, before training    init_client
    client, each local step    augment, around, penalty (in each evaluation of the gradient), adjust
    client, after training     finish of every member, then send of every regularizer
    server, after training     cap, aggregate, server_step; the strategy's absorb comes last

The strategy's hooks run first, then the regularizers' in the user's order. Exceptions: `around` of the last member is
the outermost, hooks of a `hard_constraint` adjust last, and `server_step` goes by `turn`. As the strategy's `absorb`
gets the final step, a guarantee that the strategy gives for its step holds with every regularizer.

Hooks are pure. They take tensors and return new tensors, and never write to an argument. They draw random numbers only
from generators made from ctx.key or info.key. They do not branch on the values of tensors.

The trees of a regularizer, on clients and server, last for one task: the next task starts with initial ones.
"""

from collections.abc import Callable, Mapping
from dataclasses import dataclass, fields
from typing import Any, ClassVar, Literal

from torch import Tensor

from cfl.contract.context import Ctx
from cfl.contract.rounds import RoundInfo
from cfl.contract.samples import Batch
from cfl.core import Tree, tree
from cfl.models import Model

GradFn = Callable[[Tree, Ctx], Tree]
"""Gradient by `params` of the mean loss plus all penalties: (params, ctx) to a tree of the same names and shapes."""

Gathers = Literal["mean", "sum", "stack"]


@dataclass(frozen=True)
class LocalRegularizer:
    """An addition to federated training that composes with most strategies. This base class changes nothing."""

    source: ClassVar[str] = ""
    """Paper and equation, as `cfl-run list` shows it. Not inherited: each class names its own."""
    sends: ClassVar[str] = ""
    """A client's uploads for it, and when it sends them; empty if it adds nothing to the strategy's uploads. A class
    with a `finish` or `work` of its own has its own."""
    per_sample: ClassVar[bool] = False
    """True if samples affect uploads and client states only through gradients of the losses of single samples (in
    `work`: only as `Privacy` says). dp.level=example requires it. Not inherited: each class sets it for itself."""
    hard_constraint: ClassVar[bool] = False
    """True if its `adjust` runs after that of all other members."""
    gathers: ClassVar[Gathers] = "mean"
    """Aggregation of its `finish` uploads for `server_step`: weighted mean, plain sum, or stack (clients, ...). A stack
    shows the server each client's upload, which secure aggregation excludes."""
    needs_public: ClassVar[bool] = False
    """True if it reads public data, from `ctx.public` and `info.public`; a run without public data is then refused."""
    lends: ClassVar[bool] = False
    """True if another regularizer may borrow the gradient of its `penalty` and `adjust`."""
    turn: ClassVar[int] = 0
    """Turn of its `server_step`: 0 for rules that combine updates, 1 for rules that start from their result, such as
    distillation, 2 for momentum of the whole step. Within a turn the user's order holds."""
    decides: ClassVar[str] = ""
    """A decision that only one regularizer of a run may take, such as "the length of the server's step"; or empty."""

    def __init_subclass__(cls, **options: Any) -> None:
        super().__init_subclass__(**options)
        if "__repr__" not in vars(cls):  # `dataclass` would write one with all hyper-parameters
            bases = (vars(base) for base in cls.__mro__[1:] if issubclass(base, LocalRegularizer))
            cls.__repr__ = next(own["__repr__"] for own in bases if "__repr__" in own)  # type: ignore[method-assign]

    def __repr__(self) -> str:
        texts = {item.name: repr(getattr(self, item.name)) for item in fields(self) if item.repr}
        defaults = {item.name: repr(item.default) for item in fields(self)}
        changed = (f"{name}={text}" for name, text in texts.items() if text != defaults[name])
        return f"{type(self).__name__}({', '.join(changed)})"

    def refuses(self, run: Mapping[str, Any]) -> str | None:
        """Return why the method cannot run with these options, or None.

        Called when a run is configured. run: the options, nested as in config.yaml.
        """
        return None

    @property
    def borrows(self) -> str | None:
        """Name of a regularizer whose terms this one takes over, or None.

        The lender's `penalty`, `around` and `adjust` then stay out of the update. `ctx.correction` is the gradient of
        its penalty, after its `adjust`.
        """
        return None

    @property
    def sees_each(self) -> bool:
        """True if the server hands each client's upload to `aggregate` and `cap`, which secure aggregation excludes.

        By default: whether the class overrides one of them.
        """
        return any(getattr(type(self), hook) is not getattr(LocalRegularizer, hook) for hook in ("aggregate", "cap"))

    @property
    def steps_see_state(self) -> bool:
        """True if the hooks of a local step read `ctx.state`.

        If False, `ctx.state` is empty there, and clients whose states differ in shape can train in one block.
        """
        return True

    def init_shared(self, params: Tree, model: Model) -> Tree:
        """Return the server's initial tree of this regularizer.

        Called by the server in a round of training as long as `server_step` has returned no tree in this task.
        params: the parameters and buffers of the broadcast.
        """
        return {}

    def provide(self, own: Tree, info: RoundInfo) -> Tree:
        """Return the tree that all clients receive as `ctx.sent`.

        Called by the server before each round of training. own: the server's tree of this regularizer.
        """
        return {}

    def init_client(self, params: Tree, model: Model) -> Tree:
        """Return a client's initial state.

        Called before a client's round if it has no state yet: of the task for a regularizer, of the run for a strategy.
        params: the parameters and buffers of the broadcast.
        """
        return {}

    def augment(self, batch: Batch, ctx: Ctx) -> Batch:
        """Return the batch to train on, for example with replayed samples added.

        Called at the start of each local step. batch: the client's minibatch, after the `augment` of earlier members.
        """
        return batch

    def around(self, grad_fn: GradFn) -> GradFn:
        """Return a gradient function that may evaluate `grad_fn` at other parameters, or more than once.

        Called in each local step. grad_fn: (params, ctx) to the gradient of the mean loss plus all penalties.
        """
        return grad_fn

    def penalty(self, params: Tree, logits: Tensor, ctx: Ctx) -> Tensor | float:
        """Return a term () to add to the mean loss.

        Called in each evaluation of the gradient. params: the trainable leaves; logits: (batch, classes).
        """
        return 0.0

    def adjust(self, grads: Tree, params: Tree, ctx: Ctx) -> Tree:
        """Return the gradient for the optimiser.

        Called at the end of each local step. grads: the gradient, after the `adjust` of earlier members; params: the
        trainable leaves before the step. Both have the same names and shapes.
        """
        return grads

    def finish(self, params: Tree, ctx: Ctx, steps: int) -> tuple[Tree, Tree]:
        """Return a client's upload and its new state.

        Called once after the last local step, with empty `ctx.batch` and `ctx.memory`.
        params: the trained leaves and the buffers; steps: number of local steps made.
        """
        return {}, ctx.state

    def send(self, update: Tree, ctx: Ctx, steps: int) -> Tree:
        """Return the strategy's upload in the form in which it leaves the client.

        Called for regularizers only, after every `finish`, if the strategy uploads anything.
        update: the strategy's upload, w_global - w_local by default; ctx.state: the state before `finish`.
        """
        return update

    def cap(self, uploads: Tree, sizes: Tree, info: RoundInfo) -> Tree:
        """Return the `work` uploads that count, each capped by what the server sees of all.

        Called by the server before the strategy gets their sum, if the class overrides this hook and `sees_each` is
        True. uploads: leaves (clients, ...), the clients in the order of `info.clients`; sizes: by the same names the
        size (clients,) float64 of each client's leaf, see `Strategy.sizes`.
        """
        return uploads

    def aggregate(self, updates: Tree, weights: Tensor, info: RoundInfo) -> Tree:
        """Return one update in place of the weighted mean of the strategy's uploads.

        Called by the server before every `server_step`, if `sees_each` is True. Counters of normalisation layers, the
        integer leaves, are not among them: those of the lowest id stay, as in the mean.
        updates: floating-point leaves (clients, ...), the clients in the order of `info.clients`; weights: (clients,)
        float64, as each client states them.
        """
        return tree.weighted_mean(updates, weights.tolist())

    def server_step(self, step: Tree, own: Tree, gathered: Tree, params: Tree, info: RoundInfo) -> tuple[Tree, Tree]:
        """Return the server's step w_global - w_new, and the server's new tree of this regularizer.

        Called by the server after the uploads of a round of training are aggregated. step: the step so far, at first
        the mean of the strategy's uploads; own: the server's tree of this regularizer; gathered: the aggregated uploads
        of its `finish`, see `gathers`; params: the global model of the broadcast; info.clients: the ids of the clients
        whose uploads are included.
        """
        return step, own
