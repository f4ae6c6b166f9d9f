"""Bulyan (El Mhamdi, Guerraoui and Rouault, ICML 2018, Section 4).

Of n clients, of which f may be hostile, theta = n - 2 f updates are selected: the one with the lowest Krum score, then
the one with the lowest score among the others, and so on. In each coordinate the result is the mean of the
beta = theta - 2 f selected values nearest to their median. An update that Krum finds close enough can still be far away
in a few coordinates, and the second part leaves those out. Updates are compared whole, running statistics included.
Clients count alike, whatever agg.weights says: a hostile client may claim any number of samples. Equal scores: the
lower id comes first.
"""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, ClassVar

from torch import Tensor

from cfl.contract import LocalRegularizer, RoundInfo
from cfl.core import Tree, option, plugins, tree, warn
from cfl.methods.regularizers.stacks import distances, krum_scores, median, part, rows


@plugins.local.register("bulyan")
@dataclass(frozen=True)
class Bulyan(LocalRegularizer):
    """A trimmed mean, by coordinate, of the updates that Krum selects (El Mhamdi et al., 2018)."""

    source: ClassVar[str] = "El Mhamdi et al., ICML 2018, Section 4"
    per_sample: ClassVar[bool] = True
    decides: ClassVar[str] = "how updates are combined"

    hostile: float = option(0.1, "share of the clients that may be hostile (f / n)", at_least=0.0, at_most=0.25)

    def refuses(self, run: Mapping[str, Any]) -> str | None:
        clients = min(run["cohort"], run["partition"]["clients"])
        return self._fault(part(self.hostile, clients), clients)

    def aggregate(self, updates: Tree, weights: Tensor, info: RoundInfo) -> Tree:
        clients, f = len(weights), part(self.hostile, len(weights))
        if fault := self._fault(f, clients):  # fewer clients than the cohort has, after drop-outs or by sampling
            warn(f"in a round of so few clients hostile ones may decide: {fault}")
        squared, left, selected = distances(rows(updates)), [*range(clients)], list[int]()
        for _ in range(clients - 2 * f):  # theta
            best = int(krum_scores(squared[left][:, left], f).argmin())
            selected.append(left.pop(best))
        kept = max(1, len(selected) - 2 * f)  # beta
        middle = tree.map(lambda leaf: _near_median(leaf[sorted(selected)], kept), updates)
        return tree.weighted_mean(middle, [1.0] * kept)

    def _fault(self, f: int, clients: int) -> str | None:
        """Why the rule may fail with `f` hostile clients, or None."""
        if f and 4 * f + 3 > clients:  # the theorem's condition
            share = f"regularizer.bulyan.hostile={self.hostile:g}"
            return f"{share} is {f} of {clients} clients, and n >= 4 f + 3; lower it"
        return None


def _near_median(leaf: Tensor, kept: int) -> Tensor:
    """In each coordinate of a leaf (clients, ...), the `kept` values nearest to the median: (kept, ...)."""
    away = (leaf - median(leaf)).abs().argsort(dim=0, stable=True)
    return leaf.gather(0, away[:kept].sort(dim=0).values)
