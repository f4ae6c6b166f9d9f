"""O-LoRA: a pair of low rank for each task, orthogonal to those of earlier tasks (Wang et al., Findings of EMNLP 2023).

In task t a layer computes  y = W x + (alpha / R) sum_{s <= t} B_s A_s x,  of which A_t (r, d) and B_t (m, r) train on
    CE + lambda sum_layers sum_{s < t} |A_s A_t^T|^2            (eq. 7-8; squared Frobenius norm).
So the new A reads other directions of the inputs than the old ones. W and earlier pairs do not change.

The pairs of all T tasks are one adapter of rank R = model.adapter_rank = T r: rows (t r, ..., (t + 1) r - 1) of its A
and columns of its B are the pair of task t. B_s is 0 before task s, so later pairs have no part in the outputs.

Differences: the released code sums absolute values in place of squares, and can add an L2 penalty on the new pair. All
pairs are broadcast and uploaded in every round, those at rest as zeros. Weight decay of a client acts on earlier pairs
within its round; those of the server stay.
"""

from dataclasses import dataclass
from typing import ClassVar

import torch
from torch import Tensor

from cfl.contract import Ctx, RoundInfo, Server, Strategy, TreesByOwner
from cfl.core import ConfigError, Tree, option, plugins, warn
from cfl.models import Model, adapters


@plugins.strategies.register("olora")
@dataclass(frozen=True)
class OLoRA(Strategy):
    """A low-rank pair for each task, kept orthogonal to the pairs of earlier tasks (Wang et al., 2023)."""

    source: ClassVar[str] = "Wang et al., Findings of EMNLP 2023, eq. 7-8"
    per_sample: ClassVar[bool] = True
    hard_constraint: ClassVar[bool] = True
    not_extendable: ClassVar[str] = "model.adapter_rank has an equal part for each of its tasks"

    strength: float = option(0.5, "lambda, weight of the overlap of A with earlier tasks' A", source="code: 0.5",
                             at_least=0.0, steep="local")  # fmt: skip

    def init_server(self, params: Tree, model: Model) -> Server:
        for _, b in adapters.pairs(model.module):
            if (rank := params[b].shape[1]) % model.tasks:
                raise ConfigError(
                    f"'olora' gives each of {model.tasks} tasks an equal part of model.adapter_rank, which is {rank}; "
                    f"set it to a multiple of {model.tasks}"
                )
        return {}

    def notes(self, model: Model) -> list[str]:
        if not adapters.pairs(model.module):
            warn("without adapters 'olora' is FedAvg; set model.adapter=lora")
        return []

    def penalty(self, params: Tree, logits: Tensor, ctx: Ctx) -> Tensor | float:
        if ctx.task == 0:
            return 0.0
        pairs = [(a, b) for a, b in adapters.pairs(ctx.model.module) if a in params]
        return self.strength * sum(overlap(params[a], len(params[a]) // params[b].shape[1], ctx) for a, b in pairs)

    def adjust(self, grads: Tree, params: Tree, ctx: Ctx) -> Tree:
        return of_task(grads, ctx.task, ctx.model)

    def absorb(self, server: Server, mean: TreesByOwner, info: RoundInfo, lr: float) -> Server:
        if "strategy" in mean:  # with noise, or after a regularizer's step, earlier pairs would move
            mean = {**mean, "strategy": of_task(mean["strategy"], info.task, info.model)}
        return super().absorb(server, mean, info, lr)


def overlap(a: Tensor, groups: int, ctx: Ctx) -> Tensor:
    """sum_{s < t} |A_s A_t^T|^2 (), for the A of all tasks (groups x R, ...)."""
    rows = a.unflatten(0, (groups, -1)).flatten(2)  # (groups, R, d)
    size = rows.shape[1] // ctx.model.tasks
    old, new = rows[:, : ctx.task * size], rows[:, ctx.task * size : (ctx.task + 1) * size]
    return (old @ new.transpose(1, 2)).square().sum()


def of_task(leaves: Tree, task: int, model: Model) -> Tree:
    """The leaves, with zeros in place of the entries of other tasks' pairs."""
    result = dict(leaves)
    for a, b in adapters.pairs(model.module):
        if a in leaves and b in leaves:
            rank = leaves[b].shape[1]
            own = torch.arange(rank, device=leaves[b].device) // (rank // model.tasks) == task
            rows = own.repeat(len(leaves[a]) // rank).reshape(-1, *[1] * (leaves[a].dim() - 1))
            columns = own.reshape(1, -1, *[1] * (leaves[b].dim() - 2))
            result |= {a: leaves[a].where(rows, 0.0), b: leaves[b].where(columns, 0.0)}
    return result
