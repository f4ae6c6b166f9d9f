"""LwF+FL: learning without forgetting, with the previous task's global model as teacher (Li and Hoiem, ECCV 2016).

A client trains on  CE + lambda sum_{s < t} H(p_s, softmax(z_s / T)),  p_s = softmax(z*_s / T),
where z_s are the outputs of head s for the *new* data, and z*_s those of the teacher, the global model at the end of
the previous task. H is the cross-entropy, T = 2 (eq. 2; without a factor T^2, as in the paper). With one head for all
tasks the sum has one term. In both passes batch normalisation uses the statistics of the batch, because the new data
have no running statistics yet. Clients store nothing; the server broadcasts the teacher in every round.

The paper trains the old heads, too. Here they do not train unless `train_old_heads` is set.
"""

from dataclasses import dataclass
from typing import ClassVar

from torch import Tensor

from cfl.contract import Ctx, RoundInfo, Server, Strategy, TreesByOwner
from cfl.contract.losses import masked_mean, soft_cross_entropy
from cfl.core import Tree, option, plugins, tree
from cfl.models import Model


@plugins.strategies.register("lwf")
@dataclass(frozen=True)
class LwF(Strategy):
    """Learning without forgetting: old heads keep their outputs for the new data (Li and Hoiem, 2016)."""

    source: ClassVar[str] = "Li and Hoiem, ECCV 2016, eq. 2"
    per_sample: ClassVar[bool] = True
    task_incremental: ClassVar[str] = (
        "distils each old head on the new samples; old heads stay, or train with train_old_heads"
    )
    class_incremental: ClassVar[str] = "distils one softmax over the old classes, and the whole head trains"

    strength: float = option(1.0, "lambda, weight of the distillation", source="section 3", at_least=0.0, steep="local")
    temperature: float = option(2.0, "T", source="section 3", above=0.0)
    train_old_heads: bool = option(False, "let the distillation train the old heads", source="paper: yes")

    def begin_task(self, server: Server, task: int, model: Model) -> Server:
        return {**server, "teacher": tree.select(server["params"], model.trainable(task - 1, tuple(range(task))))}

    def heads(self, task: int, tasks: int) -> tuple[int, ...]:
        return tuple(range(task + 1))

    def frozen(self, task: int, model: Model) -> frozenset[str]:
        return frozenset() if self.train_old_heads else super().frozen(task, model)

    def broadcast(self, server: Server, info: RoundInfo) -> TreesByOwner:
        down = super().broadcast(server, info)
        if info.task and info.phase.train:
            moving = set(info.names) - info.frozen  # frozen heads in "params" equal the teacher's
            down["teacher"] = {name: leaf for name, leaf in server["teacher"].items() if name in moving}
        return down

    def penalty(self, params: Tree, logits: Tensor, ctx: Ctx) -> Tensor | float:
        if ctx.task == 0:
            return 0.0
        old = tuple(range(ctx.task))
        targets = ctx.forward(ctx.shared["teacher"], ctx.batch, old, dropout=False).detach()
        outputs = ctx.forward(params, ctx.batch, old)
        if ctx.model.growing:  # one softmax over the old classes
            targets, outputs = targets.flatten(1)[:, None], outputs.flatten(1)[:, None]
        entropies = soft_cross_entropy(targets, outputs, self.temperature).sum(dim=1)  # eq. 2
        return self.strength * masked_mean(entropies, ctx.batch.mask)
