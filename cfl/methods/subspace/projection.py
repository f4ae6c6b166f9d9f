"""Layers as matrices that multiply their inputs: widths, input vectors, and the projection of a step of the model.

With `augment`, a layer's bias counts as one more column of its weight, whose input is the constant 1: the guarantee of
a projection then holds for the layer's output, not only for the weight's part of it.
"""

from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence

import torch
import torch.nn.functional as F
from torch import Tensor

from cfl.core.tree import Tree
from cfl.methods.subspace.basis import component, full, remove
from cfl.models.handle import Layer, Model


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
    one whose basis is full gets zeros. The projection runs in the finer precision of the two.
    """
    result = dict(step)
    for layer, basis, own in _bound(step, bases, layers, augment):
        rows = _rows(step, layer, own, basis.dtype)
        _put(result, layer, own, torch.zeros_like(rows) if full(basis) else remove(rows, basis))
    return result


def project_step(old: Tree, new: Tree, bases: Mapping[str, Tensor], layers: Iterable[Layer], augment: bool) -> Tree:
    """`new`, less what the step from `old` does to inputs in the layers' bases: W + P(W' - W) (FOT, eq. 6-7).

    Leaves that no basis covers keep the very tensors of `new`; layers whose basis is full stay at `old`.
    """
    result = dict(new)
    for layer, basis, own in _bound(new, bases, layers, augment):
        before, after = (_rows(leaves, layer, own, basis.dtype) for leaves in (old, new))
        _put(result, layer, own, before if full(basis) else after - component(after - before, basis))
    return result


def step_energies(old: Tree, new: Tree, layers: Iterable[Layer], augment: bool) -> Tree:
    """|W' - W|^2 of each layer by name, () in float64."""
    energies = {}
    for layer in layers:
        moved = (new[name][layer.rows] - old[name][layer.rows] for name in names(layer, augment))
        energies[layer.name] = torch.stack([part.square().sum() for part in moved]).sum().double()
    return energies


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


def _bound(
    leaves: Tree, bases: Mapping[str, Tensor], layers: Iterable[Layer], augment: bool
) -> Iterator[tuple[Layer, Tensor, list[str]]]:
    """The layers whose leaves are there and whose bases are not empty, with their bases and the leaves' names."""
    for layer in layers:
        basis, own = bases.get(layer.name), names(layer, augment)
        if basis is not None and basis.shape[1] and all(name in leaves for name in own):
            yield layer, basis, own


def _rows(leaves: Tree, layer: Layer, own: Sequence[str], dtype: torch.dtype) -> Tensor:
    """The group's rows (outputs, d) of a weight, with its bias as a last column; dtype: the coarsest they may have."""
    columns = [leaves[name][layer.rows].reshape(layer.rows.stop - layer.rows.start, -1) for name in own]
    rows = columns[0] if len(columns) == 1 else torch.cat(columns, dim=1)
    return rows.to(torch.promote_types(rows.dtype, dtype))


def _put(leaves: Tree, layer: Layer, own: Sequence[str], rows: Tensor) -> None:
    """Replace what `_rows` gives; the bias is the last column."""
    for name, part in zip(own, rows.tensor_split([layer.size], dim=1), strict=False):
        leaves[name] = layer.put(leaves[name], part)
