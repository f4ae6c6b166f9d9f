"""FedAvg (McMahan et al., 2017, Algorithm 1), and the seam of every other method: what the base class does is FedAvg.

A strategy is a local rule (the hooks of `LocalRegularizer`) with a server half. To write one, subclass `Strategy` as a
frozen dataclass, and override what the method changes.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, ClassVar

from torch import Tensor

from cfl.contract.context import Ctx
from cfl.contract.data import Client
from cfl.contract.losses import cross_entropy, masked_mean
from cfl.contract.regularizer import LocalRegularizer
from cfl.contract.rounds import Phase, RoundInfo, Server, TreesByOwner
from cfl.core import tree
from cfl.core.tree import Tree
from cfl.models.handle import Model


def with_consolidation(task: int, tasks: int, rounds: int) -> list[Phase]:
    """Training; then, but for the last task, a round in which all clients that hold data store what they need."""
    train = Phase("train", rounds)
    store = Phase("consolidate", cohort="available", train=False, work=True, stores=True)
    return [train] if task == tasks - 1 else [train, store]


@dataclass(frozen=True)
class Strategy(LocalRegularizer):
    """Federated averaging without a continual mechanism: the lower bound (McMahan et al., 2017)."""

    source: ClassVar[str] = "McMahan et al., AISTATS 2017, Algorithm 1"
    sends: ClassVar[str] = "its update w_global - w_local, every round"
    per_sample: ClassVar[bool] = True
    sequential: ClassVar[bool] = True
    """False where tasks are not learned one after another by one model: forgetting is then not defined."""

    def plan(self, task: int, tasks: int, rounds: int) -> list[Phase]:
        """The phases of a task, in order; rounds: the configured number of training rounds of this task."""
        return [Phase("train", rounds)]

    def init_server(self, params: Tree, model: Model) -> Server:
        """Trees that the server keeps beside "params"."""
        return {}

    def begin_task(self, server: Server, task: int, model: Model) -> Server:
        """The server's trees as a task after the first begins, whatever became of the rounds before."""
        return server

    def sees(self, task: int, tasks: int) -> tuple[int, ...]:
        """Tasks whose data the clients train on in this task."""
        return (task,)

    def heads(self, task: int, tasks: int) -> tuple[int, ...]:
        """Tasks whose heads travel in this task."""
        return (task,)

    def frozen(self, task: int, model: Model) -> frozenset[str]:
        """Parameters that no client trains in this task: the heads of the other tasks."""
        heads = frozenset(name for other in range(model.tasks) for name in model.head(other))
        return heads - frozenset(model.head(task))

    def broadcast(self, server: Server, info: RoundInfo) -> TreesByOwner:
        """All that goes down: the parts of `ctx.shared`."""
        return {"params": tree.select(server["params"], info.names)}

    def loss(self, logits: Tensor, ctx: Ctx) -> Tensor:
        """The batch's loss (): the mean cross-entropy. logits: (batch, classes), each sample through its own head."""
        return masked_mean(cross_entropy(logits, ctx.batch), ctx.batch.mask)

    def finish(self, params: Tree, ctx: Ctx, steps: int) -> tuple[Tree, Tree]:
        """Upload w_global - w_local, a step in the sign of a gradient; state as it was."""
        return {name: ctx.shared["params"][name] - leaf for name, leaf in params.items()}, ctx.state

    def work(
        self, params: Tree, client: Client, shared: TreesByOwner, state: Tree, info: RoundInfo
    ) -> tuple[Tree, Tree]:
        """A client's part in a phase with `work`: what goes up (summed over clients, unweighted), and its new state."""
        return {}, state

    def absorb(self, server: Server, mean: TreesByOwner, info: RoundInfo, lr: float) -> Server:
        """The server's step, from the weighted mean of the uploads.

        mean["strategy"]: the mean of what `finish` sent; mean["work"]: the sum of what `work` sent; lr: server.lr.
        Buffers (running statistics) are averages already: they take the whole step whatever lr.
        """
        if "strategy" not in mean:
            return server
        buffers = info.model.buffers(info.task)
        new = {
            name: server["params"][name] - (step if lr == 1.0 or name in buffers else lr * step)
            for name, step in mean["strategy"].items()
        }
        return {**server, "params": {**server["params"], **new}}

    def serve(self, server: Server, task: int) -> Tree:
        """The model that answers for a task, and is evaluated on it."""
        return server["params"]

    def notes(self, model: Model) -> list[str]:
        """Lines for the start of a run: what the method covers of this model, and what it does not."""
        return []

    def report(self, server: Server, model: Model) -> dict[str, Any]:
        """Figures of the method's own for metrics.json; "subspace_use" maps layers to fractions."""
        return {}
