"""Distillation on the server: the base class of FedDF, Fed-ET and FedProj."""

from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any, ClassVar

import torch
from torch import Tensor

from cfl.contract import Batch, Ctx, Gathers, LocalRegularizer, RoundInfo, Samples
from cfl.contract.samples import batched
from cfl.core import Tree, optim, option, rng, tree
from cfl.models.passes import passes

Loss = Callable[[Tensor, Tensor, Tree], Tensor]
"""Loss () of the student, from rows (b,) of the public data, its logits (b, classes), and its trained parameters."""

_CHUNK = 1024  # public samples in a forward pass without gradient, at most; see `passes`


def public_batch(public: Samples, rows: Tensor) -> Batch:
    """Public samples at rows (b,); their labels are meaningless zeros."""
    x, y = public.gather(rows)
    return Batch.whole(x, y, public.index[rows])


def public_logits(params: Tree, ctx: Ctx) -> Tensor:
    """Logits of a model, in evaluation mode, on all public samples: (samples, classes)."""
    assert ctx.public is not None
    rows = torch.arange(len(ctx.public), device=ctx.public.index.device)
    with ctx.model.evaluation(), torch.no_grad():
        parts = passes(ctx.model.module, rows, _CHUNK)
        return torch.cat([ctx.forward(params, public_batch(ctx.public, part)) for part in parts])


@dataclass(frozen=True)
class Distillation(LocalRegularizer, ABC):
    """Server-side distillation: clients send logits on public data, and the server trains the averaged model on them.

    A subclass defines `lesson`.
    """

    gathers: ClassVar[Gathers] = "sum"
    sends: ClassVar[str] = "its logits on the public data, every round"
    needs_public: ClassVar[bool] = True
    decides: ClassVar[str] = "what the server learns from public data"
    turn: ClassVar[int] = 1

    temperature: float = option(3.0, "temperature of both softmax functions", source="FedProj; FedDF has 1", above=0.0)
    server_epochs: int = option(1, "epochs on the public data per round", source="FedProj, CIFAR-10", at_least=1)
    server_batch: int = option(128, "public samples per step", source="FedProj's code; the paper has 256", at_least=2)
    server_lr: float = option(
        1e-5, "learning rate of Adam", source="FedProj's code; FedDF has 1e-3", above=0.0, steep="server"
    )

    def refuses(self, run: Mapping[str, Any]) -> str | None:
        if run["dp"]["level"] == "client" and run["dp"]["protect"] == "all":
            return "dp.level=client clips its count of clients along with the logits, and adds noise to both"
        return None

    def finish(self, params: Tree, ctx: Ctx, steps: int) -> tuple[Tree, Tree]:
        logits = public_logits(params, ctx)
        return {"logits": logits, "clients": logits.new_ones(())}, ctx.state

    @abstractmethod
    def lesson(self, average: Tree, gathered: Tree, params: Tree) -> tuple[Loss, Tree]:
        """Return the student's loss, and the server's new tree.

        average: the averaged model, from which the student starts; gathered: the clients' "logits" and number of
        "clients", aggregated as `gathers` says; params: the global model before the round.
        """

    def server_step(self, step: Tree, own: Tree, gathered: Tree, params: Tree, info: RoundInfo) -> tuple[Tree, Tree]:
        average = {**params, **{name: params[name] - leaf for name, leaf in step.items()}}
        loss, own = self.lesson(average, gathered, params)
        student = self.distilled(average, loss, info)
        return {name: params[name] - student[name] for name in step}, own

    def distilled(self, student: Tree, loss: Loss, info: RoundInfo) -> Tree:
        """The student after training on public data, in training mode.

        Its running statistics do not change, as those of public images differ from those of the clients' images.
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
            return loss(rows, model.logits(leaves, public.gather(rows)[0], info.task), at)

        model.module.train()
        with rng.fork(rng.key(info.key, "distill"), device):
            for epoch in range(self.server_epochs):
                draws = rng.generator(rng.key(info.key, "distill", "order", epoch))
                order = torch.randperm(len(public), generator=draws).to(device)
                for rows in batched(order, self.server_batch, together=True):  # one sample has no batch statistics
                    grads = torch.func.grad(total)(weights, rows)
                    adam.update(grads, state, weights, self.server_lr, step)
                    step += 1
        return {**student, **weights}
