"""MOON (Li et al., 2021, eq. 3): features near those of the global model and away from those of the last local model.

Local loss + mu CE([cos(z, z_global), cos(z, z_previous)] / tau, first), where z are the inputs of the last layer. The
paper puts a projection head before the last layer; to have one, put it into the network.
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


@plugins.local.register("moon")
@dataclass(frozen=True)
class Moon(LocalRegularizer):
    """Model-contrastive learning of features (Li et al., 2021)."""

    source: ClassVar[str] = "Li et al., CVPR 2021, eq. 3"
    sends: ClassVar[str] = ""
    per_sample: ClassVar[bool] = True
    lends: ClassVar[bool] = True

    mu: float = option(
        0.1, "weight of the contrastive loss", source="FedSOL's code; the paper has 1 to 10", at_least=0, steep="local"
    )
    tau: float = option(1.0, "temperature", source="FedSOL's code; the paper has 0.5", above=0.0)

    def init_client(self, params: Tree, model: Model) -> Tree:
        """The last local model; before a client's first round of a task, the global model."""
        if model.no_features:
            raise ConfigError(f"'moon' compares the inputs of a last linear layer; {model.no_features}")
        return dict(params)

    def penalty(self, params: Tree, logits: Tensor, ctx: Ctx) -> Tensor | float:
        assert ctx.features is not None
        with ctx.model.evaluation():
            references = [
                ctx.forward(at, ctx.batch, features=True).detach() for at in (ctx.shared["params"], ctx.state)
            ]
        near, far = (F.cosine_similarity(ctx.features, z, dim=1) / self.tau for z in references)
        losses = torch.logaddexp(near, far) - near  # eq. 3
        return self.mu * masked_mean(losses, ctx.batch.mask)

    def finish(self, params: Tree, ctx: Ctx, steps: int) -> tuple[Tree, Tree]:
        return {}, {**ctx.shared["params"], **params}
