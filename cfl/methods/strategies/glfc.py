"""GLFC as FOT adapts it to task-incremental learning: replay with gradient compensation (Dong et al., CVPR 2022; FOT,
appendix F.2).

The loss of a sample is weighted by its error relative to the mean error of its group (new or replayed samples):
    g = 1 - p_y (a constant),  w = g / mean of g over the group,  loss = mean(w CE).
The mean weight of each group is 1. Without replayed samples all weights are 1, and with criterion "ce" this is FedAvg.
Relation distillation, proxy server and task detection of GLFC are left out, as in FOT, since streams name their tasks.
"""

from dataclasses import dataclass
from typing import ClassVar

import torch
import torch.nn.functional as F
from torch import Tensor

from cfl.contract import Ctx
from cfl.contract.losses import cross_entropy, masked_mean
from cfl.core import option, plugins
from cfl.methods.strategies.replay import Replay
from cfl.models.handle import NO_CLASS


@plugins.strategies.register("glfc")
@dataclass(frozen=True)
class GLFC(Replay):
    """Replay with gradient compensation, the part of GLFC that FOT compares with (Dong et al., 2022)."""

    source: ClassVar[str] = "Dong et al., CVPR 2022, gradient compensation loss; FOT, appendix F.2"

    criterion: str = option(
        "ce", "cross-entropy, or binary cross-entropies of sigmoids", source="GLFC's code: bce", choices=("ce", "bce")
    )

    def loss(self, logits: Tensor, ctx: Ctx) -> Tensor:
        batch = ctx.batch
        own = logits.gather(1, batch.y[:, None])[:, 0]
        if self.criterion == "ce":
            losses, p = cross_entropy(logits, batch), logits.softmax(dim=1).gather(1, batch.y[:, None])[:, 0]
        else:
            classes = (logits > NO_CLASS / 2).sum(dim=1)  # narrower heads are padded
            losses, p = (F.softplus(logits).sum(dim=1) - own) / classes, own.sigmoid()
        if batch.task is None:
            return masked_mean(losses, batch.mask)
        g, old = (1 - p).detach(), batch.mask * (batch.task != ctx.task)
        weights = compensation(g, old) + compensation(g, batch.mask - old)
        return masked_mean(torch.where(old.sum() > 0, weights, 1.0) * losses, batch.mask)


def compensation(g: Tensor, group: Tensor) -> Tensor:
    """g / mean of g over the group, or 1 if the mean is below 1e-8; 0 outside of the group. g, group: (batch,)."""
    mean = masked_mean(g, group)
    return torch.where(mean < 1e-8, group, group * g / mean.clamp(min=1e-8))
