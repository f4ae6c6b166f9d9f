"""FedNova (Wang et al., 2020, section 4): clients that make more local steps do not pull the global model further.

Client i made tau_i steps, which move its model by a_i times a mean gradient. It sends its update over a_i, and a_i;
the server steps by tau_eff = sum_i p_i a_i times the mean of what was sent. With equal a_i this is FedAvg.

FedSOL's code subtracts a client's last direction from its gradients besides ("ccvr"), and never updates the server's
share of that correction: the failures that it reports for FedNova come with it. It is not done here.
"""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, ClassVar

import torch

from cfl.contract.context import Ctx
from cfl.contract.regularizer import LocalRegularizer
from cfl.contract.rounds import RoundInfo
from cfl.core import plugins
from cfl.core.tree import Tree


def effective_steps(steps: int, momentum: float) -> float:
    """a_i of SGD with heavy-ball momentum (section 4.1): by how many times lr g equal gradients g move the model.

    Of an optimiser without momentum, or of Adam, for which the paper has no weights, it is the number of steps.
    """
    return (steps - momentum * (1 - momentum**steps) / (1 - momentum)) / (1 - momentum)


@plugins.local.register("fednova")
@dataclass(frozen=True)
class FedNova(LocalRegularizer):
    """Normalised averaging: an update counts per local step that it took (Wang et al., 2020)."""

    source: ClassVar[str] = "Wang et al., NeurIPS 2020, section 4"
    sends: ClassVar[str] = "the number of its local steps, every round"
    decides: ClassVar[str] = "the length of the server's step"

    def refuses(self, run: Mapping[str, Any]) -> str | None:
        if run["dp"]["level"] == "client" and run["dp"]["protect"] == "all":
            return "dp.level=client clips and blurs its count of steps along with the update"
        return None

    def finish(self, params: Tree, ctx: Ctx, steps: int) -> tuple[Tree, Tree]:
        like = next(iter(params.values()))
        own = torch.as_tensor(effective_steps(steps, ctx.momentum), dtype=like.dtype, device=like.device)
        return {"steps": own}, ctx.state

    def send(self, update: Tree, ctx: Ctx, steps: int) -> Tree:
        own = effective_steps(steps, ctx.momentum)
        return {name: leaf / own if ctx.model.is_parameter(name) else leaf for name, leaf in update.items()}

    def server_step(self, step: Tree, own: Tree, gathered: Tree, params: Tree, info: RoundInfo) -> tuple[Tree, Tree]:
        steps = gathered["steps"]  # tau_eff
        return {name: leaf * steps if info.model.is_parameter(name) else leaf for name, leaf in step.items()}, own
