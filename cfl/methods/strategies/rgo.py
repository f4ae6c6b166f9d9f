"""RGO+FL: recursive gradient optimisation at some of the clients (Liu and Liu, ICLR 2022; FOT, appendix F.2).

Each layer has a positive definite matrix P (d, d) for its inputs, and one for its bias; both start as I. Gradients are
multiplied by P, scaled to a trace of d: g_W <- d / tr P  g_W P. After each task, over one epoch of mini-batches (z:
logits, a: softmax over the task's classes):
    q = sum_b z_{b,y} sqrt(a_y - a_y^2) (the root a constant),   v = mean over output units of dq/dW,
    k = P v,   P <- P - k k^T / (alpha + v^T k),
so that P = (I + sum v v^T / alpha)^-1. In a federation each client has its own P. A random share of the clients with
data of the task update and store it; the others keep theirs.

RGO's feature encoding (`encode`) permutes the outputs of each layer but the last, in an order of its own for each task:
a permutation of the weight's rows, within each group of a grouped convolution. The server stores the weights in the
order of the first task and broadcasts them in the task's order. P is unaffected, since it multiplies inputs. Biases are
added after the permutation. The encoding is off by default, because FOT gives all methods the same network.

Differences: alpha is 1 in the paper and 0.01 in the code. By a re-used variable, the code makes only (test set / batch)
updates per task; here it is one epoch. Weight decay and Adam act after the multiplication by P.
"""

from dataclasses import dataclass
from typing import ClassVar

import torch
from torch import Tensor

from cfl.contract import Batch, Client, Ctx, Phase, RoundInfo, Server, Strategy, TreesByOwner, with_consolidation
from cfl.core import Tree, option, plugins, rng, tree, warn
from cfl.models import Layer, Model
from cfl.models.layers import KINDS


@plugins.strategies.register("rgo")
@dataclass(frozen=True)
class RGO(Strategy):
    """Recursive gradient optimisation at some clients: small steps where earlier losses curve (Liu and Liu, 2022)."""

    not_class_incremental: ClassVar[str] = (
        "its paper knows the task of each sample, and its feature encoding arranges the weights by it"
    )
    source: ClassVar[str] = "Liu and Liu, ICLR 2022; FOT, appendix F.2"
    sends: ClassVar[str] = Strategy.sends
    hard_constraint: ClassVar[bool] = True

    alpha: float = option(1.0, "P shrinks more slowly for larger values", source="paper: 1; code: 0.01", above=0.0)
    share: float = option(0.4, "share of a task's owners that update P", source="FOT, F.2", above=0.0, at_most=1.0)
    batch_size: int = option(16, "samples per update of P", at_least=1)
    encode: bool = option(False, "feature encoding: permute layers' outputs for each task", source="paper: yes")

    def plan(self, task: int, tasks: int, rounds: int) -> list[Phase]:
        return with_consolidation(task, tasks, rounds)

    def notes(self, model: Model) -> list[str]:
        if not model.layers:
            warn(f"apart from heads, the model has no layer to multiply by P ({KINDS}): 'rgo' is FedAvg")
        own = {name for layer in model.layers for name in (layer.weight, layer.bias)}
        plain = sorted(set(model.trainable(0)) - own - {*(model.head(0) if model.multi_head else ())})
        return [f"not multiplied by P, trained as in FedAvg: {', '.join(plain)}"] if plain else []

    def init_server(self, params: Tree, model: Model) -> Server:
        inner = [layer for layer in model.layers if model.multi_head or layer.path != model.layers[-1].path]
        tasks = range(1, model.tasks) if self.encode else ()
        return {f"orders/{task}": {layer.weight: _order(layer, task, model.seed) for layer in inner} for task in tasks}

    def broadcast(self, server: Server, info: RoundInfo) -> TreesByOwner:
        down = super().broadcast(server, info)
        return {**down, "params": arranged(down["params"], _task_orders(server, info.task))}

    def absorb(self, server: Server, mean: TreesByOwner, info: RoundInfo, lr: float) -> Server:
        if "strategy" in mean:
            first = {name: order.argsort() for name, order in _task_orders(server, info.task).items()}
            mean = {**mean, "strategy": arranged(mean["strategy"], first)}
        return super().absorb(server, mean, info, lr)

    def serve(self, server: Server, task: int) -> Tree:
        return arranged(server["params"], _task_orders(server, task))

    def adjust(self, grads: Tree, params: Tree, ctx: Ctx) -> Tree:
        new = dict(grads)
        for layer in ctx.model.layers:
            for name in (layer.weight, layer.bias):
                p = ctx.state.get(matrix_name(name, layer))
                if name in grads and p is not None:
                    scaled = len(p) / p.trace() * (rows(new[name], layer) @ p)  # (n, d) @ (d, d)
                    new[name] = layer.put(new[name], scaled)
        return new

    def work(
        self, params: Tree, client: Client, shared: TreesByOwner, state: Tree, info: RoundInfo
    ) -> tuple[Tree, Tree]:
        """Update P if the client is drawn for the task. Upload nothing."""
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
            root = (a - a.square()).sqrt().gather(1, batch.y[:, None])
            return (z.gather(1, batch.y[:, None]) * root).sum()

        for batch in client.batches(self.batch_size, order, together=info.model.joins_last):
            grads = torch.func.grad(q)(weights, batch)
            for name, layer in pairs:
                v, p = rows(grads[name], layer).mean(dim=0).double(), new[matrix_name(name, layer)]
                k = p @ v
                new[matrix_name(name, layer)] = p - torch.outer(k, k) / (self.alpha + v @ k)
        return {}, {name: leaf.to(params[pairs[0][0]]) for name, leaf in new.items()}


def _order(layer: Layer, task: int, seed: int) -> Tensor:
    """Random order of a layer's outputs for a task, permuted within each group."""
    source = rng.generator(rng.key(seed, "encoding", task, layer.path))
    size = len(layer.module.weight) // layer.groups
    return torch.cat([torch.randperm(size, generator=source) + group * size for group in range(layer.groups)])


def _task_orders(server: Server, task: int) -> Tree:
    """Orders by weight name for a task; empty in the first task and without encoding."""
    return server.get(f"orders/{task}", {})


def arranged(leaves: Tree, orders: Tree) -> Tree:
    """Leaves with their rows permuted by `orders`, by name."""
    return {name: leaf[orders[name]] if name in orders else leaf for name, leaf in leaves.items()}


def matrix_name(name: str | None, layer: Layer) -> str:
    """Name in a client's state of the matrix P for a layer's weight or bias."""
    return f"{'weight' if name == layer.weight else 'bias'}/{layer.name}"


def rows(leaf: Tensor, layer: Layer) -> Tensor:
    """A group's weight (outputs, d), or its bias (1, outputs): P multiplies each row."""
    group = leaf[layer.rows]
    return group.flatten(1) if leaf.dim() > 1 else group[None]
