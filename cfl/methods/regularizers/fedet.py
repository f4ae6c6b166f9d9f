"""Fed-ET (Cho et al., 2022, section 3): a weighted consensus of the clients' predictions, and what dissenters say.

On a public sample, client k weighs v_k / sum of v, v_k being the variance of its prediction over the classes: a flat
prediction is an unsure one. The student learns the consensus' label, and with weight lambda the weighted prediction of
the clients that predict another class. Predictions are probabilities, or logits as in code by others (`opinions`): then
a client whose logits are large outvotes clients that are as sure. The server sees each client's logits. Here all
clients have the same network.
"""

from dataclasses import dataclass
from typing import ClassVar, Literal

import torch
import torch.nn.functional as F
from torch import Tensor

from cfl.contract.losses import divergence
from cfl.contract.regularizer import Gathers
from cfl.core import plugins
from cfl.core.options import option
from cfl.core.tree import Tree
from cfl.methods.regularizers.feddf import Distillation, Loss


@plugins.local.register("fedet")
@dataclass(frozen=True)
class FedET(Distillation):
    """Weighted consensus distillation with a diversity term (Cho et al., 2022)."""

    source: ClassVar[str] = "Cho et al., IJCAI 2022, section 3"
    gathers: ClassVar[Gathers] = "stack"

    temperature: float = option(1.0, "temperature of the diversity term", source="section 3", above=0.0)
    diversity: float = option(0.05, "weight of the diversity term, lambda", source="section 4", at_least=0.0)
    opinions: Literal["probabilities", "logits"] = option(
        "probabilities", "what is weighed and averaged", source="ours", choices=("probabilities", "logits")
    )

    def lesson(self, average: Tree, gathered: Tree, params: Tree) -> tuple[Loss, Tree]:
        logits, softened = gathered["logits"], self.opinions == "probabilities"
        labels, dissent, dissenting = consensus(logits.softmax(dim=2) if softened else logits)
        taught = dissent.clamp(min=torch.finfo(dissent.dtype).tiny).log() if softened else dissent

        def loss(rows: Tensor, logits: Tensor, at: Tree) -> Tensor:
            apart = divergence(taught[rows], logits, self.temperature) * dissenting[rows]
            return F.cross_entropy(logits, labels[rows]) + self.diversity * apart.mean()

        return loss, {}


def consensus(said: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """Of predictions (clients, samples, classes): the label of the weighted mean (samples,), the weighted mean of those
    that predict another (samples, classes), and 1.0 where there are such clients, else 0.0 (samples,)."""
    sure = said.var(dim=2, correction=0)
    label = (sure[:, :, None] * said).sum(dim=0).argmax(dim=1)
    against = sure * (said.argmax(dim=2) != label)
    weight = against.sum(dim=0)
    dissent = (against[:, :, None] * said).sum(dim=0) / weight.clamp(min=1e-12)[:, None]
    return label, dissent, (weight > 0).to(said)
