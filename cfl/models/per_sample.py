"""Sums over a batch of the squared gradients of single samples, if possible without each sample's gradient.

For a Linear layer that a sample enters once, the gradient of a sample's loss is an outer product, delta x^T. Its square
is the outer product of squared delta and squared x, so the sum over samples is one matrix product. For a layer that a
sample enters at many positions (convolutions, tokens), each sample's gradient is formed. All other parameters use
`torch.func.vmap`, as do layers with a forward of their own.
"""

from collections.abc import Callable, Iterable
from contextlib import ExitStack
from typing import Any

import torch
from torch import Tensor, nn

from cfl.core import Tree, tree
from cfl.models.handle import Model
from cfl.models.layers import Layer, input_of

Loss = Callable[[Tensor, Tensor], Tensor]
_NUMBERS = 2**24  # entries of single samples' gradients in memory at a time: 64 MiB in float32


def squared_gradients(
    model: Model, params: Tree, names: Iterable[str], loss: Loss, x: Tensor, y: Tensor, task: int
) -> Tree:
    """Sum over samples of the squared gradient of each sample's loss, for the leaves `names`, in the current mode.

    loss: maps logits (batch, classes) and labels (batch,) to losses (batch,); x: (batch, ...); y: (batch,).
    A sample's outputs must not depend on other samples, as they do with batch statistics.
    """
    wanted = list(names)
    calls = _calls(model, params, loss, x, y, task)
    sums: Tree = {}
    for layer in model.layers:
        seen = calls.get(layer.path, [])
        apart = seen and not layer.mixed and all(len(inputs) == len(y) for inputs, _ in seen)
        if layer.weight in wanted and apart and not layer.own_forward:
            inputs = torch.cat([layer.inputs(inputs) for inputs, _ in seen], dim=1)
            deltas = torch.cat([_positions(delta, layer)[..., layer.rows] for _, delta in seen], dim=1)
            for name, own in ((layer.weight, _weight(inputs, deltas)), (layer.bias, deltas.sum(1).square().sum(0))):
                if name in wanted:
                    leaf = sums.setdefault(name, torch.zeros_like(params[name]))
                    leaf[layer.rows] = own.reshape(leaf[layer.rows].shape)
    rest = [name for name in wanted if name not in sums]
    sums |= _by_vmap(model, params, rest, loss, x, y, task) if rest else {}
    return tree.select(sums, wanted)


def _calls(
    model: Model, params: Tree, loss: Loss, x: Tensor, y: Tensor, task: int
) -> dict[str, list[tuple[Tensor, Tensor]]]:
    """Inputs and gradient of the summed loss with respect to the output, for each call of each layer, by its path."""
    seen: list[tuple[str, Tensor, Tensor]] = []

    def hook(path: str) -> Callable[..., Tensor]:
        def add(module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any], output: Tensor) -> Tensor:
            shift = torch.zeros_like(output, requires_grad=True)
            seen.append((path, input_of(args, kwargs).detach(), shift))
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
    """Reshape the gradient with respect to a layer's output to (batch, positions, outputs)."""
    if isinstance(layer.module, nn.Linear):
        return delta.reshape(delta.shape[0], -1, delta.shape[-1])
    return delta.flatten(2).transpose(1, 2)


def _weight(inputs: Tensor, deltas: Tensor) -> Tensor:
    """Sum of squares (outputs, d) for inputs (batch, positions, d) and deltas (batch, positions, outputs)."""
    if inputs.shape[1] == 1:
        return deltas[:, 0].square().T @ inputs[:, 0].square()
    size = max(1, _NUMBERS // (deltas.shape[2] * inputs.shape[2]))
    chunks = zip(deltas.split(size), inputs.split(size), strict=True)
    return torch.stack([(delta.transpose(1, 2) @ x).square().sum(0) for delta, x in chunks]).sum(0)


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
