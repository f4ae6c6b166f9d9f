"""Layers as matrices that multiply their inputs: widths, input vectors, and the projection of a step of the model.

With `augment`, a layer's bias counts as one more column of its weight, whose input is the constant 1: the guarantee of
a projection then holds for the layer's output, not only for the weight's part of it.
"""

from collections.abc import Collection, Iterable, Mapping, Sequence

import torch
import torch.nn.functional as F
from torch import Tensor

from cfl.models.handle import Layer, Model
from cfl.subspace.basis import remove
from cfl.tree import Tree


def names(layer: Layer, augment: bool) -> list[str]:
    """Names in the tree of what a projection of this layer covers."""
    return [layer.weight, layer.bias] if augment and layer.bias else [layer.weight]


def width(layer: Layer, augment: bool) -> int:
    """Length d of the layer's input vectors."""
    return layer.size + (len(names(layer, augment)) - 1)


def input_vectors(inputs: Tensor, layer: Layer, augment: bool) -> Tensor:
    """The layer's inputs (batch, positions, size), with a constant 1 appended for an augmented bias."""
    return F.pad(inputs, (0, 1), value=1.0) if width(layer, augment) > layer.size else inputs


def project(step: Tree, bases: Mapping[str, Tensor], layers: Iterable[Layer], augment: bool) -> Tree:
    """A step (or a gradient) of the weights, less what it does to inputs in the layers' bases: P(step) (FOT, eq. 6).

    bases: layer name to (d, k). Layers without a basis, with an empty one, or not in `step` keep their very tensors;
    one whose basis is full gets zeros. The projection runs in float64.
    """
    result = dict(step)
    for layer in layers:
        basis, own = bases.get(layer.name), names(layer, augment)
        if basis is None or basis.shape[1] == 0 or any(name not in step for name in own):
            continue
        columns = [_rows(step[name], layer).double() for name in own]
        rows = torch.cat(columns, dim=1)
        rows = torch.zeros_like(rows) if basis.shape[1] == basis.shape[0] else remove(rows, basis)
        parts = rows.split([column.shape[1] for column in columns], dim=1)
        for name, part in zip(own, parts, strict=True):
            result[name] = layer.put(result[name], part)
    return result


def project_step(old: Tree, new: Tree, bases: Mapping[str, Tensor], layers: Iterable[Layer], augment: bool) -> Tree:
    """`new`, less what the step from `old` does to inputs in the layers' bases: W + P(W' - W) (FOT, eq. 6-7).

    Leaves that no basis covers keep the very tensors of `new`; layers whose basis is full stay at `old`.
    """
    bound = [layer for layer in layers if layer.name in bases and bases[layer.name].shape[1]]
    taken = {name for layer in bound for name in names(layer, augment) if name in new}
    step = {name: new[name].double() - old[name].double() for name in taken}
    moved = project(step, bases, bound, augment)
    return {**new, **{name: (old[name].double() + leaf).to(new[name].dtype) for name, leaf in moved.items()}}


def covered(model: Model, layers: Sequence[Layer], frozen: Collection[str], augment: bool) -> list[str]:
    """What a projection of these layers protects of a model, what is frozen, and what neither: lines for the user."""
    projected = {name for layer in layers for name in names(layer, augment)}
    heads = set(model.head(0)) if model.multi_head else set()
    groups = {
        "projected": [f"{'+'.join(names(layer, augment))} (d={width(layer, augment)})" for layer in layers],
        "frozen after the first task": sorted(set(frozen) & set(model.trainable(0)) - heads),
        "not protected, free to change in every task": sorted({*model.trainable(0)} - projected - {*frozen} - heads),
        "one a task, not projected": ["heads"] if heads else [],
    }
    return [f"{title}: {', '.join(members)}" for title, members in groups.items() if members]


def _rows(leaf: Tensor, layer: Layer) -> Tensor:
    """The group's rows of a weight (outputs, d), or of a bias (outputs, 1)."""
    return leaf[layer.rows].reshape(layer.rows.stop - layer.rows.start, -1)
