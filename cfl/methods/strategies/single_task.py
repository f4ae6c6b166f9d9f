"""Single task: a separate model for each task, trained by FedAvg from the same initial weights (FOT, Table 11).

Tasks share nothing, so knowledge is neither forgotten nor transferred, and forgetting is not defined. The server
keeps the models of all finished tasks in its state.
"""

from dataclasses import dataclass
from typing import ClassVar

from cfl.contract import RoundInfo, Server, Strategy, TreesByOwner
from cfl.core import Tree, plugins
from cfl.models import Model


@plugins.strategies.register("single_task")
@dataclass(frozen=True)
class SingleTask(Strategy):
    """A separate model for each task, trained by FedAvg in the task's own rounds."""

    source: ClassVar[str] = "FOT, Table 11"
    per_sample: ClassVar[bool] = True
    sequential: ClassVar[bool] = False
    not_class_incremental: ClassVar[str] = "it has a model for each task, so it needs the task of a test sample"

    def init_server(self, params: Tree, model: Model) -> Server:
        return {"initial": dict(params), "models": {}}

    def begin_task(self, server: Server, task: int, model: Model) -> Server:
        return {**server, "params": dict(server["initial"])}

    def absorb(self, server: Server, mean: TreesByOwner, info: RoundInfo, lr: float) -> Server:
        new = super().absorb(server, mean, info, lr)
        own = {f"{info.task}/{name}": new["params"][name] for name in info.names}
        return {**new, "models": {**server["models"], **own}}

    def serve(self, server: Server, task: int) -> Tree:
        own = {name.partition("/")[2]: leaf for name, leaf in server["models"].items() if name.startswith(f"{task}/")}
        return {**server["params" if own else "initial"], **own}  # all rounds were aborted: no own model
