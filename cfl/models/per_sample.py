"""Squares of the gradients of single samples, summed over a batch, without a gradient of each sample where it can be.

For a Linear layer that a sample enters once, the gradient of a sample's loss is an outer product, delta x^T, whose
square is that of delta times that of x: the sum over samples is one matrix product. Where a sample enters a layer at
many positions (convolutions, tokens) its gradient is formed; what is no such layer goes through `torch.func.vmap`.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from contextlib import ExitStack
from typing import Any

import torch
from torch import Tensor, nn

from cfl.core import tree
from cfl.core.tree import Tree
from cfl.models.handle import Layer, Model

Loss = Callable[[Tensor, Tensor], Tensor]
_NUMBERS = 2**24  # of single samples' gradients at a time: 64 MiB in float32


def squared_gradients(
    model: Model, params: Tree, names: Iterable[str], loss: Loss, x: Tensor, y: Tensor, task: int
) -> Tree:
    """Sum over samples of the squared gradient of their own loss by the leaves `names`, in the model's current mode.

    loss: logits (batch, classes) and labels (batch,) to losses (batch,); x: (batch, ...). No sample may touch another,
    as it does in batch statistics.
    """
    wanted = list(names)
    calls = _calls(model, params, loss, x, y, task)
    sums: Tree = {}
    for layer in model.layers:
        seen = calls.get(layer.path, [])
        if layer.weight in wanted and seen and all(len(inputs) == len(y) for inputs, _ in seen):
            inputs = torch.cat([layer.inputs(inputs) for inputs, _ in seen], dim=1)
            deltas = torch.cat([_positions(delta, layer)[..., layer.rows] for _, delta in seen], dim=1)
            for name, part in ((layer.weight, _weight(inputs, deltas)), (layer.bias, deltas.sum(1).square().sum(0))):
                if name in wanted:
                    whole = sums.setdefault(name, torch.zeros_like(params[name]))
                    whole[layer.rows] = part.reshape(whole[layer.rows].shape)
    rest = [name for name in wanted if name not in sums]
    sums |= _by_vmap(model, params, rest, loss, x, y, task) if rest else {}
    return tree.select(sums, wanted)


def _calls(
    model: Model, params: Tree, loss: Loss, x: Tensor, y: Tensor, task: int
) -> dict[str, list[tuple[Tensor, Tensor]]]:
    """By a layer's path, for each of its calls: what enters, and the gradient of the summed loss by what comes out."""
    seen: list[tuple[str, Tensor, Tensor]] = []

    def hook(path: str) -> Callable[..., Tensor]:
        def add(module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any], output: Tensor) -> Tensor:
            shift = torch.zeros_like(output, requires_grad=True)
            seen.append((path, (*args, *kwargs.values())[0].detach(), shift))
            return output + shift

        return add

    with ExitStack() as hooks, torch.enable_grad():
        for path in {layer.path for layer in model.layers}:
            handle = model.module.get_submodule(path).register_forward_hook(hook(path), with_kwargs=True)
            hooks.callback(handle.remove)
        total = loss(model.logits(params, x, task), y).sum()
        if not seen:
            return {}
        deltas = torch.autograd.grad(total, [shift for *_, shift in seen], materialize_grads=True)
    calls: dict[str, list[tuple[Tensor, Tensor]]] = {}
    for (path, inputs, _), delta in zip(seen, deltas, strict=True):
        calls.setdefault(path, []).append((inputs, delta))
    return calls


def _positions(delta: Tensor, layer: Layer) -> Tensor:
    """A gradient by a layer's output as (batch, positions, outputs)."""
    if isinstance(layer.module, nn.Linear):
        return delta.reshape(delta.shape[0], -1, delta.shape[-1])
    return delta.flatten(2).transpose(1, 2)


def _weight(inputs: Tensor, deltas: Tensor) -> Tensor:
    """(outputs, d) from inputs (batch, positions, d) and deltas (batch, positions, outputs)."""
    if inputs.shape[1] == 1:
        return deltas[:, 0].square().T @ inputs[:, 0].square()
    size = max(1, _NUMBERS // (deltas.shape[2] * inputs.shape[2]))
    parts = zip(deltas.split(size), inputs.split(size), strict=True)
    return torch.stack([(delta.transpose(1, 2) @ x).square().sum(0) for delta, x in parts]).sum(0)


def _by_vmap(model: Model, params: Tree, names: list[str], loss: Loss, x: Tensor, y: Tensor, task: int) -> Tree:
    leaves = tree.select(params, names)

    def single(at: Tree, x: Tensor, y: Tensor) -> Tensor:
        return loss(model.logits({**params, **at}, x[None], task), y[None])[0]

    sums = tree.map(torch.zeros_like, leaves)
    size = max(1, _NUMBERS // sum(leaf.numel() for leaf in leaves.values()))
    for xs, ys in zip(x.split(size), y.split(size), strict=True):
        grads = torch.func.vmap(torch.func.grad(single), (None, 0, 0))(leaves, xs, ys)
        sums = tree.map(lambda total, grad: total + grad.square().sum(0), sums, grads)
    return sums
