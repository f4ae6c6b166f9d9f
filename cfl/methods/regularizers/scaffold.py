"""SCAFFOLD (Karimireddy et al., 2020, Algorithm 1, option II): control variates cancel the drift of the clients.

A client adds c - c_i to its gradients. After training, c_i becomes its mean gradient of the round, which it computes
from the distance that its model moved. The server keeps c, the mean of all clients' c_i; those of clients that have
not yet taken part are 0.
"""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, ClassVar

import torch

from cfl.contract import Ctx, Gathers, LocalRegularizer, RoundInfo
from cfl.core import Tree, plugins, tree
from cfl.methods.regularizers.fednova import effective_steps
from cfl.models import Model


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
            return "it computes gradients from the distance that SGD moved the model; set local.optimizer=sgd"
        return None

    def init_client(self, params: Tree, model: Model) -> Tree:
        return {name: torch.zeros_like(leaf) for name, leaf in params.items() if model.is_parameter(name)}

    def init_shared(self, params: Tree, model: Model) -> Tree:
        return self.init_client(params, model)

    def provide(self, own: Tree, info: RoundInfo) -> Tree:
        return own

    def adjust(self, grads: Tree, params: Tree, ctx: Ctx) -> Tree:
        return {name: grad - ctx.state[name] + ctx.sent[name] for name, grad in grads.items()}  # Algorithm 1, line 10

    def finish(self, params: Tree, ctx: Ctx, steps: int) -> tuple[Tree, Tree]:
        length = effective_steps(steps, ctx.momentum) * ctx.lr
        state = dict(ctx.state)
        for name, param in params.items():
            if name in state:  # line 12, option II; lent terms stay out of the steps
                correction = 0.0 if ctx.lent else state[name] - ctx.sent[name]
                state[name] = correction + (ctx.shared["params"][name] - param) / length
        return tree.sub(state, ctx.state), state

    def server_step(self, step: Tree, own: Tree, gathered: Tree, params: Tree, info: RoundInfo) -> tuple[Tree, Tree]:
        return step, tree.add(own, tree.scale(gathered, 1 / info.owners))  # line 17
