"""ER+FL: experience replay at each client (Chaudhry et al., 2019; as a baseline: FOT, appendix F.2).

A client stores a few samples of each finished task and trains on
    1/2 CE(batch of the task) + 1/2 CE(batch of the memory),
with each sample passed through the head of its own task. FOT's "equally contributed" allows other readings: `combine`.
With an empty memory and old heads that do not train, results are bit-identical to FedAvg.
"""

from dataclasses import dataclass
from typing import ClassVar

import torch
from torch import Tensor

from cfl.contract import Ctx
from cfl.contract.losses import cross_entropy, masked_mean
from cfl.core import option, plugins
from cfl.methods.strategies.replay import Replay


@plugins.strategies.register("er")
@dataclass(frozen=True)
class ER(Replay):
    """Experience replay: each client trains again on a few stored samples (Chaudhry et al., 2019)."""

    source: ClassVar[str] = "Chaudhry et al., 2019, Algorithm 1; FOT, appendix F.2"

    combine: str = option(
        "half", "combine both losses: half of each, their sum, or the mean over all samples",
        source="F.2: equally contributed", choices=("half", "sum", "concat"),
    )  # fmt: skip

    def loss(self, logits: Tensor, ctx: Ctx) -> Tensor:
        batch = ctx.batch
        if batch.task is None or self.combine == "concat":
            return super().loss(logits, ctx)
        losses = cross_entropy(logits, batch)
        old = batch.mask * (batch.task != ctx.task)
        on_new, on_old = masked_mean(losses, batch.mask - old), masked_mean(losses, old)
        both = on_new + on_old if self.combine == "sum" else (on_new + on_old) / 2
        return torch.where(old.sum() > 0, both, on_new)
