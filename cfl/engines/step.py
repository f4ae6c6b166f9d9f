"""The one local step: the same code runs a client at a time or under `torch.func.vmap`."""

from __future__ import annotations

import contextlib
from collections.abc import Mapping
from contextlib import AbstractContextManager
from dataclasses import dataclass
from typing import NamedTuple

import torch
from torch import Tensor
from torch._C._functorch import peek_interpreter_stack

from cfl.aggregation.gaussian import SampleNoise
from cfl.contract.composed import ComposedMethod
from cfl.contract.context import Ctx
from cfl.contract.data import EMPTY, Batch, Samples
from cfl.contract.losses import masked_mean
from cfl.core import tree
from cfl.core.optim import Optimizer
from cfl.core.tree import Tree
from cfl.models.handle import Model


class Local(NamedTuple):
    """What a client carries from step to step: trainable leaves, the task's buffers, the optimiser's state."""

    params: Tree
    buffers: Tree
    optimizer: Tree


@dataclass(frozen=True)
class LocalStep:
    """One local step of a task: gradient of the mean loss and all penalties, then the optimiser.

    frozen: names that do not train; heads: tasks whose heads came down beside the task's own; public: inputs that
    everybody may see, if any; noise: what bounds each sample's part in the gradient and hides it, if anything does.
    """

    model: Model
    task: int
    frozen: frozenset[str]
    composed: ComposedMethod
    optimizer: Optimizer
    heads: tuple[int, ...] = ()
    public: Samples | None = None
    noise: SampleNoise | None = None

    def start(self, params: Tree) -> Local:
        """The carry before the first step, a copy; params: all that came down."""
        names = self.model.trainable(self.task, self.heads)
        trained = tree.clone(tree.select(params, (name for name in names if name not in self.frozen)))
        return Local(trained, tree.select(params, self.model.buffers(self.task)), self.optimizer.init(trained))

    def context(
        self,
        shared: Mapping[str, Tree],
        state: Tree,
        index: int,
        key: int,
        batch: Batch = EMPTY,
        memory: Batch = EMPTY,
        buffers: Tree | None = None,
        lr: float = 0.0,
        client: Tensor | None = None,
    ) -> Ctx:
        """What the hooks see at step `index`; after the last step there is no batch. client: () int64, its id."""

        def forward(
            params: Tree,
            batch: Batch,
            heads: tuple[int, ...] | None = None,
            *,
            dropout: bool = True,
            features: bool = False,
        ) -> Tensor:
            leaves = {**shared["params"], **(buffers or {}), **params}
            for name in self.model.buffers(self.task):  # normalisation layers write to their buffers
                leaves[name] = leaves[name].clone()
            with contextlib.nullcontext() if dropout else self.model.without_dropout():
                if features:
                    return self.model.features(leaves, batch.x, self.task)
                if heads is not None:
                    return self.model.outputs(leaves, batch.x, self.task, heads)
                return self._logits(leaves, batch)

        return Ctx(
            shared,
            state,
            batch,
            memory,
            forward,
            self.model,
            self.task,
            index,
            lr,
            key,
            momentum=self.optimizer.momentum,
            client=torch.tensor(-1) if client is None else client,
            public=self.public,
        )

    def __call__(
        self,
        local: Local,
        batch: Batch,
        shared: Mapping[str, Tree],
        state: Tree,
        lr: float,
        index: int,
        key: int,
        memory: Batch = EMPTY,
        client: Tensor | None = None,
    ) -> tuple[Local, Tensor]:
        """Step `index`: the carry after it, whose leaves are written in place, and the loss that `gradient` gives."""
        ctx = self.context(shared, state, index, key, batch, memory, local.buffers, lr, client)
        grads, buffers, loss = self.gradient(local.params, local.buffers, ctx)
        self.optimizer.update(grads, local.optimizer, local.params, lr, index)
        return local._replace(buffers=buffers), loss

    def gradient(self, params: Tree, buffers: Tree, ctx: Ctx) -> tuple[Tree, Tree, Tensor]:
        """What the optimiser gets, the buffers after the step, and the mean loss () over the batch, penalties aside.

        The loss is that of the weights as they are, or, if `around` never looked at those, of where it looked first.
        """
        here: list[tuple[Tensor, Tree]] = []
        elsewhere: list[tuple[Tensor, Tree]] = []

        def grad_fn(at: Tree, seen: Ctx) -> Tree:
            grads, aux = (self._gradient if self.noise is None else self._private)(at, buffers, seen)
            (here if at is params else elsewhere).append(aux)
            return grads

        if self.composed.acting["augment"]:
            ctx = ctx._replace(batch=self.composed.augment(ctx.batch, ctx))
        grads = self.composed.around(grad_fn)(params, ctx)
        grads = self.composed.adjust(grads, params, ctx)
        if buffers and not here:  # running statistics are of the weights as they are
            here.append(self._pass(params, buffers, ctx)[2:])
        loss, after = (here or elsewhere)[0]
        return grads, after, loss

    def _gradient(self, params: Tree, buffers: Tree, ctx: Ctx) -> tuple[Tree, tuple[Tensor, Tree]]:
        if peek_interpreter_stack() is not None:  # inside `torch.func`: under vmap, or where a hook transforms
            return torch.func.grad(self._loss, has_aux=True)(params, buffers, ctx)
        with torch.enable_grad():  # the same operations with less between them
            leaves = {name: leaf.detach().requires_grad_() for name, leaf in params.items()}
            total, (loss, after) = self._loss(leaves, buffers, ctx)
        aux = loss.detach(), tree.map(torch.detach, after)
        if not total.requires_grad:  # nothing trains, or no weight enters the loss
            return tree.map(torch.zeros_like, params), aux
        grads = torch.autograd.grad(total, tuple(leaves.values()), allow_unused=True, materialize_grads=True)
        return dict(zip(params, grads, strict=True)), aux

    def _private(self, params: Tree, buffers: Tree, ctx: Ctx) -> tuple[Tree, tuple[Tensor, Tree]]:
        """The gradient with each sample's part in it bounded, and noise; the models here have no buffers."""
        assert self.noise is not None

        def of_one(*leaves: Tensor) -> tuple[Tree, Tensor]:
            single = ctx._replace(batch=Batch(*(leaf[None] for leaf in leaves)))
            grads, (loss, _) = self._gradient(params, buffers, single)
            return grads, loss

        leaves = [leaf for leaf in ctx.batch if leaf is not None]
        grads, losses = torch.func.vmap(of_one, randomness="different")(*leaves)
        return self.noise(grads, ctx.batch.mask, ctx.key), (masked_mean(losses, ctx.batch.mask), buffers)

    def _loss(self, params: Tree, buffers: Tree, ctx: Ctx) -> tuple[Tensor, tuple[Tensor, Tree]]:
        logits, features, loss, buffers = self._pass(params, buffers, ctx)
        aux = loss, buffers
        if self.composed.acting["penalty"]:
            loss = loss + self.composed.penalty(params, logits, ctx._replace(features=features))
        return loss, aux

    def _pass(self, params: Tree, buffers: Tree, ctx: Ctx) -> tuple[Tensor, Tensor | None, Tensor, Tree]:
        """Logits, features, mean loss, and the buffers after a pass at `params`."""
        buffers = tree.map(torch.clone, buffers)  # normalisation layers write to their buffers
        watched: AbstractContextManager[list[Tensor]] = contextlib.nullcontext([])
        if self.composed.acting["penalty"]:
            watched = self.model.watched_features()
        with watched as seen:
            logits = self._logits({**ctx.shared["params"], **buffers, **params}, ctx.batch)
        return logits, seen[-1] if seen else None, self.composed.loss(logits, ctx), buffers

    def _logits(self, leaves: Tree, batch: Batch) -> Tensor:
        if batch.task is None:
            return self.model.logits(leaves, batch.x, self.task)
        return self.model.own_logits(leaves, batch.x, self.task, batch.task)
