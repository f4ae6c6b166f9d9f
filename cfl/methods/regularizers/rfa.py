"""RFA: the geometric median of the updates (Pillutla, Kakade and Harchaoui, IEEE TSP 2022, Algorithm 2).

    v = argmin over z of sum_k alpha_k |z - w_k|      with alpha_k = n_k / n, the clients' weights

The smoothed Weiszfeld algorithm repeats
    beta_k = alpha_k / max(nu, |v - w_k|),    v <- sum_k beta_k w_k / sum_k beta_k
Updates are compared whole, running statistics included. Deviations: the server holds the updates, so there are no
secure sums, and more iterations than the paper's 3; and v starts from the coordinate median. From the weighted mean, as
in the paper, a huge update takes many iterations to lose its pull.
"""

from dataclasses import dataclass
from typing import ClassVar

from torch import Tensor

from cfl.contract import LocalRegularizer, RoundInfo
from cfl.core import Tree, option, plugins, tree
from cfl.methods.regularizers.stacks import along, median, rows


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
        alpha, v = weights / weights.sum(), median(vectors)
        for _ in range(self.iterations):
            beta = alpha / (vectors - v).norm(dim=1).clamp(min=self.smoothing)
            beta = beta / beta.sum()
            v = beta @ vectors
        return tree.map(lambda leaf: (leaf * along(beta, leaf)).sum(dim=0), updates)
