"""FedRCL (Seo et al., 2024, section 4): supervised contrastive learning of features that does not collapse them.

With s the cosine similarity of two samples' features, per sample (the form of the official code, which mines hard
pairs; the paper sums over all of them):
    contrast: -log(e^(p/tau) / (e^(p/tau) + e^(n1/tau) + e^(n2/tau))), p the smallest similarity within its class,
    itself included, n1 and n2 the largest two to other classes;
    relaxation: log(1 + e^((q - 1)/tau)), q the smallest similarity to others of its class where that exceeds the
    threshold, else -1: samples of a class that are too alike are pushed apart.
Features are what enters the last layer; the paper adds those of earlier stages of its ResNet.
"""

from dataclasses import dataclass
from typing import ClassVar

import torch
import torch.nn.functional as F
from torch import Tensor

from cfl.contract.context import Ctx
from cfl.contract.losses import masked_mean
from cfl.contract.regularizer import LocalRegularizer
from cfl.core import plugins
from cfl.core.errors import ConfigError
from cfl.core.options import option
from cfl.core.tree import Tree
from cfl.models.handle import Model

_NONE = 1e4  # beyond any similarity; e^(-1e4 / tau) is 0


@plugins.local.register("fedrcl")
@dataclass(frozen=True)
class FedRCL(LocalRegularizer):
    """Relaxed contrastive learning of features (Seo et al., 2024)."""

    source: ClassVar[str] = "Seo et al., CVPR 2024, section 4; official code"
    lends: ClassVar[bool] = True

    weight: float = option(1.0, "weight of both terms", source="official code", at_least=0.0)
    tau: float = option(0.05, "temperature", source="official code", above=0.0)
    threshold: float = option(0.7, "similarity above which a pair of a class is pushed apart", source="official code")

    def init_client(self, params: Tree, model: Model) -> Tree:
        if model.classifier is None:
            raise ConfigError("'fedrcl' compares what enters the last layer; end the model in nn.Linear")
        return {}

    def penalty(self, params: Tree, logits: Tensor, ctx: Ctx) -> Tensor | float:
        assert ctx.features is not None
        mask, z = ctx.batch.mask, F.normalize(ctx.features, dim=1)
        similar, itself = z @ z.T, torch.eye(len(z), dtype=torch.bool, device=z.device)
        pairs = (mask[:, None] * mask) > 0
        alike = ctx.batch.y[:, None] == ctx.batch.y
        if ctx.batch.task is not None and ctx.model.multi_head:  # class 0 of one head is not that of another
            alike = alike & (ctx.batch.task[:, None] == ctx.batch.task)
        farthest = similar.masked_fill(~(alike & pairs | itself), _NONE).amin(dim=1)
        nearest = similar.masked_fill(alike | ~pairs, -_NONE).topk(min(2, len(z)), dim=1).values
        contrast = torch.cat([farthest[:, None], nearest], dim=1) / self.tau
        other = similar.masked_fill(~(alike & pairs) | itself, _NONE).amin(dim=1)
        other = torch.where((other > self.threshold) & (other < _NONE), other, -1.0)
        losses = contrast.logsumexp(dim=1) - contrast[:, 0] + F.softplus((other - 1) / self.tau)
        return self.weight * masked_mean(losses, mask)
