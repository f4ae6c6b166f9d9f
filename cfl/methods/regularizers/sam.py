"""FedSAM and FedASAM (Caldarola et al., 2022; Qu et al., 2022): clients descend by the gradient at a worse point.

SAM (Foret et al., 2021, eq. 2): e = rho g / |g|, and the gradient is taken at w + e. ASAM (Kwon et al., 2021, eq. 8)
scales each weight: e = rho w^2 g / |w g|. Both points use the same minibatch.
"""

from dataclasses import dataclass
from typing import ClassVar

from torch import Tensor

from cfl.contract.context import Ctx
from cfl.contract.regularizer import GradFn, LocalRegularizer
from cfl.core import plugins, tree
from cfl.core.options import option
from cfl.core.tree import Tree

_SMALL = 1e-12


@plugins.local.register("fedsam")
@dataclass(frozen=True)
class FedSAM(LocalRegularizer):
    """Sharpness-aware local training (Caldarola et al., 2022; Qu et al., 2022)."""

    source: ClassVar[str] = "Caldarola et al., ECCV 2022; Qu et al., ICML 2022, Algorithm 1"

    rho: float = option(0.5, "length of the perturbation", source="FedSOL's code", at_least=0.0)

    def around(self, grad_fn: GradFn) -> GradFn:
        def sharp(params: Tree, ctx: Ctx) -> Tree:
            return grad_fn(tree.add(params, self.perturbation(params, grad_fn(params, ctx))), ctx)

        return sharp

    def perturbation(self, params: Tree, grads: Tree) -> Tree:
        """The way to the worst point near by, of length rho (SAM, eq. 2)."""
        return tree.scale(grads, self.rho / (_norm(grads) + _SMALL))


@plugins.local.register("fedasam")
@dataclass(frozen=True)
class FedASAM(FedSAM):
    """Adaptive sharpness-aware local training: the perturbation scales with each weight (Caldarola et al., 2022)."""

    source: ClassVar[str] = "Caldarola et al., ECCV 2022; Kwon et al., ICML 2021, eq. 8"

    def perturbation(self, params: Tree, grads: Tree) -> Tree:
        """The same in the units of each weight (ASAM, eq. 8, eta = 0)."""
        scaled = tree.map(lambda param, grad: param.abs() * grad, params, grads)
        length = self.rho / (_norm(scaled) + _SMALL)
        return tree.map(lambda param, leaf: length * param.abs() * leaf, params, scaled)


def _norm(a: Tree) -> Tensor:
    return tree.dot(a, a).sqrt()
