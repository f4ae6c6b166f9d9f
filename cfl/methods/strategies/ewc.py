"""EWC+FL: elastic weight consolidation at each client (Kirkpatrick et al., PNAS 2017; FOT, appendix F.2).

At the end of task t a client computes the diagonal of the empirical Fisher matrix at the global model, by samples:
    F_i,t = 1/n sum_samples (d log p(y | x) / d theta)^2
(the square of a batch's mean gradient is another, smaller thing). Later it trains on
    CE + lambda/2 sum_{s < t} F_i,s (theta - theta_s)^2            (eq. 3),
whose gradient lambda F (theta - anchor) needs two trees, however many tasks there were: F = sum_s F_i,s, and the mean
weights, anchor = sum_s F_i,s theta_s / F.

FOT does not say whether its lambda stands before 1 or 1/2 (`half`), nor whether F is clipped (`max_fisher`). With the
1/2, plain SGD diverges where lr lambda F > 2; a limit of 1 / (lr lambda) prevents it. Heads of single tasks do not
train in later ones, so they have no Fisher.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import partial
from typing import ClassVar

import torch
import torch.nn.functional as F
from torch.nn.modules.batchnorm import _BatchNorm

from cfl.contract.context import Ctx
from cfl.contract.data import Client
from cfl.contract.regularizer import GradFn
from cfl.contract.rounds import Phase, RoundInfo, Server, TreesByOwner
from cfl.contract.strategy import Strategy, with_consolidation
from cfl.core import plugins, tree
from cfl.core.errors import ConfigError
from cfl.core.options import option
from cfl.core.tree import Tree
from cfl.models.handle import Model
from cfl.models.per_sample import squared_gradients


@plugins.strategies.register("ewc")
@dataclass(frozen=True)
class EWC(Strategy):
    """Elastic weight consolidation at each client: weights that mattered stay near (Kirkpatrick et al., 2017)."""

    source: ClassVar[str] = "Kirkpatrick et al., PNAS 2017, eq. 3; FOT, appendix F.2"

    strength: float = option(
        40.0, "lambda; FOT: 40 for MNIST, 20 CIFAR-100, 1 5-Datasets, 0.01 Mini-ImageNet", source="F.2", at_least=0.0
    )
    half: bool = option(True, "penalty lambda / 2 F d^2; false: lambda F d^2", source="eq. 3")
    max_fisher: float | None = option(None, "the penalty takes no entry of F for more; none: no limit", above=0.0)

    def init_server(self, params: Tree, model: Model) -> Server:
        norms = [layer for layer in model.module.modules() if isinstance(layer, _BatchNorm)]
        if any(layer.running_mean is None for layer in norms):
            raise ConfigError(
                "'ewc' takes gradients sample by sample, and a sample has no statistics of a batch: "
                "set model.norm_stats=per_task or model.norm_stats=running"
            )
        return {}

    def plan(self, task: int, tasks: int, rounds: int) -> list[Phase]:
        return with_consolidation(task, tasks, rounds)

    def around(self, grad_fn: GradFn) -> GradFn:
        """Add eq. 3's gradient wherever one is taken; automatic differentiation would read the trees many times."""
        scale = self.strength if self.half else 2 * self.strength

        def held(params: Tree, ctx: Ctx) -> Tree:
            grads = dict(grad_fn(params, ctx))
            for name in (name for name in grads if f"fisher/{name}" in ctx.state):
                fisher, away = ctx.state[f"fisher/{name}"], params[name] - ctx.state[f"anchor/{name}"]
                if self.max_fisher is not None:
                    fisher = fisher.clamp(max=self.max_fisher)
                grads[name] = grads[name].addcmul(fisher, away, value=scale)
            return grads

        return held

    def work(
        self, params: Tree, client: Client, shared: TreesByOwner, state: Tree, info: RoundInfo
    ) -> tuple[Tree, Tree]:
        """Add this task's Fisher and weights to the client's sum F and mean. Nothing goes up."""
        model = info.model
        heads = model.head(info.task) if model.multi_head else ()
        names = [name for name in model.trainable(info.task) if name not in heads]
        new = dict(state)
        for name, fisher in self.importance(names, params, client, info).items():
            old = state.get(f"anchor/{name}", params[name])
            total = new[f"fisher/{name}"] = state.get(f"fisher/{name}", 0) + fisher
            share = torch.where(total > 0, fisher / total, 0.0)
            new[f"anchor/{name}"] = old + share * (params[name] - old)
        return {}, new

    def importance(self, names: list[str], params: Tree, client: Client, info: RoundInfo) -> Tree:
        """F by `names`: mean over a client's samples of the squared gradients of log p(y | x); y are their labels."""
        loss = partial(F.cross_entropy, reduction="none")
        parts = [
            squared_gradients(info.model, params, names, loss, batch.x, batch.y, info.task)
            for batch in client.batches(256)
        ]
        return tree.map(lambda *sums: torch.stack(sums).sum(0) / len(client), *parts)
