"""GPM+FL: gradient projection memory at each client (Saha et al., ICLR 2021; as a baseline: FOT, appendix F.2).

At the end of task t every client with data of the task, or a cohort of them (`participants`), extends its own basis O
of each layer by the leading left singular vectors of the residual X* = X - O O^T X of its layer inputs X (GPM, eq. 8):
the fewest for which the basis covers the share `threshold` of |X|^2 (eq. 9). In later tasks the client projects its
update before the upload, delta <- delta - (delta O) O^T, or every gradient, as centralised GPM does (`apply`). A mean
of updates that are orthogonal to different bases is orthogonal to none of them, so the method fails if the inputs of
clients have little in common, or if few clients have bases. With `apply=gradient` the guarantee holds for plain SGD, as
in GPM's paper: weight decay and Adam act after the projection.

Paper and code differ in the first task, where the code takes one direction too few (`first_rank_bug`).
"""

from dataclasses import dataclass, replace
from typing import ClassVar

import torch
from torch import Tensor

from cfl.contract import Client, Ctx, Phase, RoundInfo, Server, Strategy, TreesByOwner, with_consolidation
from cfl.core import Tree, option, plugins, tree
from cfl.methods.subspace import basis as bases
from cfl.methods.subspace.input_sums import layer_grams
from cfl.methods.subspace.projection import covered, project, project_step
from cfl.methods.subspace.sketch import Gram
from cfl.methods.subspace.task_inference import PHASE, OptionalTaskInference
from cfl.models import Model


@plugins.strategies.register("gpm")
@dataclass(frozen=True)
class GPM(OptionalTaskInference, Strategy):
    """Gradient projection memory at each client: projects updates off its own earlier inputs (Saha et al., 2021)."""

    source: ClassVar[str] = "Saha et al., ICLR 2021, Algorithm 1; FOT, appendix F.2"
    sends: ClassVar[str] = (
        "its update w_global - w_local, every round; with strategy.infer_tasks=true and scenario=class, after each "
        "task the sum of second moments of the classifier's inputs, and the number of samples"
    )
    hard_constraint: ClassVar[bool] = True

    threshold: float = option(0.95, "share of input energy to protect", source="GPM, eq. 9", above=0.0, at_most=1.0)
    threshold_step: float = option(0.0, "added to the threshold after each task", source="GPM's code", at_least=0.0)
    apply: str = option("update", "tensor to project", source="FOT, F.2; GPM: gradient", choices=("update", "gradient"))
    participants: str = option(
        "all",
        "clients that extend their bases after a task",
        source="FOT, F.2; as FOT's code: sampled",
        choices=("all", "sampled"),
    )
    samples: int = option(0, "samples per client and task for the bases (0: all)", source="GPM's code", at_least=0)
    bias: str = option("augment", "biases; GPM's networks have none", choices=("augment", "free", "freeze"))
    norm_affine: str = option(
        "freeze", "norm weights and biases after the first task", source="GPM's code", choices=("freeze", "free")
    )
    first_rank_bug: bool = option(False, "one direction fewer in the first task", source="GPM's code")

    def plan(self, task: int, tasks: int, rounds: int) -> list[Phase]:
        phases = with_consolidation(task, tasks, rounds)
        if self.participants == "sampled":
            phases = [replace(phase, cohort="sampled") for phase in phases]
        return [*phases, *self.feature_phases()]

    def frozen(self, task: int, model: Model) -> frozenset[str]:
        biases = {layer.bias for layer in model.layers if layer.bias and self.bias == "freeze"}
        norms = set(model.norms) if self.norm_affine == "freeze" else set()
        return super().frozen(task, model) | model.old_head(task) | (biases | norms if task else set())

    def notes(self, model: Model) -> list[str]:
        return covered(model, model.layers, self.frozen(1, model), self._augment) + self.inference_notes(model)

    @property
    def steps_see_state(self) -> bool:
        return self.apply == "gradient"

    def adjust(self, grads: Tree, params: Tree, ctx: Ctx) -> Tree:
        if self.apply == "update":
            return grads
        return project(grads, tree.part(ctx.state, "basis"), ctx.model.layers, self._augment)

    def finish(self, params: Tree, ctx: Ctx, steps: int) -> tuple[Tree, Tree]:
        if self.apply == "update":
            layers = ctx.model.layers
            params = project_step(ctx.shared["params"], params, tree.part(ctx.state, "basis"), layers, self._augment)
        return super().finish(params, ctx, steps)

    def work(
        self, params: Tree, client: Client, shared: TreesByOwner, state: Tree, info: RoundInfo
    ) -> tuple[Tree, Tree]:
        """Extend the client's bases by directions of its layer inputs; in phase "features", send sums over features."""
        if info.phase.name == PHASE:
            return self.feature_sums(params, client, info), state
        sums = layer_grams(params, client, info, self.samples, known=tree.part(state, "basis"), augment=self._augment)
        stored = {layer.name: params[layer.weight].dtype for layer in info.model.layers}
        return {}, {f"basis/{name}": self._extended(sums[name], info.task, dtype) for name, dtype in stored.items()}

    def absorb(self, server: Server, mean: TreesByOwner, info: RoundInfo, lr: float) -> Server:
        new = super().absorb(server, mean, info, lr)
        return {**new, **self.with_core(server, mean.get("work", {}), info)}

    def _extended(self, inputs: Gram, task: int, dtype: torch.dtype) -> Tensor:
        """The inputs' basis (d, k) with the new directions of a layer (GPM, eq. 8-9); dtype: of the stored basis."""
        basis, (full, residual) = inputs.basis, inputs.energies.tolist()
        vectors, squared = inputs.spectrum()  # eq. 8
        # inputs that the basis covers leave its rounding errors from storage in `dtype`, which are no directions
        rounding = len(basis) * torch.finfo(dtype).eps ** 2 * full
        squared = torch.where(squared > rounding, squared, 0.0)
        threshold = min(1.0, self.threshold + task * self.threshold_step)
        rank = bases.choose_rank(squared, 1 - residual / full if full > 0 else 0.0, threshold)  # eq. 9
        if self.first_rank_bug and task == 0:
            rank = max(rank - 1, 0)
        return bases.expand(basis, vectors[:, :rank]).to(dtype)

    @property
    def _augment(self) -> bool:
        return self.bias == "augment"
