"""GLFC, as FOT adapts it to task-incremental learning (Dong et al., CVPR 2022; FOT, appendix F.2): replay with gradient
compensation.

Each sample's loss is weighted by how far it is from its label, relative to its group (new samples, or replayed ones):
    g = 1 - p_y (a constant),  w = g / mean of g over the group,  loss = mean(w CE).
So every group has mean weight 1. Without replayed samples all weights are 1, and with "ce" this is FedAvg. GLFC's
relation distillation, proxy server and detection of tasks are left out, as in FOT: the stream names the task.
"""

from dataclasses import dataclass
from typing import ClassVar

import torch
import torch.nn.functional as F
from torch import Tensor

from cfl.contract.context import Ctx
from cfl.contract.losses import cross_entropy, masked_mean
from cfl.core import plugins
from cfl.core.options import option
from cfl.methods.strategies.replay import Replay
from cfl.models.handle import NO_CLASS


@plugins.strategies.register("glfc")
@dataclass(frozen=True)
class GLFC(Replay):
    """Replay with compensated gradients, the part of GLFC that FOT compares with (Dong et al., 2022)."""

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
            classes = (logits > NO_CLASS / 2).sum(dim=1)  # narrower heads are filled up
            losses, p = (F.softplus(logits).sum(dim=1) - own) / classes, own.sigmoid()
        if batch.task is None:
            return masked_mean(losses, batch.mask)
        g, old = (1 - p).detach(), batch.mask * (batch.task != ctx.task)
        weights = compensation(g, old) + compensation(g, batch.mask - old)
        return masked_mean(torch.where(old.sum() > 0, weights, 1.0) * losses, batch.mask)


def compensation(g: Tensor, group: Tensor) -> Tensor:
    """g / mean of g over the group, 0 outside of it; 1 inside where the mean is nearly 0. g, group: (batch,)."""
    mean = masked_mean(g, group)
    return torch.where(mean < 1e-8, group, group * g / mean.clamp(min=1e-8))
