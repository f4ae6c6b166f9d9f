"""Coordinate-wise median of the updates (Yin, Chen, Ramchandran and Bartlett, ICML 2018, Definition 1).

Of an even number of clients, the mean of the two middle values. Clients count alike, whatever agg.weights says: a
hostile client may claim any number of samples.
"""

from dataclasses import dataclass
from typing import ClassVar

from torch import Tensor

from cfl.contract import LocalRegularizer, RoundInfo
from cfl.core import Tree, plugins, tree
from cfl.methods.regularizers.stacks import median


@plugins.local.register("median")
@dataclass(frozen=True)
class Median(LocalRegularizer):
    """The median of the clients' updates in each coordinate (Yin et al., 2018)."""

    source: ClassVar[str] = "Yin et al., ICML 2018, Definition 1"
    per_sample: ClassVar[bool] = True
    decides: ClassVar[str] = "how updates are combined"

    def aggregate(self, updates: Tree, weights: Tensor, info: RoundInfo) -> Tree:
        return tree.map(median, updates)
