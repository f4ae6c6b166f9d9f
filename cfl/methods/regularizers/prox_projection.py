"""Direct projection (FedSOL, eq. 3): the local gradient without its component against the proximal gradient.

g - <g, g_p> / |g_p|^2 g_p if <g, g_p> < 0, over the whole model. FedSOL has it as a baseline, and shows that it stalls.
"""

from dataclasses import dataclass
from typing import ClassVar

import torch

from cfl.contract import Ctx, LocalRegularizer
from cfl.core import Tree, option, plugins, tree
from cfl.methods.regularizers.fedsol import ROUNDING, proximal_gradient


def without_conflict(
    grads: Tree, reference: Tree, smallest: float, *, always: bool = False, most: float | None = None
) -> Tree:
    """The gradient nearest to `grads` with <g, reference> >= 0, or `grads` if |reference| is below `smallest`.

    It solves min |g - grads|^2 subject to <g, reference> >= 0 (A-GEM, Chaudhry et al., 2019, eq. 11).
    always: subject to <g, reference> = 0 instead; most: bound on the coefficient of `reference` that is subtracted.
    """
    inner, square = tree.dot(grads, reference), tree.dot(reference, reference)
    conflict = (square > smallest**2) if always else (inner < 0) & (square > smallest**2)
    share = torch.where(conflict, inner / torch.where(conflict, square, 1.0), 0.0)
    share = share if most is None else share.clamp(-most, most)
    return {name: grad - share * reference[name] for name, grad in grads.items()}


@plugins.local.register("prox_projection")
@dataclass(frozen=True)
class ProxProjection(LocalRegularizer):
    """Direct projection of the local gradient against the proximal gradient (FedSOL, eq. 3)."""

    source: ClassVar[str] = "FedSOL (Lee et al., CVPR 2024), eq. 3 and Table 1"

    proximal: str = option("kl", "proximal loss", source="Table 1", choices=("kl", "l2"))
    temperature: float = option(3.0, "temperature of the divergence", source="official code", above=0.0)

    def adjust(self, grads: Tree, params: Tree, ctx: Ctx) -> Tree:
        reference = proximal_gradient(self.proximal, self.temperature, params, frozenset(grads), ctx)
        return without_conflict(grads, reference, ROUNDING)  # FedSOL, eq. 3
