"""FedASAM (Caldarola et al., 2022): FedSAM with a perturbation in proportion to each weight.

The gradient is taken at w + e, where e = rho w^2 g / |w g| (ASAM, Kwon et al., 2021, eq. 8).
"""

from dataclasses import dataclass
from typing import ClassVar

from cfl.core import Tree, plugins, tree
from cfl.methods.regularizers.fedsam import FedSAM


@plugins.local.register("fedasam")
@dataclass(frozen=True)
class FedASAM(FedSAM):
    """Adaptive sharpness-aware local training: the perturbation scales with each weight (Caldarola et al., 2022)."""

    source: ClassVar[str] = "Caldarola et al., ECCV 2022; Kwon et al., ICML 2021, eq. 8"

    def perturbation(self, params: Tree, grads: Tree) -> Tree:
        """rho w^2 g / |w g| (ASAM, eq. 8, eta = 0)."""
        scaled = tree.map(lambda param, grad: param.abs() * grad, params, grads)
        length = self.over_norm(scaled)
        return tree.map(lambda param, leaf: length * param.abs() * leaf, params, scaled)
