"""Layers as matrices that multiply their inputs: widths, input vectors, and the projection of a step of the model.

With `augment`, a layer's bias counts as one more column of its weight, whose input is the constant 1: the guarantee of
a projection then holds for the layer's output, not only for the weight's part of it.
"""

from collections.abc import Iterable, Mapping

import torch
import torch.nn.functional as F
from torch import Tensor

from cfl.models.handle import Layer
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


def project_step(old: Tree, new: Tree, bases: Mapping[str, Tensor], layers: Iterable[Layer], augment: bool) -> Tree:
    """`new`, less what the step from `old` does to inputs in the layers' bases: W + P(W' - W) (FOT, eq. 6-7).

    bases: layer name to (d, k). Layers with an empty basis keep the very tensors of `new`; one whose basis is full
    stays at `old`. The projection runs in float64.
    """
    result = dict(new)
    for layer in layers:
        basis = bases[layer.name]
        if basis.shape[1] == 0:
            continue
        covered = names(layer, augment)
        columns = [_rows(new[name], layer).double() - _rows(old[name], layer).double() for name in covered]
        step = torch.cat(columns, dim=1)
        step = torch.zeros_like(step) if basis.shape[1] == basis.shape[0] else remove(step, basis)
        parts = step.split([column.shape[1] for column in columns], dim=1)
        for name, part in zip(covered, parts, strict=True):
            whole = result[name].clone()
            before = old[name][layer.rows]
            whole[layer.rows] = (before.double() + part.reshape(before.shape)).to(before.dtype)
            result[name] = whole
    return result


def _rows(leaf: Tensor, layer: Layer) -> Tensor:
    """The group's rows of a weight (outputs, d), or of a bias (outputs, 1)."""
    return leaf[layer.rows].reshape(layer.rows.stop - layer.rows.start, -1)
