"""Joint training: every client has its data of all tasks from the first round on (upper bound, without a paper).

    loss = mean over the tasks in the batch of their samples' mean CE, each sample through the head of its task.
The number of rounds is that of the whole stream, and a client sees each sample once in *every* round. Forgetting is not
defined, since tasks are not learned in sequence. Batches mix tasks, so all tasks share their running statistics.
"""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, ClassVar

import torch
from torch import Tensor

from cfl.contract import Ctx, Server, Strategy
from cfl.contract.losses import cross_entropy
from cfl.core import ConfigError, Tree, option, plugins
from cfl.models import Model


@plugins.strategies.register("joint")
@dataclass(frozen=True)
class Joint(Strategy):
    """FedAvg on all tasks at once: the upper bound."""

    source: ClassVar[str] = "McMahan et al., AISTATS 2017, Algorithm 1, on the union of the tasks"
    sequential: ClassVar[bool] = False
    not_extendable: ClassVar[str] = "it trains on the data of all tasks from the first round on"
    task_incremental: ClassVar[str] = "a head per task, and all heads train from the first round on"
    class_incremental: ClassVar[str] = "the head has the classes of all tasks from the first round on"

    mean: str = option("tasks", "loss: mean over a batch's tasks, or over its samples", choices=("tasks", "samples"))

    def refuses(self, run: Mapping[str, Any]) -> str | None:
        if run["class_loss"] != "seen":
            return "a batch has samples of all tasks, so no task's classes can be left out; set class_loss=seen"
        return None

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
