"""FedAvgM (Hsu, Qi and Brown, 2019): momentum of the server's step.

v <- momentum v + mean of the clients' w_global - w_i, and the server's step is v. `server_step` takes the last turn, so
the momentum is of the step that all other rules have made; under FOT the whole of v is then projected. Each task starts
with v = 0.
"""

from dataclasses import dataclass
from typing import ClassVar

import torch

from cfl.contract import LocalRegularizer, RoundInfo
from cfl.core import Tree, option, plugins
from cfl.models import Model


@plugins.local.register("fedavgm")
@dataclass(frozen=True)
class FedAvgM(LocalRegularizer):
    """Momentum of the server's steps (Hsu et al., 2019)."""

    source: ClassVar[str] = "Hsu et al., 2019"
    per_sample: ClassVar[bool] = True
    turn: ClassVar[int] = 2

    momentum: float = option(
        0.9, "share of the previous step in the next one", at_least=0.0, at_most=1.0, steep="server"
    )

    def init_shared(self, params: Tree, model: Model) -> Tree:
        return {name: torch.zeros_like(leaf) for name, leaf in params.items() if model.is_parameter(name)}

    def server_step(self, step: Tree, own: Tree, gathered: Tree, params: Tree, info: RoundInfo) -> tuple[Tree, Tree]:
        own = {name: self.momentum * v + step[name] if name in step else v for name, v in own.items()}
        return {name: own.get(name, leaf) for name, leaf in step.items()}, own
