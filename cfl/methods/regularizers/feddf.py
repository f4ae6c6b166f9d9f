"""FedDF (Lin et al., 2020, Algorithm 1): the averaged model learns from the ensemble of the clients' models.

Each client sends its logits on public inputs beside its update; the server needs their sum only. The student starts
from the average and learns T^2 KL(softmax(Z / T) || softmax(z / T)), Z being the mean logits of the clients.
"""

from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any, ClassVar

import torch
from torch import Tensor

from cfl.contract.context import Ctx
from cfl.contract.data import Batch, Samples
from cfl.contract.losses import divergence
from cfl.contract.regularizer import Gathers, LocalRegularizer
from cfl.contract.rounds import RoundInfo
from cfl.core import optim, plugins, rng, tree
from cfl.core.options import option
from cfl.core.tree import Tree

Loss = Callable[[Tensor, Tensor, Tree], Tensor]  # rows (b,), logits (b, classes), trained weights -> ()
_CHUNK = 1024  # public samples in a forward pass without gradient


def public_batch(public: Samples, rows: Tensor) -> Batch:
    """Public samples at rows (b,); their labels are zeros and mean nothing."""
    x, y = public.gather(rows)
    return Batch(x, y, torch.ones(len(y), dtype=x.dtype, device=x.device), public.index[rows])


def public_logits(params: Tree, ctx: Ctx) -> Tensor:
    """Logits of a model, in evaluation mode, on all public samples: (samples, classes)."""
    assert ctx.public is not None
    rows = torch.arange(len(ctx.public), device=ctx.public.index.device)
    with ctx.model.evaluation(), torch.no_grad():
        return torch.cat([ctx.forward(params, public_batch(ctx.public, part)) for part in rows.split(_CHUNK)])


def _parts(rows: Tensor, size: int) -> list[Tensor]:
    """Rows in parts of `size`; one that would be left over alone joins the last, since it has no batch statistics."""
    parts = list(rows.split(size))
    return [*parts[:-2], torch.cat(parts[-2:])] if len(parts) > 1 and len(parts[-1]) == 1 else parts


@dataclass(frozen=True)
class Distillation(LocalRegularizer, ABC):
    """What FedDF, FedET and FedProj share: clients send logits on public data, and the server trains on them."""

    gathers: ClassVar[Gathers] = "sum"
    sends: ClassVar[str] = "its logits on the public data, every round"
    needs_public: ClassVar[bool] = True
    decides: ClassVar[str] = "what the server learns from public data"
    turn: ClassVar[int] = 1

    temperature: float = option(3.0, "temperature of both softmax functions", source="FedProj; FedDF has 1", above=0.0)
    server_epochs: int = option(1, "passes over the public data a round", source="FedProj, CIFAR-10", at_least=1)
    server_batch: int = option(128, "public samples a step", source="FedProj's code; the paper has 256", at_least=2)
    server_lr: float = option(1e-5, "learning rate of Adam", source="FedProj's code; FedDF has 1e-3", above=0.0)

    def refuses(self, run: Mapping[str, Any]) -> str | None:
        if run["dp"]["level"] == "client" and run["dp"]["protect"] == "all":
            return "dp.level=client clips and blurs its count of clients along with the logits"
        return None

    def finish(self, params: Tree, ctx: Ctx, steps: int) -> tuple[Tree, Tree]:
        logits = public_logits(params, ctx)
        return {"logits": logits, "clients": logits.new_ones(())}, ctx.state

    @abstractmethod
    def lesson(self, average: Tree, gathered: Tree, params: Tree) -> tuple[Loss, Tree]:
        """What the student learns from the clients' logits, and the server's new tree.

        average: the model to start from; params: the global model before the round.
        """

    def server_step(self, step: Tree, own: Tree, gathered: Tree, params: Tree, info: RoundInfo) -> tuple[Tree, Tree]:
        average = {**params, **{name: params[name] - leaf for name, leaf in step.items()}}
        loss, own = self.lesson(average, gathered, params)
        student = self.distilled(average, loss, info)
        return {name: params[name] - student[name] for name in step}, own

    def distilled(self, student: Tree, loss: Loss, info: RoundInfo) -> Tree:
        """The student after training on public data, in training mode.

        Running statistics stay as they are: those of public images are not those of the clients'.
        """
        public, model = info.public, info.model
        assert public is not None
        names = [name for name in model.trainable(info.task) if name not in info.frozen]
        weights = tree.clone(tree.select(student, names))
        adam = optim.adam()
        state, step = adam.init(weights), 0
        device = public.index.device

        def total(at: Tree, rows: Tensor) -> Tensor:
            leaves = {**student, **{name: student[name].clone() for name in model.buffers(info.task)}, **at}
            return loss(rows, model.logits(leaves, public_batch(public, rows).x, info.task), at)

        model.module.train()
        with rng.fork(rng.key(info.key, "distill"), device):
            for epoch in range(self.server_epochs):
                draws = rng.generator(rng.key(info.key, "distill", "order", epoch))
                for rows in _parts(torch.randperm(len(public), generator=draws).to(device), self.server_batch):
                    grads = torch.func.grad(total)(weights, rows)
                    adam.update(grads, state, weights, self.server_lr, step)
                    step += 1
        return {**student, **weights}


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
        """T^2 KL(teacher || student), the mean over samples: ()."""
        return self.temperature**2 * divergence(teacher, logits, self.temperature).mean()
