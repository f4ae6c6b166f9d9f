"""FedProTIP: projection of gradients, and inference of the task at test time (Cha, Chen, Vikalo, arXiv 2509.21606).

Training. The server keeps one basis U (d, k) of earlier inputs for each layer and sends it to all clients. In every
local step after the first task a gradient loses its component in the basis, g <- g - (g U) U^T. Biases and the weights
of normalisation layers do not change after the first task. With scenario=class the loss is the cross-entropy over the
classes of the current task alone.

After each task but the last, a client takes its core basis of each layer from at most `samples` of its images: the
fewest leading left singular vectors V of its inputs X whose singular values S hold the share `threshold` of |X|^2. It
sends V S^2 V^T and |X|^2, so that sums are enough. The server extends U by the fewest leading directions of the sum's
residual with which U holds the share `threshold` of all clients' |X|^2. The old columns do not change. After each task,
the last one included, clients also send the second moments of their features, from which `infer_task` infers the task
of a test sample (`cfl.methods.subspace.task_inference`).

Differences from the authors' code. There, one client after another extends the shared basis by GPM's rule, which shows
each client the directions of those before it; the first task takes one direction too few; 512 columns of a layer's
inputs are drawn. Biases, norm weights and old rows of the head still decay there with local.weight_decay; here they
stay. The singular vectors are exact (the paper also has randomised ones). The guarantee of the projection holds for
plain SGD: weight decay, which the code applies after the projection, and Adam act outside of it.
"""

from dataclasses import dataclass
from typing import Any, ClassVar

from torch import Tensor

from cfl.contract import Client, Ctx, Phase, RoundInfo, Server, Strategy, TreesByOwner
from cfl.core import Tree, option, plugins
from cfl.methods.subspace import basis as bases
from cfl.methods.subspace.input_sums import layer_grams
from cfl.methods.subspace.projection import covered, project
from cfl.methods.subspace.sketch import pack, unpack
from cfl.methods.subspace.task_inference import TaskInference
from cfl.models import Model


@plugins.strategies.register("fedprotip")
@dataclass(frozen=True)
class FedProTIP(TaskInference, Strategy):
    """Projects gradients off earlier tasks' inputs, and infers the task of a test sample (Cha et al., 2025)."""

    source: ClassVar[str] = "Cha, Chen, Vikalo, arXiv 2509.21606"
    sends: ClassVar[str] = (
        "its update w_global - w_local, every round; after each task but the last, the leading directions of each "
        "layer's inputs with their energies; with scenario=class, after each task the sum of second moments of the "
        "classifier's inputs, and the number of samples"
    )
    kept: ClassVar[tuple[str, ...]] = ("basis",)
    hard_constraint: ClassVar[bool] = True
    not_extendable: ClassVar[str] = "it takes no basis from its last task"
    class_incremental: ClassVar[str] = (
        "trains the classes of the task alone, and predicts among those of the task that it infers for a test sample"
    )

    threshold: float = option(0.775, "share of input energy to protect", source="code", above=0.0, at_most=1.0)
    threshold_step: float = option(0.001, "added to the threshold after each task", source="code", at_least=0.0)
    samples: int = option(1280, "samples per client and task for bases and features (0: all)", source="code: 20 x 64",
                          at_least=0)  # fmt: skip

    def plan(self, task: int, tasks: int, rounds: int) -> list[Phase]:
        return [Phase("train", rounds), *self.feature_phases()]

    def init_server(self, params: Tree, model: Model) -> Server:
        device = next(iter(params.values())).device
        basis = {layer.name: bases.empty(layer.size, device) for layer in model.layers}
        return {**super().init_server(params, model), "basis": basis}

    def notes(self, model: Model) -> list[str]:
        return covered(model, model.layers, self.frozen(1, model), augment=False)

    def frozen(self, task: int, model: Model) -> frozenset[str]:
        heads = {name for other in range(model.tasks) for name in model.head(other)} if model.multi_head else set()
        vectors = {name for name, leaf in model.params.items() if leaf.dim() == 1 and model.is_parameter(name)} - heads
        return super().frozen(task, model) | model.old_head(task) | (vectors if task else set())

    def broadcast(self, server: Server, info: RoundInfo) -> TreesByOwner:
        down = super().broadcast(server, info)
        dtype = next(iter(down["params"].values())).dtype
        return {**down, "basis": {name: basis.to(dtype) for name, basis in server["basis"].items()}}

    def loss(self, logits: Tensor, ctx: Ctx) -> Tensor:
        return super().loss(ctx.model.among(logits, ctx.task) if ctx.model.growing else logits, ctx)

    def adjust(self, grads: Tree, params: Tree, ctx: Ctx) -> Tree:
        return project(grads, ctx.shared["basis"], ctx.model.layers, augment=False)

    def work(
        self, params: Tree, client: Client, shared: TreesByOwner, state: Tree, info: RoundInfo
    ) -> tuple[Tree, Tree]:
        """The client's core basis of each layer, with energies, and the second moments of its features."""
        up = self.feature_sums(params, client, info, self.samples)
        inputs = {} if info.task == info.tasks - 1 else layer_grams(params, client, info, self.samples)
        for name, sums in inputs.items():
            vectors, squared = sums.spectrum()
            rank = bases.choose_rank(squared, 0.0, self._threshold(info.task))
            core = (vectors[:, :rank] * squared[:rank]) @ vectors[:, :rank].T  # V S^2 V^T
            up |= {f"core/{name}": pack(core).to(next(iter(params.values()))), f"energy/{name}": sums.energies[:1]}
        return up, state

    def sizes(self, uploads: Tree, info: RoundInfo) -> Tree:
        # The bases go by the ratio of core and energy, so a cap has to scale both alike.
        alike = {name: f"energy/{name.removeprefix('core/')}" for name in uploads if name.startswith("core/")}
        norms = super().sizes(uploads, info)
        return {name: norms[alike.get(name, name)] for name in uploads}

    def absorb(self, server: Server, mean: TreesByOwner, info: RoundInfo, lr: float) -> Server:
        new, sums = super().absorb(server, mean, info, lr), mean.get("work", {})
        basis = {name: self._extended(name, known, sums, info) for name, known in server["basis"].items()}
        return {**new, "basis": basis, **self.with_core(server, sums, info)}

    def report(self, server: Server, model: Model) -> dict[str, Any]:
        return {"subspace_use": {name: basis.shape[1] / basis.shape[0] for name, basis in server["basis"].items()}}

    def _extended(self, name: str, basis: Tensor, sums: Tree, info: RoundInfo) -> Tensor:
        """A layer's basis (d, k) with new directions from the sum of the clients' core bases."""
        if f"core/{name}" not in sums:
            return basis
        core = unpack(sums[f"core/{name}"])
        residual = bases.residual_spectrum(core, basis, gram=True, terms=info.expected)
        whole = float(sums[f"energy/{name}"]) / max(float(core.double().trace()), 1e-300)  # |X|^2 per energy in the sum
        rank = bases.choose_rank(residual.squared, 1 - residual.share, min(1.0, self._threshold(info.task) * whole))
        return bases.expand(basis, residual.vectors[:, :rank])

    def _threshold(self, task: int) -> float:
        return min(1.0, self.threshold + task * self.threshold_step)
