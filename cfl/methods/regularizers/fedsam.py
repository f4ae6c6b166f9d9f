"""FedSAM (Caldarola et al., 2022; Qu et al., 2022): sharpness-aware local training.

The gradient is taken at w + e, where e = rho g / |g| (SAM, Foret et al., 2021, eq. 2) and g is the gradient at w on the
same minibatch. The optimiser's step starts from w.
"""

from dataclasses import dataclass
from typing import ClassVar

from torch import Tensor

from cfl.contract import Ctx, GradFn, LocalRegularizer
from cfl.core import Tree, option, plugins, tree

_SMALL = 1e-12


@plugins.local.register("fedsam")
@dataclass(frozen=True)
class FedSAM(LocalRegularizer):
    """Sharpness-aware local training (Caldarola et al., 2022; Qu et al., 2022)."""

    source: ClassVar[str] = "Caldarola et al., ECCV 2022; Qu et al., ICML 2022, Algorithm 1"

    rho: float = option(0.5, "length of the perturbation", source="FedSOL's code", at_least=0.0, steep="local")

    def around(self, grad_fn: GradFn) -> GradFn:
        def sharp(params: Tree, ctx: Ctx) -> Tree:
            return grad_fn(tree.add(params, self.perturbation(params, grad_fn(params, ctx))), ctx)

        return sharp

    def perturbation(self, params: Tree, grads: Tree) -> Tree:
        """rho g / |g|, in the direction in which the loss rises fastest (SAM, eq. 2)."""
        return tree.scale(grads, self.over_norm(grads))

    def over_norm(self, a: Tree) -> Tensor:
        """rho / |a|, a finite number () if a is 0."""
        return self.rho / (tree.dot(a, a).sqrt() + _SMALL)
