"""FedRCL (Seo et al., 2024, section 4): relaxed supervised contrastive learning, against the collapse of features.

The loss of a sample has two terms, in the cosine similarities of its features to those of the other samples. They are
in the form of the official code, which mines hard pairs; the paper sums over all pairs.
    contrast: -log(e^(p/tau) / (e^(p/tau) + e^(n1/tau) + e^(n2/tau))), where p is the smallest similarity within its
    class, to itself included, and n1 and n2 are the two largest similarities to other classes;
    relaxation: log(1 + e^((q - 1)/tau)), where q is the smallest similarity to other samples of its class if that
    exceeds the threshold, else -1. It pushes apart samples of one class that are too similar.
Features are the inputs of the last layer. The paper also uses those of earlier stages of its ResNet.
"""

from dataclasses import dataclass
from typing import ClassVar

import torch
import torch.nn.functional as F
from torch import Tensor

from cfl.contract import Ctx, LocalRegularizer
from cfl.contract.losses import masked_mean
from cfl.core import ConfigError, Tree, option, plugins
from cfl.models import Model

_NONE = 1e4  # beyond any similarity; e^(-1e4 / tau) is 0


@plugins.local.register("fedrcl")
@dataclass(frozen=True)
class FedRCL(LocalRegularizer):
    """Relaxed contrastive learning of features (Seo et al., 2024)."""

    source: ClassVar[str] = "Seo et al., CVPR 2024, section 4; official code"
    lends: ClassVar[bool] = True

    weight: float = option(1.0, "weight of both terms", source="official code", at_least=0.0, steep="local")
    tau: float = option(0.05, "temperature", source="official code", above=0.0)
    threshold: float = option(0.7, "similarity above which a pair of one class is pushed apart", source="official code")

    def init_client(self, params: Tree, model: Model) -> Tree:
        if model.no_features:
            raise ConfigError(f"'fedrcl' compares the inputs of a last linear layer; {model.no_features}")
        return {}

    def penalty(self, params: Tree, logits: Tensor, ctx: Ctx) -> Tensor | float:
        assert ctx.features is not None
        mask, z = ctx.batch.mask, F.normalize(ctx.features, dim=1)
        similar, itself = z @ z.T, torch.eye(len(z), dtype=torch.bool, device=z.device)
        pairs = (mask[:, None] * mask) > 0
        alike = ctx.batch.y[:, None] == ctx.batch.y
        if ctx.batch.task is not None and ctx.model.multi_head:  # label 0 is another class in each head
            alike = alike & (ctx.batch.task[:, None] == ctx.batch.task)
        same = alike & pairs
        farthest = similar.masked_fill(~same, _NONE).amin(dim=1)
        nearest = similar.masked_fill(alike | ~pairs, -_NONE).topk(min(2, len(z)), dim=1).values
        contrast = torch.cat([farthest[:, None], nearest], dim=1) / self.tau
        other = similar.masked_fill(~same | itself, _NONE).amin(dim=1)
        other = torch.where((other > self.threshold) & (other < _NONE), other, -1.0)
        losses = contrast.logsumexp(dim=1) - contrast[:, 0] + F.softplus((other - 1) / self.tau)
        return self.weight * masked_mean(losses, mask)
