"""Krum and Multi-Krum (Blanchard, El Mhamdi, Guerraoui and Stainer, NeurIPS 2017, Section 4).

Of n clients, of which f may be hostile, the score of client i is the sum of |V_i - V_j|^2 over the n - f - 2 clients j
whose updates are closest to its own. Krum takes the update with the lowest score, Multi-Krum the mean of the m updates
with the lowest scores. Updates are compared whole, running statistics included. Clients count alike, whatever
agg.weights says: a hostile client may claim any number of samples. Equal scores: the lower id comes first.
"""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, ClassVar

from torch import Tensor

from cfl.contract import LocalRegularizer, RoundInfo
from cfl.core import Tree, option, plugins, tree, warn
from cfl.methods.regularizers.stacks import distances, krum_scores, part, rows


@plugins.local.register("krum")
@dataclass(frozen=True)
class Krum(LocalRegularizer):
    """The mean of the updates that are closest to the others (Blanchard et al., 2017)."""

    source: ClassVar[str] = "Blanchard et al., NeurIPS 2017, Section 4"
    per_sample: ClassVar[bool] = True
    decides: ClassVar[str] = "how updates are combined"

    hostile: float = option(0.2, "share of the clients that may be hostile (f / n)", at_least=0.0, at_most=0.5)
    chosen: int = option(0, "clients whose mean is taken (m); 1: Krum, 0: all but f", source="Krum: 1", at_least=0)

    def refuses(self, run: Mapping[str, Any]) -> str | None:
        clients = min(run["cohort"], run["partition"]["clients"])
        return self._fault(part(self.hostile, clients), clients)

    def aggregate(self, updates: Tree, weights: Tensor, info: RoundInfo) -> Tree:
        clients, f = len(weights), part(self.hostile, len(weights))
        if fault := self._fault(f, clients):  # fewer clients than the cohort has, after drop-outs or by sampling
            warn(f"in a round of so few clients hostile ones may decide: {fault}")
        scores = krum_scores(distances(rows(updates)), f)
        best = scores.argsort(stable=True)[: self.chosen or clients - f].sort().values
        return tree.weighted_mean(tree.map(lambda leaf: leaf[best], updates), [1.0] * len(best))

    def _fault(self, f: int, clients: int) -> str | None:
        """Why the rule may fail with `f` hostile clients, or None."""
        if f and 2 * f + 2 >= clients:  # Proposition 1
            return f"regularizer.krum.hostile={self.hostile:g} is {f} of {clients} clients, and 2 f + 2 < n; lower it"
        if f and self.chosen > clients - f:
            return (
                f"regularizer.krum.chosen={self.chosen} of {clients} clients leaves fewer out than the {f} that may be "
                f"hostile; set at most {clients - f}"
            )
        return None
