"""LoRM: adapters merged in closed form, one factor at a time (Salami et al., ICLR 2025, arXiv 2410.17961).

RegMean (Jin et al., ICLR 2023): the linear layer W whose outputs are nearest to those of the clients' layers W_i, for
the clients' own inputs X_i (d, n_i), minimises sum_i |W X_i - W_i X_i|^2. With G_i = X_i X_i^T
    W = (sum_i W_i G_i) (sum_i G_i)^-1,
after off-diagonal entries of each G_i are multiplied by gamma. Both sums go through secure aggregation.
LoRM: for W_i = W_0 + B_i A_i this has no unique solution in A and B. So a round trains only B, with one A for all
clients, and the next round only A, with one B:
    B = (sum_i B_i G_i') (sum_i G_i')^-1, G_i' = A G_i A^T;    A = (sum_i A_i G_i) (sum_i G_i)^-1.
Each is RegMean for one factor as a layer with inputs of its own: A x for B, and x for A. As B starts at 0, where A has
no gradient, each task begins with B. Without adapters all layers train in every round, which is RegMean.

Clients send G_i (W - W_i)^T for the broadcast W in place of G_i W_i^T: where no client has inputs, W then stays. All
other parameters, such as biases and heads of tasks, are averaged.

Differences: gamma acts on the Gram matrix of the factor's own inputs, G_i in rounds of A and G_i' in rounds of B. The
authors' code shrinks G_i, and then computes A G_i A^T; so in rounds of B the two agree with gamma=1 only. The paper
sends the diagonals of G_i alone; gamma=0 does so in rounds of A. The paper has a new pair for each task, and merges all
pairs after the last; here one pair learns all tasks. The paper has a new head for each task; its code merges heads by
their Gram matrices, here they are averaged.
"""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, ClassVar

import torch
from torch import Tensor

from cfl.contract import Client, Ctx, Phase, RoundInfo, Server, Strategy, TreesByOwner
from cfl.core import Tree, option, plugins, warn
from cfl.methods.subspace.input_sums import layer_grams
from cfl.methods.subspace.sketch import pack, unpack
from cfl.models import Layer, Model, adapters
from cfl.models.layers import KINDS

# Directions with less of the largest energy are no inputs: rounding the uploads to float32 moves all energies by about
# 1e-7 of the largest.
RESOLUTION = 1e-6


@plugins.strategies.register("lorm")
@dataclass(frozen=True)
class LoRM(Strategy):
    """Merges layers so that their outputs are nearest to the clients' layers', one adapter's factor a round (2025)."""

    source: ClassVar[str] = "Salami et al., ICLR 2025; Jin et al., ICLR 2023"
    sends: ClassVar[str] = (
        "every round, for each layer that trains, the Gram matrix of its inputs and the layer's update times it; the "
        "update w_global - w_local of all other parameters"
    )
    averaged: ClassVar[bool] = False

    gamma: float = option(0.9, "factor on the off-diagonal entries of Gram matrices; 0: diagonals alone",
                          source="RegMean: 0.9; LoRM: 0", at_least=0.0, at_most=1.0)  # fmt: skip
    samples: int = option(0, "samples per client and round for the Gram matrices (0: all)", at_least=0)

    def refuses(self, run: Mapping[str, Any]) -> str | None:
        noisy = run["dp"]["level"] != "none"
        return "noise in Gram matrices would decide their inverses; set dp.level=none" if noisy else None

    def plan(self, task: int, tasks: int, rounds: int) -> list[Phase]:
        return [Phase("train", rounds, work=True)]

    def notes(self, model: Model) -> list[str]:
        if not model.layers:
            warn(f"apart from heads, the model has no layer to merge ({KINDS}): 'lorm' is FedAvg")
            return []
        merged = ", ".join(layer.weight for layer in model.layers)
        return [f"merged by the Gram matrices of their inputs, whatever agg.weights: {merged}"]

    def paused(self, info: RoundInfo) -> frozenset[str]:
        return frozenset(pair[info.trained % 2] for pair in adapters.pairs(info.model.module))  # A in the first round

    def finish(self, params: Tree, ctx: Ctx, steps: int) -> tuple[Tree, Tree]:
        update, state = super().finish(params, ctx, steps)
        merged = {layer.weight for layer in ctx.model.layers}
        return {name: leaf for name, leaf in update.items() if name not in merged}, state

    def work(
        self, params: Tree, client: Client, shared: TreesByOwner, state: Tree, info: RoundInfo
    ) -> tuple[Tree, Tree]:
        """G_i and G_i (W - W_i)^T of each layer that has trained."""
        up: Tree = {}
        layers = _training(info)
        for layer, sums in zip(layers, layer_grams(params, client, info, self.samples, layers=layers).values()):
            gram = self.gamma * sums.matrix + (1 - self.gamma) * sums.matrix.diag().diag()
            update = _matrix(shared["params"], layer) - _matrix(params, layer)
            up[f"gram/{layer.name}"] = pack(gram).to(update)
            up[f"update/{layer.name}"] = (gram @ update.double().T).to(update)
        return up, state

    def absorb(self, server: Server, mean: TreesByOwner, info: RoundInfo, lr: float) -> Server:
        new = super().absorb(server, mean, info, lr)
        params, sums = dict(new["params"]), mean.get("work", {})
        for layer in _training(info) if sums else ():
            before = _matrix(params, layer)
            update = merged_update(sums[f"gram/{layer.name}"], sums[f"update/{layer.name}"])
            params[layer.weight] = layer.put(params[layer.weight], before - lr * update.to(before))
        return {**new, "params": params}


def merged_update(gram: Tensor, update: Tensor) -> Tensor:
    """W - W_new (outputs, d), float64: (sum G_i)^-1 sum G_i (W - W_i)^T, transposed, of least norm if it is not unique.

    gram: packed sum of G_i (d (d + 1) / 2,); update: sum of G_i (W - W_i)^T (d, outputs).
    """
    inverse = torch.linalg.pinv(unpack(gram.double()), rtol=RESOLUTION, hermitian=True)
    return (inverse @ update.double()).T


def _training(info: RoundInfo) -> list[Layer]:
    return [layer for layer in info.model.layers if layer.weight not in info.frozen]


def _matrix(leaves: Tree, layer: Layer) -> Tensor:
    """A layer's weight (outputs, d)."""
    return leaves[layer.weight][layer.rows].flatten(1)
