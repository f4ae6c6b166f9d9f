"""RFA: the geometric median of the updates (Pillutla, Kakade and Harchaoui, IEEE TSP 2022, Algorithm 2).

    v = argmin over z of sum_k alpha_k |z - w_k|      with alpha_k = n_k / n, the clients' weights

The smoothed Weiszfeld algorithm starts from the weighted mean and repeats
    beta_k = alpha_k / max(nu, |v - w_k|),    v <- sum_k beta_k w_k / sum_k beta_k
Updates are compared whole, running statistics included. Deviations: more iterations than the paper's 3, whose server
needs a secure sum for each, while this one holds the updates; and the secure sums of the paper are therefore left out.
"""

from dataclasses import dataclass
from typing import ClassVar

from torch import Tensor

from cfl.contract import LocalRegularizer, RoundInfo
from cfl.core import Tree, option, plugins, tree
from cfl.methods.regularizers.stacks import along, rows


@plugins.local.register("rfa")
@dataclass(frozen=True)
class RFA(LocalRegularizer):
    """The geometric median of the clients' updates, by the smoothed Weiszfeld algorithm (Pillutla et al., 2022)."""

    source: ClassVar[str] = "Pillutla et al., IEEE TSP 2022, Algorithm 2"
    per_sample: ClassVar[bool] = True
    decides: ClassVar[str] = "how updates are combined"

    iterations: int = option(32, "iterations of the Weiszfeld algorithm", source="paper: 3", at_least=1)
    smoothing: float = option(1e-6, "smallest distance that divides (nu)", source="paper: 1e-6", above=0.0)

    def aggregate(self, updates: Tree, weights: Tensor, info: RoundInfo) -> Tree:
        vectors = rows(updates)
        weights = weights.to(vectors)
        beta = alpha = weights / weights.sum()
        for _ in range(self.iterations):
            v = beta @ vectors
            beta = alpha / (vectors - v).norm(dim=1).clamp(min=self.smoothing)
            beta = beta / beta.sum()
        return tree.map(lambda leaf: (leaf * along(beta, leaf)).sum(dim=0), updates)
