"""FedProx (Li et al., 2020, eq. 2): local loss + mu / 2 |w - w_global|^2.

w_global is the global model at the start of the round, not of the task. With mu = 0 this is the plain local loss.
"""

from dataclasses import dataclass
from typing import ClassVar

from torch import Tensor

from cfl.contract import Ctx, LocalRegularizer
from cfl.core import Tree, option, plugins


@plugins.local.register("fedprox")
@dataclass(frozen=True)
class FedProx(LocalRegularizer):
    """Proximal term that keeps local weights near the global model (Li et al., 2020)."""

    source: ClassVar[str] = "Li et al., MLSys 2020, eq. 2"
    per_sample: ClassVar[bool] = True
    lends: ClassVar[bool] = True

    mu: float = option(
        0.01,
        "weight of the proximal term",
        source="ours; the paper tries 0.001 to 1, FedSOL's code has 1",
        at_least=0.0,
        steep="local",
    )

    def penalty(self, params: Tree, logits: Tensor, ctx: Ctx) -> Tensor | float:
        distances = [(param - ctx.shared["params"][name]).square().sum() for name, param in params.items()]
        return self.mu / 2 * sum(distances)  # eq. 2
