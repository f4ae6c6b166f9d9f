"""Coordinate-wise trimmed mean of the updates (Yin, Chen, Ramchandran and Bartlett, ICML 2018, Definition 2).

In each coordinate the largest and the smallest values, a share beta of the clients at each end, are left out, and the
mean of the others is taken. The paper needs beta to be at least the share of hostile clients. Clients count alike,
whatever agg.weights says: a hostile client may claim any number of samples.
"""

from dataclasses import dataclass
from typing import ClassVar

from torch import Tensor

from cfl.contract import LocalRegularizer, RoundInfo
from cfl.core import Tree, option, plugins, tree
from cfl.methods.regularizers.stacks import part


@plugins.local.register("trimmed_mean")
@dataclass(frozen=True)
class TrimmedMean(LocalRegularizer):
    """The mean of the clients' updates without the extremes of each coordinate (Yin et al., 2018)."""

    source: ClassVar[str] = "Yin et al., ICML 2018, Definition 2"
    per_sample: ClassVar[bool] = True
    decides: ClassVar[str] = "how updates are combined"

    trim: float = option(  # beta
        0.2, "share of the clients left out at each end, at least that of hostile ones", at_least=0.0, at_most=0.49
    )

    def aggregate(self, updates: Tree, weights: Tensor, info: RoundInfo) -> Tree:
        clients = len(weights)
        out = part(self.trim, clients)
        kept = clients - 2 * out
        ordered = updates if not out else tree.map(lambda leaf: leaf.sort(dim=0).values[out : clients - out], updates)
        return tree.weighted_mean(ordered, [1.0] * kept)
