"""EWC+FL: elastic weight consolidation at each client (Kirkpatrick et al., PNAS 2017; FOT, appendix F.2).

At the end of task t a client computes the diagonal of the empirical Fisher matrix at the global model, per sample:
    F_i,t = 1/n sum_samples (d log p(y | x) / d theta)^2
(the square of a batch's mean gradient is a different, smaller quantity). In later tasks it trains on
    CE + lambda/2 sum_{s < t} F_i,s (theta - theta_s)^2            (eq. 3).
The gradient of the penalty is lambda F (theta - anchor). It needs two trees for any number of tasks: F = sum_s F_i,s,
and the weighted mean of the weights, anchor = sum_s F_i,s theta_s / F.

FOT does not say whether its lambda multiplies 1 or 1/2 (`half`), nor whether F is clipped (`max_fisher`). With the 1/2,
plain SGD diverges if lr lambda F > 2. So F is limited to 1 / (lr lambda) by default, without the 1/2 to half of that:
the penalty alone then moves no weight beyond its anchor. The head of a task does not train in later tasks, so it has no
Fisher.
"""

from dataclasses import dataclass
from typing import ClassVar, Literal

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.nn.modules.batchnorm import _BatchNorm

from cfl.contract import Client, Ctx, GradFn, Phase, RoundInfo, Server, Strategy, TreesByOwner, with_consolidation
from cfl.core import ConfigError, Tree, option, plugins, tree
from cfl.models import Model
from cfl.models.per_sample import squared_gradients


@plugins.strategies.register("ewc")
@dataclass(frozen=True)
class EWC(Strategy):
    """Elastic weight consolidation at each client: important weights change little (Kirkpatrick et al., 2017)."""

    source: ClassVar[str] = "Kirkpatrick et al., PNAS 2017, eq. 3; FOT, appendix F.2"
    sends: ClassVar[str] = Strategy.sends

    strength: float = option(
        40.0, "lambda; FOT: 40 for MNIST, 20 CIFAR-100, 1 5-Datasets, 0.01 Mini-ImageNet", source="F.2", at_least=0.0,
        steep="local",
    )  # fmt: skip
    half: bool = option(True, "penalty lambda / 2 F d^2; false: lambda F d^2", source="eq. 3")
    max_fisher: float | Literal["auto"] | None = option(
        "auto", "upper limit of F's entries in the penalty; auto: half of what is stable at the learning rate; "
        "none: no limit", source="ours; the paper has none", above=0.0, steep="local",
    )  # fmt: skip

    def init_server(self, params: Tree, model: Model) -> Server:
        norms = [layer for layer in model.module.modules() if isinstance(layer, _BatchNorm)]
        if any(layer.running_mean is None for layer in norms):
            raise ConfigError(
                "'ewc' takes per-sample gradients, and a single sample has no batch statistics: "
                "set model.norm_stats=per_task or model.norm_stats=running"
            )
        return {}

    def plan(self, task: int, tasks: int, rounds: int) -> list[Phase]:
        return with_consolidation(task, tasks, rounds)

    def around(self, grad_fn: GradFn) -> GradFn:
        """Add the gradient of eq. 3's penalty wherever a gradient is taken, even at other weights than the client's.

        In closed form, because automatic differentiation would read the trees many times.
        """
        scale = self.strength if self.half else 2 * self.strength

        def penalised(params: Tree, ctx: Ctx) -> Tree:
            grads = dict(grad_fn(params, ctx))
            limit = 1 / max(ctx.lr * scale, 1e-30) if self.max_fisher == "auto" else self.max_fisher
            for name in (name for name in grads if f"fisher/{name}" in ctx.state):
                fisher, away = ctx.state[f"fisher/{name}"], params[name] - ctx.state[f"anchor/{name}"]
                if limit is not None:
                    fisher = fisher.clamp(max=limit)
                grads[name] = grads[name].addcmul(fisher, away, value=scale)  # of eq. 3
            return grads

        return penalised

    def work(
        self, params: Tree, client: Client, shared: TreesByOwner, state: Tree, info: RoundInfo
    ) -> tuple[Tree, Tree]:
        """Add this task's Fisher and weights to the client's sum F and weighted mean. Upload nothing."""
        model = info.model
        still = {*info.frozen, *(model.head(info.task) if model.multi_head and not model.growing else ())}
        names = [name for name in model.trainable(info.task) if name not in still]
        new = dict(state)
        for name, fisher in self.importance(names, params, client, info).items():
            old = state.get(f"anchor/{name}", params[name])
            total = new[f"fisher/{name}"] = state.get(f"fisher/{name}", 0) + fisher
            share = torch.where(total > 0, fisher / total, 0.0)
            new[f"anchor/{name}"] = old + share * (params[name] - old)
        return {}, new

    def importance(self, names: list[str], params: Tree, client: Client, info: RoundInfo) -> Tree:
        """F of `names`: mean over the client's samples of the squared gradients of log p(y | x), y its labels."""
        model = info.model

        def loss(logits: Tensor, y: Tensor) -> Tensor:
            own = model.among(logits, info.task) if info.masked and model.growing else logits
            return F.cross_entropy(own, y, reduction="none")

        parts = [
            squared_gradients(model, params, names, loss, batch.x, batch.y, info.task) for batch in client.batches(256)
        ]
        return tree.map(lambda *sums: torch.stack(sums).sum(0) / len(client), *parts)
