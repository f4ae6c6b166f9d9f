"""The local step. Every engine runs it, for one client or under `torch.func.vmap` for several."""

import contextlib
from collections.abc import Callable, Mapping
from contextlib import AbstractContextManager
from dataclasses import dataclass, replace
from typing import NamedTuple

import torch
from torch import Tensor

from cfl.aggregation.gaussian import SampleNoise
from cfl.contract import EMPTY, Batch, Ctx, Samples
from cfl.contract.composed import ComposedMethod
from cfl.contract.losses import masked_mean
from cfl.core import RAW, Tree, tree
from cfl.core.functorch import transforming
from cfl.core.optim import Optimizer
from cfl.models import Model


class Local(NamedTuple):
    """What a client carries from step to step: trainable leaves, buffers of the task, state of the optimiser."""

    params: Tree
    buffers: Tree
    optimizer: Tree


class StepInputs(NamedTuple):
    """Inputs of a local step besides `Local`.

    shared: the broadcast; batch: empty after the last step; memory: samples drawn from the client's memory;
    state: the client's state, as far as the hooks may see it; lr: learning rate; step: number of the step, from 0;
    key: integer for the step's random draws; client: () int64, the client's id.
    """

    shared: Mapping[str, Tree]
    batch: Batch = EMPTY
    memory: Batch = EMPTY
    state: Tree = {}
    lr: float = 0.0
    step: int = 0
    key: int = 0
    client: Tensor = torch.tensor(-1)


@dataclass(frozen=True)
class LocalStep:
    """A local step of a task: the gradient of the mean loss and all penalties, then an update by the optimiser.

    frozen: names that do not train; heads: tasks whose heads are broadcast besides the task's own, and train unless
    frozen; public: the public data, if any; noise: clipping and noise of DP-SGD, None without example-level privacy.
    masked: with a growing head, the loss of a new sample has the logits of the classes of its task alone.
    """

    model: Model
    task: int
    frozen: frozenset[str]
    composed: ComposedMethod
    optimizer: Optimizer
    heads: tuple[int, ...] = ()
    public: Samples | None = None
    noise: SampleNoise | None = None
    masked: bool = False

    @property
    def now(self) -> int:
        """The task up to which a growing head is."""
        return max((self.task, *self.heads)) if self.model.growing else self.task

    def start(self, params: Tree, copied: Callable[[Tensor], Tensor] = torch.clone) -> Local:
        """Return the carry before the first step. params: the broadcast model; copied: copies a trainable leaf."""
        names = self.model.trainable(self.task, self.heads)
        trained = tree.map(copied, tree.select(params, (name for name in names if name not in self.frozen)))
        return Local(trained, tree.select(params, self.model.buffers(self.task)), self.optimizer.init(trained))

    def context(self, inputs: StepInputs, buffers: Tree | None = None) -> Ctx:
        """Return what the hooks see at a step. buffers: the client's own, by default those of the broadcast."""

        def forward(
            params: Tree,
            batch: Batch,
            heads: tuple[int, ...] | None = None,
            *,
            dropout: bool = True,
            features: bool = False,
        ) -> Tensor:
            leaves = {**inputs.shared["params"], **(buffers or {}), **params}
            for name in self.model.buffers(self.task):  # normalisation layers write to their buffers
                leaves[name] = leaves[name].clone()
            with contextlib.nullcontext() if dropout else self.model.without_dropout():
                if features:
                    return self.model.features(leaves, batch.x, self.task)
                if heads is not None:
                    return self.model.outputs(leaves, batch.x, self.task, heads)
                return self._logits(leaves, batch)

        return Ctx(
            inputs.shared,
            inputs.state,
            inputs.batch,
            inputs.memory,
            forward,
            self.model,
            self.task,
            inputs.step,
            inputs.lr,
            inputs.key,
            momentum=self.optimizer.momentum,
            client=inputs.client,
            public=self.public,
        )

    def __call__(self, local: Local, inputs: StepInputs) -> tuple[Local, Tensor]:
        """Return the carry after a step, whose weights and optimiser are updated in place, and `gradient`'s loss."""
        ctx = self.context(inputs, local.buffers)
        noise = {} if self.noise is None else self.noise.draw(local.params, inputs.key)
        grads, buffers, loss = self.gradient(local.params, local.buffers, ctx, noise)
        self.optimizer.update(grads, local.optimizer, local.params, inputs.lr, inputs.step)
        return local._replace(buffers=buffers), loss

    def gradient(self, params: Tree, buffers: Tree, ctx: Ctx, noise: Tree) -> tuple[Tree, Tree, Tensor]:
        """Return the gradient for the optimiser, the buffers after the step, and the mean loss () without penalties.

        noise: as drawn for the step, see `SampleNoise.draw`; empty without DP-SGD.

        The loss is that at `params`, or that at the first other point if `around` asks for no gradient at `params`.
        Raises HookError if a hook is at fault.
        """
        try:
            return self._through_hooks(params, buffers, ctx, noise)
        except RAW:  # once more, with a check of each hook, to name the one at fault
            replace(self, composed=self.composed.afresh())._through_hooks(params, buffers, ctx, noise)
            raise

    def _through_hooks(self, params: Tree, buffers: Tree, ctx: Ctx, noise: Tree) -> tuple[Tree, Tree, Tensor]:
        here: list[tuple[Tensor, Tree]] = []  # loss and buffers of each pass at `params`
        elsewhere: list[tuple[Tensor, Tree]] = []

        def grad_fn(at: Tree, seen: Ctx) -> Tree:
            if self.noise is None:
                grads, aux = self._gradient(at, buffers, seen)
            else:
                grads, aux = self._private_gradient(at, buffers, seen, self.noise, noise)
            (here if at is params else elsewhere).append(aux)
            return grads

        if self.composed.acting["augment"]:
            ctx = ctx._replace(batch=self.composed.augment(ctx.batch, ctx))
        grads = self.composed.around(grad_fn)(params, ctx)
        grads = self.composed.adjust(grads, params, ctx)
        if buffers and not here:  # running statistics are always those of a pass at `params`
            here.append(self._pass(params, buffers, ctx)[2:])
        loss, after = (here or elsewhere)[0]
        return grads, after, loss

    def loss(self, params: Tree, buffers: Tree, ctx: Ctx) -> tuple[Tensor, tuple[Tensor, Tree]]:
        """Return the loss () with penalties, and as auxiliary output the loss () without them and the new buffers."""
        logits, features, loss, buffers = self._pass(params, buffers, ctx)
        aux = loss, buffers
        if self.composed.acting["penalty"]:
            loss = loss + self.composed.penalty(params, logits, ctx._replace(features=features))
        return loss, aux

    def _gradient(self, params: Tree, buffers: Tree, ctx: Ctx) -> tuple[Tree, tuple[Tensor, Tree]]:
        """Return the gradient of `loss` by `params`, and its auxiliary output."""
        if transforming():  # under vmap, or inside a transform of a hook
            return torch.func.grad(self.loss, has_aux=True)(params, buffers, ctx)
        with torch.enable_grad():  # the same operations, with less overhead than torch.func
            leaves = {name: leaf.detach().requires_grad_() for name, leaf in params.items()}
            total, (loss, after) = self.loss(leaves, buffers, ctx)
        aux = loss.detach(), tree.map(torch.detach, after)
        if not total.requires_grad:  # nothing trains, or the loss depends on no weight
            return tree.map(torch.zeros_like, params), aux
        grads = torch.autograd.grad(total, tuple(leaves.values()), allow_unused=True, materialize_grads=True)
        return dict(zip(params, grads, strict=True)), aux

    def _private_gradient(
        self, params: Tree, buffers: Tree, ctx: Ctx, mechanism: SampleNoise, noise: Tree
    ) -> tuple[Tree, tuple[Tensor, Tree]]:
        """Return the noisy mean of the clipped per-sample gradients. Models under DP-SGD have no buffers."""

        def of_one(*leaves: Tensor) -> tuple[Tree, Tensor]:
            single = ctx._replace(batch=Batch(*(leaf[None] for leaf in leaves)))
            grads, (loss, _) = self._gradient(params, buffers, single)
            return grads, loss

        leaves = [leaf for leaf in ctx.batch if leaf is not None]
        grads, losses = torch.func.vmap(of_one, randomness="different")(*leaves)
        return mechanism(grads, ctx.batch.mask, noise), (masked_mean(losses, ctx.batch.mask), buffers)

    def _pass(self, params: Tree, buffers: Tree, ctx: Ctx) -> tuple[Tensor, Tensor | None, Tensor, Tree]:
        """Return logits, features, mean loss () and new buffers of a forward pass at `params`."""
        buffers = tree.map(torch.clone, buffers)  # normalisation layers write to their buffers
        watched: AbstractContextManager[list[Tensor]] = contextlib.nullcontext([])
        if self.composed.acting["penalty"]:
            watched = self.model.watched_features()
        with watched as seen:
            logits = self._logits({**ctx.shared["params"], **buffers, **params}, ctx.batch)
        loss = self.composed.loss(self._among_new(logits, ctx.batch), ctx)
        return logits, seen[-1] if seen else None, loss, buffers

    def _logits(self, leaves: Tree, batch: Batch) -> Tensor:
        """Return the logits (batch, classes), each sample's from the head of its own task."""
        if batch.task is None:
            return self.model.logits(leaves, batch.x, self.now)
        return self.model.own_logits(leaves, batch.x, self.now, batch.task)

    def _among_new(self, logits: Tensor, batch: Batch) -> Tensor:
        """Return the logits (batch, classes) of the loss: with `masked`, a new sample's among its task's classes."""
        if not (self.masked and self.model.growing):
            return logits
        only = self.model.among(logits, self.task)
        return only if batch.task is None else torch.where((batch.task == self.task)[:, None], only, logits)
