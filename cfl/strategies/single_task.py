"""Single task: a model of its own for each task, learned by FedAvg from the same initial weights (FOT, Table 11).

Nothing is shared between tasks, so nothing is forgotten, and nothing transferred: forgetting is not defined. The model
stays in the server's state when its task is done; the server stores as many models as there are tasks.
"""

from dataclasses import dataclass
from typing import ClassVar

from cfl import plugins
from cfl.models.handle import Model
from cfl.strategies.base import Strategy
from cfl.tree import Tree
from cfl.types import Parts, RoundInfo, Server


@plugins.strategies.register("single_task")
@dataclass(frozen=True)
class SingleTask(Strategy):
    """A separate model for each task, trained by FedAvg in the task's own rounds."""

    source: ClassVar[str] = "FOT, Table 11"
    per_sample: ClassVar[bool] = True
    sequential: ClassVar[bool] = False

    def init_server(self, params: Tree, model: Model) -> Server:
        return {"initial": dict(params), "models": {}}

    def begin_task(self, server: Server, task: int, model: Model) -> Server:
        return {**server, "params": dict(server["initial"])}

    def absorb(self, server: Server, mean: Parts, info: RoundInfo, lr: float) -> Server:
        new = super().absorb(server, mean, info, lr)
        own = {f"{info.task}/{name}": new["params"][name] for name in info.names}
        return {**new, "models": {**server["models"], **own}}

    def serve(self, server: Server, task: int) -> Tree:
        own = {name.partition("/")[2]: leaf for name, leaf in server["models"].items() if name.startswith(f"{task}/")}
        return {**server["params" if own else "initial"], **own}  # where all rounds were aborted there is none
