"""The hooks of a strategy. The base class is FedAvg (McMahan et al., 2017, Algorithm 1).

To write a strategy, subclass `Strategy` as a frozen dataclass and override the hooks that the method changes;
`cfl.contract.regularizer` names the five that most methods need.

The hooks of `Strategy` stand in the order in which a run calls them:

    at the start of the run    plan, sees, init_server, notes
    server, before a round     heads, frozen, paused, broadcast
    client, in a round         loss, finish, work
    server, after a round      sizes, absorb
    a hostile client           poisoned
    in an evaluation           serve, infer_task
    at the end of a task       report, images, begin_task of the next task

A strategy also has the client hooks of `LocalRegularizer`. Its state on a client lasts until the end of the run.
"""

from dataclasses import dataclass
from typing import Any, ClassVar

from torch import Tensor

from cfl.contract.client import Client
from cfl.contract.context import Ctx
from cfl.contract.losses import cross_entropy, masked_mean
from cfl.contract.regularizer import Gathers, LocalRegularizer
from cfl.contract.rounds import Phase, RoundInfo, Server, TreesByOwner
from cfl.core import ConfigError, Tree, tree
from cfl.models import Model


def with_consolidation(task: int, tasks: int, rounds: int) -> list[Phase]:
    """A phase of training, and after it, except in the last task, a round in which all clients with data run `work`."""
    train = Phase("train", rounds)
    store = Phase("consolidate", cohort="available", train=False, work=True, stores=True)
    return [train] if task == tasks - 1 else [train, store]


@dataclass(frozen=True)
class Strategy(LocalRegularizer):
    """Federated averaging without a continual mechanism: the lower bound (McMahan et al., 2017)."""

    sends: ClassVar[str] = "its update w_global - w_local, every round"
    gathers: ClassVar[Gathers] = "sum"
    """Aggregation of its `work` uploads: plain sum, or stack (clients, ...), see `LocalRegularizer.gathers`."""
    kept: ClassVar[tuple[str, ...]] = ()
    """Trees of the broadcast that a client gets once a task, and stores until the next task. They do not change within
    a task, and all rounds of a task with clients broadcast them, or none. A client that dropped out gets them again."""
    per_sample: ClassVar[bool] = True
    averaged: ClassVar[bool] = True
    """False if layers move by the `work` uploads, which `send`, `aggregate` and `server_step` of regularizers miss."""
    sequential: ClassVar[bool] = True
    """False if one model does not learn the tasks one after another; forgetting is then undefined."""
    task_incremental: ClassVar[str] = "a head per task, which trains in that task alone"
    """What the method does with scenario=task."""
    class_incremental: ClassVar[str] = "the head has the classes of all tasks so far, and all of it trains"
    """What the method does with scenario=class."""
    not_class_incremental: ClassVar[str] = ""
    """Reason why the method cannot run with scenario=class, if so."""
    not_for_texts: ClassVar[str] = ""
    """Reason why the method cannot run on texts, if so."""

    @property
    def not_extendable(self) -> str:
        """Reason why a finished run cannot go on with later tasks: what depends on the number of tasks, if any."""
        return ""

    def plan(self, task: int, tasks: int, rounds: int) -> list[Phase]:
        """Return the phases of a task, in order.

        Called for each task at the start of a run. rounds: the configured number of training rounds of this task.
        """
        return [Phase("train", rounds)]

    def sees(self, task: int, tasks: int) -> tuple[int, ...]:
        """Return the tasks whose data the clients train on in this task.

        Called at the start of a run and in every round.
        """
        return (task,)

    def init_server(self, params: Tree, model: Model) -> Server:
        """Return the trees that the server keeps beside "params".

        Called once, at the start of a run. params: all parameters and buffers, with every head.
        """
        return {}

    def notes(self, model: Model) -> list[str]:
        """Return lines on what the method covers of this model and what it leaves out, shown at the start of a run.

        It may warn of a model with which the method has no effect, since scripts do not show the lines.
        """
        return []

    def heads(self, task: int, tasks: int) -> tuple[int, ...]:
        """Return the tasks whose heads are broadcast in this task. Called before every round."""
        return (task,)

    def frozen(self, task: int, model: Model) -> frozenset[str]:
        """Return the names of the parameters that no client trains in this task. Called before every round.

        By default these are the heads of the other tasks.
        """
        heads = frozenset(name for other in range(model.tasks) for name in model.head(other))
        return heads - frozenset(model.head(task))

    def paused(self, info: RoundInfo) -> frozenset[str]:
        """Return the names of the parameters that no client trains in this round, beside those of `frozen`.

        Called before every round. They are broadcast, since other rounds change them. info.frozen: without them.
        """
        return frozenset()

    def broadcast(self, server: Server, info: RoundInfo) -> TreesByOwner:
        """Return the trees that all clients receive as `ctx.shared`, "params" among them.

        Called by the server before every round. server: its trees, "params" and those of `init_server`.
        """
        return {"params": tree.select(server["params"], info.names)}

    def loss(self, logits: Tensor, ctx: Ctx) -> Tensor:
        """Return the loss () of a minibatch, by default the mean cross-entropy.

        Called in each evaluation of the gradient. logits: (batch, classes), each sample through its own head.
        """
        return masked_mean(cross_entropy(logits, ctx.batch), ctx.batch.mask)

    def finish(self, params: Tree, ctx: Ctx, steps: int) -> tuple[Tree, Tree]:
        """Return the upload w_global - w_local, which has the sign of a gradient, and the unchanged state."""
        return {name: ctx.shared["params"][name] - leaf for name, leaf in params.items()}, ctx.state

    def work(
        self, params: Tree, client: Client, shared: TreesByOwner, state: Tree, info: RoundInfo
    ) -> tuple[Tree, Tree]:
        """Return a client's upload, which is aggregated as `gathers` says, and its new state.

        Called for each client in a phase with `work`, after local training if the phase trains. The model is in
        evaluation mode. params: the broadcast, with the client's trained leaves in it; shared: the whole broadcast;
        state: the strategy's state on the client.
        """
        return {}, state

    def poisoned(self, upload: Tree, key: int) -> Tree:
        """Return what a hostile client sends in place of its `work` upload, at the upload's own size.

        Called in rounds with attack.name=sketch, which multiplies by attack.strength all leaves of the result but those
        that are the upload's own.
        key: integer for the draws of this client.
        """
        return upload

    def sizes(self, uploads: Tree, info: RoundInfo) -> Tree:
        """Return the size (clients,) float64 of each leaf of the `work` uploads, proportional to the leaf.

        Called by the server for a `cap` of a regularizer. uploads: leaves (clients, ...). By default the L2 norm.
        """
        return {name: leaf.double().reshape(len(leaf), -1).norm(dim=1) for name, leaf in uploads.items()}

    def absorb(self, server: Server, mean: TreesByOwner, info: RoundInfo, lr: float) -> Server:
        """Return the server's trees after a round.

        Called by the server once the uploads are aggregated, after every `server_step`; not for an aborted round.
        mean["strategy"]: the weighted mean of the `finish` uploads, as `server_step` left it, in a round in which
        clients trained and the strategy uploaded; mean["work"]: the `work` uploads as `gathers` says, in a phase with
        `work`; both are absent in a phase without clients;
        lr: server.lr.

        The default subtracts lr times mean["strategy"] from the parameters. Buffers (running statistics) are averages
        already, and take the whole step for every lr.
        """
        if "strategy" not in mean:
            return server
        if other := mean["strategy"].keys() - server["params"].keys():
            raise ConfigError(
                f"`finish` uploads '{min(other)}', which is no parameter of the model: override `absorb`, and take it "
                "out of mean['strategy']"
            )
        buffers = info.model.buffers(info.task)
        new = {
            name: server["params"][name] - (step if lr == 1.0 or name in buffers else lr * step)
            for name, step in mean["strategy"].items()
        }
        return {**server, "params": {**server["params"], **new}}

    def serve(self, server: Server, task: int) -> Tree:
        """Return the parameters that are evaluated on a task; with `eval_later`, on one to come, too."""
        return server["params"]

    def infer_task(self, server: Server, x: Tensor, task: int, model: Model) -> Tensor | None:
        """Return the task of each test sample, (n,) int64 from 0 to `task`, or None if the method infers no task.

        Called for each batch of an evaluation, unless the scenario gives the task. x: (n, *input_shape); task: the last
        task learned. A sample is then predicted by `serve` of its inferred task, among the classes of that task.
        """
        return None

    def report(self, server: Server, model: Model) -> dict[str, Any]:
        """Return the method's own figures for metrics.json; "subspace_use" maps layers to fractions.

        Called at the end of each task.
        """
        return {}

    def images(self, server: Server, model: Model) -> Tensor | None:
        """Return images that the method has made, to look at: (rows, columns, channels, height, width) uint8, or None.

        Called at the end of each task. A row holds the images of a class, in the order of the head's classes, in grey
        (1 channel) or RGB (3 channels). The run's folder gets them as one picture, which reports show.
        """
        return None

    def begin_task(self, server: Server, task: int, model: Model) -> Server:
        """Return the server's trees at the start of a task.

        Called for every task but the first, even if rounds of the task before were aborted.
        """
        return server
