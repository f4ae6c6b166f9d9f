"""Distillation from the global model (the KL "base" of FedSOL's Table 1): local loss + beta KL(global || local)."""

from dataclasses import dataclass
from typing import ClassVar

from torch import Tensor

from cfl.contract import Ctx, LocalRegularizer
from cfl.contract.losses import divergence, masked_mean
from cfl.core import Tree, option, plugins


def global_logits(ctx: Ctx) -> Tensor:
    """Logits (batch, classes) of the global model, in evaluation mode, on the client's batch; without gradient."""
    with ctx.model.evaluation():
        return ctx.forward(ctx.shared["params"], ctx.batch).detach()


@plugins.local.register("kl")
@dataclass(frozen=True)
class KL(LocalRegularizer):
    """Keeps the local model's predictions near those of the global model (FedSOL, Table 1)."""

    source: ClassVar[str] = "FedSOL (Lee et al., CVPR 2024), Table 1"
    per_sample: ClassVar[bool] = True
    lends: ClassVar[bool] = True

    beta: float = option(1.0, "weight of the divergence", source="unstated; ours", at_least=0.0, steep="local")
    temperature: float = option(3.0, "temperature of both softmax functions", source="FedSOL's code", above=0.0)

    def penalty(self, params: Tree, logits: Tensor, ctx: Ctx) -> Tensor | float:
        return self.beta * masked_mean(divergence(global_logits(ctx), logits, self.temperature), ctx.batch.mask)
