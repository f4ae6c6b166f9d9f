"""FedDyn (Acar et al., 2021, Algorithm 1): a linear term h_i aligns each client's optimum with the global one.

Client: minimise the local loss - <h_i, w> + alpha / 2 |w - w_global|^2. Then h_i <- h_i - alpha (w_i - w_global), which
is the gradient of the local loss at w_i.
Server: h <- h - alpha / N sum_i (w_i - w_global), and w <- mean of w_i - h / alpha.

The server computes the sum from the mean update: it is the mean times the share of all clients in the round (with
agg.weights=samples: of all samples). So h is the mean of the h_i with the weights of the run's average. The paper's
weights are uniform.
"""

from dataclasses import dataclass
from typing import ClassVar

import torch
from torch import Tensor

from cfl.contract import Ctx, LocalRegularizer, RoundInfo
from cfl.core import Tree, option, plugins
from cfl.models import Model


@plugins.local.register("feddyn")
@dataclass(frozen=True)
class FedDyn(LocalRegularizer):
    """Dynamic regularisation that aligns local optima with the global one (Acar et al., 2021)."""

    source: ClassVar[str] = "Acar et al., ICLR 2021, Algorithm 1"
    sends: ClassVar[str] = ""
    per_sample: ClassVar[bool] = True
    lends: ClassVar[bool] = True
    decides: ClassVar[str] = "the length of the server's step"

    alpha: float = option(
        0.1, "weight of the proximal term", source="Algorithm 1; FedSOL's code", above=0.0, steep="local"
    )

    def init_client(self, params: Tree, model: Model) -> Tree:
        return {name: torch.zeros_like(leaf) for name, leaf in params.items() if model.is_parameter(name)}

    def init_shared(self, params: Tree, model: Model) -> Tree:
        return self.init_client(params, model)

    def penalty(self, params: Tree, logits: Tensor, ctx: Ctx) -> Tensor | float:
        return sum(
            self.alpha / 2 * (param - ctx.shared["params"][name]).square().sum() - (ctx.state[name] * param).sum()
            for name, param in params.items()
        )

    def finish(self, params: Tree, ctx: Ctx, steps: int) -> tuple[Tree, Tree]:
        moved = {name: params[name] - ctx.shared["params"][name] for name in ctx.state if name in params}
        return {}, {**ctx.state, **{name: ctx.state[name] - self.alpha * move for name, move in moved.items()}}

    def server_step(self, step: Tree, own: Tree, gathered: Tree, params: Tree, info: RoundInfo) -> tuple[Tree, Tree]:
        share = self.alpha * info.fraction
        own = {name: h + share * step[name] if name in step else h for name, h in own.items()}
        return {name: leaf + own[name] / self.alpha if name in own else leaf for name, leaf in step.items()}, own
