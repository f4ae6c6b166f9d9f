"""Fed-ET (Cho et al., 2022, section 3): distillation of a weighted consensus of the clients and of dissenting clients.

On a public sample, client k has the weight v_k / sum of v, where v_k is the variance over the classes of its
prediction: a flat prediction is unsure. The student minimises the cross-entropy with the label of the consensus, plus
lambda times the divergence from the weighted mean prediction of the clients that predict another class.

Predictions are probabilities, or logits as in code by others (`opinions`). With logits, a client with large logits
outvotes clients that are as sure. The server sees each client's logits. All clients have the same network here.
"""

from dataclasses import dataclass
from typing import ClassVar, Literal

import torch
import torch.nn.functional as F
from torch import Tensor

from cfl.contract import Gathers
from cfl.contract.losses import divergence
from cfl.core import Tree, option, plugins
from cfl.methods.regularizers.distillation import Distillation, Loss


@plugins.local.register("fedet")
@dataclass(frozen=True)
class FedET(Distillation):
    """Weighted consensus distillation with a diversity term (Cho et al., 2022)."""

    source: ClassVar[str] = "Cho et al., IJCAI 2022, section 3"
    gathers: ClassVar[Gathers] = "stack"

    temperature: float = option(1.0, "temperature of the diversity term", source="section 3", above=0.0)
    diversity: float = option(0.05, "weight of the diversity term, lambda", source="section 4", at_least=0.0)
    opinions: Literal["probabilities", "logits"] = option(
        "probabilities", "form of the weighted predictions", source="ours", choices=("probabilities", "logits")
    )

    def lesson(self, average: Tree, gathered: Tree, params: Tree) -> tuple[Loss, Tree]:
        logits, softened = gathered["logits"], self.opinions == "probabilities"
        labels, dissent, dissenting = consensus(logits.softmax(dim=2) if softened else logits)
        teacher = dissent.clamp(min=torch.finfo(dissent.dtype).tiny).log() if softened else dissent

        def loss(rows: Tensor, logits: Tensor, at: Tree) -> Tensor:
            apart = divergence(teacher[rows], logits, self.temperature) * dissenting[rows]
            return F.cross_entropy(logits, labels[rows]) + self.diversity * apart.mean()

        return loss, {}


def consensus(predictions: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """The consensus on each sample, and the dissent from it. predictions: (clients, samples, classes).

    Returns the label of the weighted mean (samples,), the weighted mean of the clients that predict another class
    (samples, classes), and 1.0 for samples with such clients, else 0.0 (samples,).
    """
    variance = predictions.var(dim=2, correction=0)
    label = (variance[:, :, None] * predictions).sum(dim=0).argmax(dim=1)
    against = variance * (predictions.argmax(dim=2) != label)
    weight = against.sum(dim=0)
    dissent = (against[:, :, None] * predictions).sum(dim=0) / weight.clamp(min=1e-12)[:, None]
    return label, dissent, (weight > 0).to(predictions)
