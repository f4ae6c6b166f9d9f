"""Direct projection (FedSOL, eq. 3): the local gradient without its part against the proximal gradient.

g - <g, g_p> / |g_p|^2 g_p where <g, g_p> < 0, over the whole model. FedSOL shows that this stalls: it is its baseline.
"""

from dataclasses import dataclass
from typing import ClassVar

import torch

from cfl.contract.context import Ctx
from cfl.contract.regularizer import LocalRegularizer
from cfl.core import plugins, tree
from cfl.core.options import option
from cfl.core.tree import Tree
from cfl.methods.regularizers.fedsol import ROUNDING, proximal_gradient


def without_conflict(
    grads: Tree, reference: Tree, smallest: float, *, always: bool = False, most: float | None = None
) -> Tree:
    """The nearest gradient with <g, reference> >= 0; `grads` where |reference| is below `smallest`.

    It solves min |g - grads|^2 subject to <g, reference> >= 0 (A-GEM, Chaudhry et al., 2019, eq. 11).
    always: subject to <g, reference> = 0; most: bound of the multiple of `reference` that is taken away.
    """
    inner, square = tree.dot(grads, reference), tree.dot(reference, reference)
    wrong = (square > smallest**2) if always else (inner < 0) & (square > smallest**2)
    share = torch.where(wrong, inner / torch.where(wrong, square, 1.0), 0.0)
    share = share if most is None else share.clamp(-most, most)
    return {name: grad - share * reference[name] for name, grad in grads.items()}


@plugins.local.register("prox_projection")
@dataclass(frozen=True)
class ProxProjection(LocalRegularizer):
    """Direct projection of the local gradient against the proximal one (FedSOL, eq. 3)."""

    source: ClassVar[str] = "FedSOL (Lee et al., CVPR 2024), eq. 3 and Table 1"

    proximal: str = option("kl", "proximal loss", source="Table 1", choices=("kl", "l2"))
    temperature: float = option(3.0, "temperature of the divergence", source="official code", above=0.0)

    def adjust(self, grads: Tree, params: Tree, ctx: Ctx) -> Tree:
        reference = proximal_gradient(self.proximal, self.temperature, params, frozenset(grads), ctx)
        return without_conflict(grads, reference, ROUNDING)
