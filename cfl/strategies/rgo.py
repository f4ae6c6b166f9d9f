"""RGO+FL: recursive gradient optimisation at some of the clients (Liu and Liu, ICLR 2022; FOT, appendix F.2).

A layer has a positive definite matrix P (d, d) on the side of its inputs, and one for its bias, I at first. Gradients
are multiplied by it, with the trace brought to the dimension: g_W <- d / tr P  g_W P. After each task, over one epoch
of mini-batches (z: logits, a: softmax over the task's classes):
    q = sum_b z_{b,y} sqrt(a_y - a_y^2) (the root a constant),   v = mean over output units of dq/dW,
    k = P v,   P <- P - k k^T / (alpha + v^T k),
which keeps P = (I + sum v v^T / alpha)^-1. In a federation each client has its own P, and a random share of those that
hold the task's data updates and stores it; the others go on as they were.

Differences: alpha is 1 in the paper and 0.01 in the code; the code makes only (test set / batch) updates a task by a
re-used variable, here it is one epoch. RGO's feature encoding layer is left out, as FOT gives all methods one network.
Weight decay and Adam act after the multiplication by P.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

import torch
from torch import Tensor

from cfl import plugins, rng, tree
from cfl.models.handle import Layer
from cfl.options import option
from cfl.strategies.base import Strategy, with_consolidation
from cfl.tree import Tree
from cfl.types import Batch, Client, Ctx, Parts, Phase, RoundInfo


@plugins.strategies.register("rgo")
@dataclass(frozen=True)
class RGO(Strategy):
    """Recursive gradient optimisation at some clients: gradients shrink where earlier tasks curve (Liu, Liu, 2022)."""

    source: ClassVar[str] = "Liu and Liu, ICLR 2022; FOT, appendix F.2"
    hard_constraint: ClassVar[bool] = True

    alpha: float = option(1.0, "how slowly P shrinks", source="paper: 1; code: 0.01", above=0.0)
    share: float = option(0.4, "share of a task's owners that updates its P", source="FOT, F.2", above=0.0, at_most=1.0)
    batch_size: int = option(16, "samples of each update of P", at_least=1)

    def plan(self, task: int, tasks: int, rounds: int) -> list[Phase]:
        return with_consolidation(task, tasks, rounds)

    def adjust(self, grads: Tree, params: Tree, ctx: Ctx) -> Tree:
        new = dict(grads)
        for layer in ctx.model.layers:
            for name in (layer.weight, layer.bias):
                p = ctx.state.get(matrix_name(name, layer))
                if name in grads and p is not None:
                    scaled = len(p) / p.trace() * (rows(new[name], layer) @ p)  # (n, d) @ (d, d)
                    new[name] = layer.put(new[name], scaled)
        return new

    def work(self, params: Tree, client: Client, shared: Parts, state: Tree, info: RoundInfo) -> tuple[Tree, Tree]:
        """Update the client's P, if it is among those drawn for the task. Nothing goes up."""
        count = max(1, round(self.share * len(info.clients)))
        drawn = rng.numpy_generator(rng.key(info.key, "update")).choice(info.clients, count, replace=False)
        if client.id not in drawn:
            return {}, state
        pairs = [(name, layer) for layer in info.model.layers for name in (layer.weight, layer.bias) if name]
        sizes = {matrix_name(name, layer): rows(params[name], layer).shape[1] for name, layer in pairs}
        new = {name: state.get(name, torch.eye(size)).double().to(client.device) for name, size in sizes.items()}
        source = rng.generator(rng.key(info.key, "order", client.id))
        order = torch.randperm(len(client), generator=source).to(client.device)
        weights = tree.select(params, dict.fromkeys(name for name, _ in pairs))

        def q(at: Tree, batch: Batch) -> Tensor:
            z = info.model.logits({**params, **at}, batch.x, info.task)
            a = z.softmax(dim=1).detach()
            at_label = (a - a.square()).sqrt().gather(1, batch.y[:, None])
            return (z.gather(1, batch.y[:, None]) * at_label).sum()

        for batch in client.batches(self.batch_size, order):
            grads = torch.func.grad(q)(weights, batch)
            for name, layer in pairs:
                v, p = rows(grads[name], layer).mean(dim=0).double(), new[matrix_name(name, layer)]
                k = p @ v
                new[matrix_name(name, layer)] = p - torch.outer(k, k) / (self.alpha + v @ k)
        return {}, {name: leaf.to(params[pairs[0][0]]) for name, leaf in new.items()}


def matrix_name(name: str | None, layer: Layer) -> str:
    """The name in a client's state of the matrix for a layer's weight or bias."""
    return f"{'weight' if name == layer.weight else 'bias'}/{layer.name}"


def rows(leaf: Tensor, layer: Layer) -> Tensor:
    """A group's weight as (outputs, d), or its bias as (1, outputs): each row is what P multiplies."""
    own = leaf[layer.rows]
    return own.flatten(1) if leaf.dim() > 1 else own[None]
