"""Joint training: every client has its data of all tasks from the first round on (no paper; the upper bound).

    loss = mean over the tasks in the batch of the CE of their samples, each through its own head.
There are as many rounds as in the whole stream, so a client sees each sample once in *every* round. Tasks are not
learned one after another: forgetting is not defined. Batches mix tasks, so running statistics must be shared.
"""

from dataclasses import dataclass
from typing import ClassVar

import torch
from torch import Tensor

from cfl.contract.context import Ctx
from cfl.contract.losses import cross_entropy
from cfl.contract.rounds import Server
from cfl.contract.strategy import Strategy
from cfl.core import plugins
from cfl.core.errors import ConfigError
from cfl.core.options import option
from cfl.core.tree import Tree
from cfl.models.handle import Model


@plugins.strategies.register("joint")
@dataclass(frozen=True)
class Joint(Strategy):
    """All tasks at once, by FedAvg: the upper bound."""

    source: ClassVar[str] = "McMahan et al., AISTATS 2017, Algorithm 1, on the union of the tasks"
    sequential: ClassVar[bool] = False

    mean: str = option(
        "tasks", "loss: mean over the tasks in a batch, or over its samples", choices=("tasks", "samples")
    )

    def init_server(self, params: Tree, model: Model) -> Server:
        if model.buffers_per_task:
            raise ConfigError("batches of 'joint' mix tasks: set model.norm_stats=running or model.norm_stats=batch")
        return {}

    def sees(self, task: int, tasks: int) -> tuple[int, ...]:
        return tuple(range(tasks))

    def heads(self, task: int, tasks: int) -> tuple[int, ...]:
        return tuple(range(tasks))

    def frozen(self, task: int, model: Model) -> frozenset[str]:
        return frozenset()

    def loss(self, logits: Tensor, ctx: Ctx) -> Tensor:
        batch = ctx.batch
        if batch.task is None or self.mean == "samples":
            return super().loss(logits, ctx)
        tasks = torch.arange(ctx.model.tasks, device=batch.y.device)
        members = (batch.task[:, None] == tasks) * batch.mask[:, None]  # (batch, tasks)
        counts = members.sum(dim=0)
        losses = cross_entropy(logits, batch)
        means = (losses @ members.to(losses)) / counts.clamp(min=1)
        return means.sum() / (counts > 0).sum().clamp(min=1)
