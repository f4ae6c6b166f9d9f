"""FedNova (Wang et al., 2020, section 4): normalised averaging, so that more local steps give a client no more weight.

Client i makes tau_i steps, which move its model by a_i times a mean gradient. It sends a_i, and its update divided by
a_i. The server's step is tau_eff = sum_i p_i a_i times the mean of these updates. With equal a_i this is FedAvg.

FedSOL's code also subtracts a client's last direction from its gradients ("ccvr"), but never updates the server's part
of that correction. The failures that FedSOL reports for FedNova come with this code. The correction is left out here.
"""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, ClassVar

import torch

from cfl.contract import Ctx, LocalRegularizer, RoundInfo
from cfl.core import Tree, plugins


def effective_steps(steps: int, momentum: float) -> float:
    """a_i of SGD with heavy-ball momentum (section 4.1): equal gradients g move the model by a_i lr g in all.

    Without momentum, and for Adam, for which the paper has no weights, it is the number of steps.
    """
    return (steps - momentum * (1 - momentum**steps) / (1 - momentum)) / (1 - momentum)


@plugins.local.register("fednova")
@dataclass(frozen=True)
class FedNova(LocalRegularizer):
    """Normalised averaging: each update is divided by its effective number of local steps (Wang et al., 2020)."""

    source: ClassVar[str] = "Wang et al., NeurIPS 2020, section 4"
    sends: ClassVar[str] = "the number of its local steps, every round"
    decides: ClassVar[str] = "the length of the server's step"

    def refuses(self, run: Mapping[str, Any]) -> str | None:
        if run["dp"]["level"] == "client" and run["dp"]["protect"] == "all":
            return "dp.level=client clips its count of steps along with the update, and adds noise to both"
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
