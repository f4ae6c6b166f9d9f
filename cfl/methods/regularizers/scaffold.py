"""SCAFFOLD (Karimireddy et al., 2020, Algorithm 1, option II): control variates cancel the drift of the clients.

A client adds c - c_i to its gradients; afterwards c_i is its mean gradient of this round, which it takes from how far
its model moved. The server keeps c, the mean of all clients' c_i, those that have not yet taken part (0) included.
"""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, ClassVar

import torch

from cfl.contract.context import Ctx
from cfl.contract.regularizer import Gathers, LocalRegularizer
from cfl.contract.rounds import RoundInfo
from cfl.core import plugins, tree
from cfl.core.tree import Tree
from cfl.methods.regularizers.fednova import effective_steps
from cfl.models.handle import Model


@plugins.local.register("scaffold")
@dataclass(frozen=True)
class Scaffold(LocalRegularizer):
    """Control variates of server and clients against client drift (Karimireddy et al., 2020)."""

    source: ClassVar[str] = "Karimireddy et al., ICML 2020, Algorithm 1, option II"
    sends: ClassVar[str] = "the change of its control variate, every round"
    per_sample: ClassVar[bool] = True
    gathers: ClassVar[Gathers] = "sum"
    lends: ClassVar[bool] = True

    def refuses(self, run: Mapping[str, Any]) -> str | None:
        if run["local"]["optimizer"] != "sgd":
            return "it reads gradients from how far SGD moved the model; set local.optimizer=sgd"
        return None

    def init_client(self, params: Tree, model: Model) -> Tree:
        return _zeros(params, model)

    def init_shared(self, params: Tree, model: Model) -> Tree:
        return _zeros(params, model)

    def provide(self, own: Tree, info: RoundInfo) -> Tree:
        return own

    def adjust(self, grads: Tree, params: Tree, ctx: Ctx) -> Tree:
        return {name: grad - ctx.state[name] + ctx.sent[name] for name, grad in grads.items()}  # Algorithm 1, line 10

    def finish(self, params: Tree, ctx: Ctx, steps: int) -> tuple[Tree, Tree]:
        length = effective_steps(steps, ctx.momentum) * ctx.lr
        state = dict(ctx.state)
        for name, param in params.items():
            if name in state:  # line 12, option II; where another took its terms, the drift is the gradient itself
                known = 0.0 if ctx.lent else state[name] - ctx.sent[name]
                state[name] = known + (ctx.shared["params"][name] - param) / length
        return tree.sub(state, ctx.state), state

    def server_step(self, step: Tree, own: Tree, gathered: Tree, params: Tree, info: RoundInfo) -> tuple[Tree, Tree]:
        return step, tree.add(own, tree.scale(gathered, 1 / info.owners))  # line 17


def _zeros(params: Tree, model: Model) -> Tree:
    return {name: torch.zeros_like(leaf) for name, leaf in params.items() if model.is_parameter(name)}
