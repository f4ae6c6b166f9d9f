"""GLFC: replay with gradient compensation, and relation distillation over a growing head (Dong et al., CVPR 2022).

The loss of a sample is weighted by its error relative to the mean error of its group (new or replayed samples):
    g = 1 - p_y (a constant),  w = g / mean of g over the group,  L_GC = mean(w loss).
The mean weight of each group is 1.

Class-incremental streams (a growing head), as published, with criterion "auto" or "bce":
    loss = (1 - lambda) L_GC + lambda L_RD,  lambda = 1/2.
L_GC has the binary cross-entropies of sigmoids over all classes so far. All weights are 1 in the first task. L_RD is
their mean with other targets: the labels one-hot, but for the old classes the sigmoids of the old model. The old model
is the global model at the end of the task before, and is broadcast. As in LwF, it normalises by the batch's statistics.
Left out: the proxy server, which picks the better of two old models by reconstructed prototypes; the detection of new
tasks by entropy, since streams announce them; herding, since `Replay` draws stored samples at random, balanced over
classes. GLFC's code has one memory for all classes, as budget "total", and mixes it into the training data; here stored
samples join each batch.

Other streams, as FOT adapts GLFC (appendix F.2): L_GC of the cross-entropy, without L_RD. Without replayed samples all
weights are 1, and with criterion "ce" this is FedAvg.
"""

from dataclasses import dataclass
from typing import ClassVar

import torch
import torch.nn.functional as F
from torch import Tensor

from cfl.contract import Ctx, RoundInfo, Server, TreesByOwner
from cfl.contract.losses import cross_entropy, masked_mean
from cfl.core import option, plugins, tree
from cfl.methods.strategies.replay import Replay
from cfl.models import Model
from cfl.models.handle import NO_CLASS


@plugins.strategies.register("glfc")
@dataclass(frozen=True)
class GLFC(Replay):
    """Replay with gradient compensation; over a growing head also relation distillation (Dong et al., 2022)."""

    source: ClassVar[str] = "Dong et al., CVPR 2022; without a growing head FOT, appendix F.2"
    task_incremental: ClassVar[str] = (
        "as FOT adapts it: compensated cross-entropies, stored samples in the heads of their tasks"
    )
    class_incremental: ClassVar[str] = (
        "as published: compensated sigmoids over all classes so far, and relation distillation from the global model "
        "of the task before; without the proxy server and the detection of tasks"
    )

    criterion: str = option(
        "auto",
        "cross-entropy, or binary cross-entropies of sigmoids; auto: bce over a growing head, else ce",
        source="GLFC's code: bce; FOT, F.2: ce",
        choices=("auto", "ce", "bce"),
    )
    relation: float = option(
        0.5,
        "lambda, weight of the relation distillation against the compensation; bce over a growing head",
        source="paper: 1/2 and 1/2",
        at_least=0.0,
        at_most=1.0,
    )

    def begin_task(self, server: Server, task: int, model: Model) -> Server:
        if not (self._as_published(model) and self.relation):
            return server
        return {**server, "teacher": tree.select(server["params"], model.trainable(task - 1))}

    def broadcast(self, server: Server, info: RoundInfo) -> TreesByOwner:
        down = super().broadcast(server, info)
        if "teacher" in server and info.phase.train:
            moving = set(info.names) - info.frozen  # frozen leaves in "params" equal the teacher's
            down["teacher"] = {name: leaf for name, leaf in server["teacher"].items() if name in moving}
        return down

    def loss(self, logits: Tensor, ctx: Ctx) -> Tensor:
        batch, later = ctx.batch, self._as_published(ctx.model) and ctx.task > 0
        losses, p = self._losses(logits, ctx)
        if batch.task is not None or later:
            g = (1 - p).detach()
            old = torch.zeros_like(batch.mask) if batch.task is None else batch.mask * (batch.task != ctx.task)
            weights = compensation(g, old) + compensation(g, batch.mask - old)
            losses = (weights if later else torch.where(old.sum() > 0, weights, 1.0)) * losses
        if later and self.relation:
            losses = (1 - self.relation) * losses + self.relation * self._relation_losses(logits, ctx)
        return masked_mean(losses, batch.mask)

    def _as_published(self, model: Model) -> bool:
        """True for the class-incremental form of the paper."""
        return model.growing and self.criterion != "ce"

    def _losses(self, logits: Tensor, ctx: Ctx) -> tuple[Tensor, Tensor]:
        """Loss of each sample, and probability of its label: (batch,) each."""
        own = logits.gather(1, ctx.batch.y[:, None])[:, 0]
        if self.criterion == "bce" or self._as_published(ctx.model):
            classes = (logits > NO_CLASS / 2).sum(dim=1)  # narrower heads are padded
            return (F.softplus(logits).sum(dim=1) - own) / classes, own.sigmoid()
        return cross_entropy(logits, ctx.batch), logits.softmax(dim=1).gather(1, ctx.batch.y[:, None])[:, 0]

    def _relation_losses(self, logits: Tensor, ctx: Ctx) -> Tensor:
        """Mean over the classes of the binary cross-entropies with the relations of the old model: (batch,)."""
        new = torch.arange(ctx.model.classes_of(ctx.task).start, logits.shape[1], device=logits.device)
        teacher = ctx.forward(ctx.shared["teacher"], ctx.batch, dropout=False).detach()
        labels = (ctx.batch.y[:, None] == new).to(logits.dtype)
        targets = torch.cat([teacher[:, : logits.shape[1] - len(new)].sigmoid(), labels], dim=1)
        counted = logits > NO_CLASS / 2  # class_loss=current leaves out classes
        return torch.where(counted, F.softplus(logits) - targets * logits, 0.0).sum(dim=1) / counted.sum(dim=1)


def compensation(g: Tensor, group: Tensor) -> Tensor:
    """g / mean of g over the group, or 1 if the mean is below 1e-8; 0 outside of the group. g, group: (batch,)."""
    mean = masked_mean(g, group)
    return torch.where(mean < 1e-8, group, group * g / mean.clamp(min=1e-8))
