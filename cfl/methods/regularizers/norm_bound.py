"""Norm bounding (Sun, Kairouz, Suresh and McMahan, 2019, "Can You Really Backdoor Federated Learning?").

Each update w_i is scaled down to the norm M:    w_i / max(1, |w_i| / M)
and the weighted mean of these is taken. Without a bound M is the median of the round's norms (our choice), running
statistics included in them. Ours, too, is the same bound on the uploads of a strategy's `work`, such as sketches: a
leaf of a client counts at most sketch_bound times the cohort's median size of this leaf, see `Strategy.sizes`.

With at=client each client scales its own update, so that it works with secure aggregation. A hostile client can leave
that out; the server would need a zero-knowledge proof of the range of the norm, as in RoFL (Lycklama et al., 2023) or
ACORN (Bell et al., 2023), which is not part of this package.
"""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, ClassVar

from torch import Tensor

from cfl.contract import Ctx, LocalRegularizer, RoundInfo
from cfl.core import ConfigError, Tree, option, plugins, tree
from cfl.methods.regularizers.stacks import along, rows


@plugins.local.register("norm_bound")
@dataclass(frozen=True)
class NormBound(LocalRegularizer):
    """The mean of updates, and the sum of sketches, of bounded norm (Sun et al., 2019)."""

    source: ClassVar[str] = "Sun et al., 2019, norm thresholding of updates"
    per_sample: ClassVar[bool] = True
    decides: ClassVar[str] = "how updates are combined"

    bound: float | None = option(None, "largest L2 norm of an update (M); null: the round's median", above=0.0)
    sketch_bound: float = option(
        1.0, "largest size of a leaf of a `work` upload, over the median of the cohort; at the server only", above=0.0
    )
    at: str = option(
        "server", "who scales down (client: for secure aggregation; a hostile client can leave it out)",
        choices=("server", "client"),
    )  # fmt: skip

    def __post_init__(self) -> None:
        if self.at == "client" and self.bound is None:
            raise ConfigError(
                "regularizer.norm_bound.at=client needs a fixed bound, as no client knows the others' norms: set "
                "regularizer.norm_bound.bound"
            )

    def refuses(self, run: Mapping[str, Any]) -> str | None:
        if self.bound is not None and "fednova" in run["regularizers"]:
            return "fednova divides updates by steps and multiplies their mean again, so a fixed bound limits no update"
        return None

    @property
    def sees_each(self) -> bool:
        return self.at == "server"

    def send(self, update: Tree, ctx: Ctx, steps: int) -> Tree:
        if self.at == "server" or self.bound is None:
            return update
        factor = _factors(rows(tree.stack([tree.floats(update)])).norm(dim=1), self.bound)[0]
        return tree.map(lambda leaf: leaf * factor.to(leaf) if leaf.is_floating_point() else leaf, update)

    def cap(self, uploads: Tree, sizes: Tree, info: RoundInfo) -> Tree:
        factors = {name: _factors(size, self.sketch_bound * size.quantile(0.5)) for name, size in sizes.items()}
        return {name: leaf * along(factors[name], leaf) for name, leaf in uploads.items()}

    def aggregate(self, updates: Tree, weights: Tensor, info: RoundInfo) -> Tree:
        norms = rows(updates).norm(dim=1)
        factors = _factors(norms, norms.quantile(0.5) if self.bound is None else self.bound)
        return tree.weighted_mean(tree.map(lambda leaf: leaf * along(factors, leaf), updates), weights.tolist())


def _factors(norms: Tensor, bound: Tensor | float) -> Tensor:
    """Factors (clients,) in [0, 1] that scale the norms (clients,) down to a bound."""
    return (bound / norms.clamp(min=1e-300)).clamp(max=1.0)
