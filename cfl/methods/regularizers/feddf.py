"""FedDF (Lin et al., 2020, Algorithm 1): distillation of the ensemble of the clients' models into their average.

Each client sends its logits on public inputs beside its update; the server needs only their sum. The student starts
from the averaged model and minimises T^2 KL(softmax(Z / T) || softmax(z / T)), where Z are the mean logits of the
clients and z those of the student.
"""

from dataclasses import dataclass
from typing import ClassVar

from torch import Tensor

from cfl.contract.losses import divergence
from cfl.core import Tree, plugins
from cfl.methods.regularizers.distillation import Distillation, Loss


@plugins.local.register("feddf")
@dataclass(frozen=True)
class FedDF(Distillation):
    """Ensemble distillation on the server (Lin et al., 2020)."""

    source: ClassVar[str] = "Lin et al., NeurIPS 2020, Algorithm 1"
    per_sample: ClassVar[bool] = True

    def lesson(self, average: Tree, gathered: Tree, params: Tree) -> tuple[Loss, Tree]:
        teacher = gathered["logits"] / gathered["clients"]
        return lambda rows, logits, at: self.knowledge(teacher[rows], logits), {}

    def knowledge(self, teacher: Tensor, logits: Tensor) -> Tensor:
        """T^2 KL(teacher || student), the mean over samples (). Both arguments are logits (b, classes)."""
        return self.temperature**2 * divergence(teacher, logits, self.temperature).mean()
