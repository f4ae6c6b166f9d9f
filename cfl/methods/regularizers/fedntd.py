"""FedNTD (Lee et al., 2022, eq. 4 and 5): distillation of the global model without the true class of each sample.

Local loss + beta tau^2 KL(global || local), where both softmax functions leave out the true class.
"""

from dataclasses import dataclass
from typing import ClassVar

import torch
from torch import Tensor

from cfl.contract import Ctx, LocalRegularizer
from cfl.contract.losses import divergence, masked_mean
from cfl.core import Tree, option, plugins
from cfl.methods.regularizers.kl import global_logits
from cfl.models.handle import NO_CLASS


@plugins.local.register("fedntd")
@dataclass(frozen=True)
class FedNTD(LocalRegularizer):
    """Not-true distillation: keeps the global model's knowledge of absent classes (Lee et al., 2022)."""

    source: ClassVar[str] = "Lee et al., NeurIPS 2022, eq. 4 and 5"
    per_sample: ClassVar[bool] = True
    lends: ClassVar[bool] = True

    beta: float = option(1.0, "weight of the distillation", source="FedSOL's code", at_least=0.0, steep="local")
    tau: float = option(1.0, "temperature", source="official code", above=0.0)

    def penalty(self, params: Tree, logits: Tensor, ctx: Ctx) -> Tensor | float:
        true = ctx.batch.y[:, None] == torch.arange(logits.shape[1], device=logits.device)
        theirs, ours = (leaf.masked_fill(true, NO_CLASS) for leaf in (global_logits(ctx), logits))
        losses = divergence(theirs, ours, self.tau)
        return self.beta * self.tau**2 * masked_mean(losses, ctx.batch.mask)
