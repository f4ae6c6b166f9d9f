"""Layers as matrices that multiply their inputs: widths, input vectors, and projections of a model's update.

With `augment`, a layer's bias is an additional column of its weight whose input is the constant 1. The guarantee of a
projection then holds for the layer's whole output; without it, for the product of weight and input only.
"""

from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence

import torch
import torch.nn.functional as F
from torch import Tensor

from cfl.core import Tree, warn
from cfl.methods.subspace.basis import component, full, remove
from cfl.models import Layer, Model
from cfl.models.layers import KINDS


def names(layer: Layer, augment: bool) -> list[str]:
    """Names in the tree of the parameters that a projection of this layer covers."""
    return [layer.weight, layer.bias] if augment and layer.bias else [layer.weight]


def width(layer: Layer, augment: bool) -> int:
    """Length d of the layer's input vectors."""
    return layer.size + (len(names(layer, augment)) - 1)


def input_vectors(inputs: Tensor, layer: Layer, augment: bool) -> Tensor:
    """Append the constant 1 of an augmented bias to the layer's inputs (batch, positions, size)."""
    return F.pad(inputs, (0, 1), value=1.0) if width(layer, augment) > layer.size else inputs


def project(step: Tree, bases: Mapping[str, Tensor], layers: Iterable[Layer], augment: bool) -> Tree:
    """Remove from a weight update (or gradient) its component in the layers' bases: P(step) (FOT, eq. 6).

    bases: layer name to (d, k). Layers without a basis, with an empty one or not in `step` keep their tensor objects;
    layers with a full basis get zeros. The projection is computed in the finer precision of update and basis.
    """
    result = dict(step)
    for layer, basis, own in _covered_layers(step, bases, layers, augment):
        rows = _joint_weight(step, layer, own, basis.dtype)
        _store(result, layer, own, torch.zeros_like(rows) if full(basis) else remove(rows, basis))
    return result


def project_step(old: Tree, new: Tree, bases: Mapping[str, Tensor], layers: Iterable[Layer], augment: bool) -> Tree:
    """Project the step from `old` to `new` off the layers' bases: W + P(W' - W) (FOT, eq. 6-7).

    Leaves that no basis covers keep the tensor objects of `new`. Layers with a full basis keep the values of `old`.
    """
    result = dict(new)
    for layer, basis, own in _covered_layers(new, bases, layers, augment):
        before, after = (_joint_weight(leaves, layer, own, basis.dtype) for leaves in (old, new))
        _store(result, layer, own, before if full(basis) else after - component(after - before, basis))
    return result


def covered(model: Model, layers: Sequence[Layer], frozen: Collection[str], augment: bool) -> list[str]:
    """Lines for the user: parameters of a model that are projected, frozen, and neither.

    Warns if the body, all but the heads, has no layer to project and leaves parameters free.
    """
    projected = {name for layer in layers for name in names(layer, augment)}
    heads = set(model.head(0)) if model.multi_head else set()
    moving = set(model.trainable(0)) - model.frozen - heads
    free = sorted(moving - projected - set(frozen))
    head = str(model.classifier)
    if all(layer.path == head for layer in model.layers) and any(not name.startswith(f"{head}.") for name in free):
        warn(
            f"apart from heads, the model has no layer to project ({KINDS}): its other parameters are free to "
            "change in every task"
        )
    groups = {
        "projected": [f"{'+'.join(names(layer, augment))} (d={width(layer, augment)})" for layer in layers],
        "projected, but outputs for earlier inputs may change, since the layer has a forward of its own": [
            layer.name for layer in layers if layer.own_forward
        ],
        "frozen after the first task": sorted(moving & set(frozen)),
        "not protected, free to change in every task": free,
        "one per task, not projected": ["heads"] if heads else [],
    }
    return [f"{title}: {', '.join(members)}" for title, members in groups.items() if members]


def _covered_layers(
    leaves: Tree, bases: Mapping[str, Tensor], layers: Iterable[Layer], augment: bool
) -> Iterator[tuple[Layer, Tensor, list[str]]]:
    """Layers with all their leaves in `leaves` and a basis that is not empty, with the basis and the leaves' names."""
    for layer in layers:
        basis, own = bases.get(layer.name), names(layer, augment)
        if basis is not None and basis.shape[1] and all(name in leaves for name in own):
            yield layer, basis, own


def _joint_weight(leaves: Tree, layer: Layer, own: Sequence[str], dtype: torch.dtype) -> Tensor:
    """A layer's weight (outputs, d) with an augmented bias as the last column, in at least the precision `dtype`."""
    columns = [leaves[name][layer.rows].reshape(layer.rows.stop - layer.rows.start, -1) for name in own]
    rows = columns[0] if len(columns) == 1 else torch.cat(columns, dim=1)
    return rows.to(torch.promote_types(rows.dtype, dtype))


def _store(leaves: Tree, layer: Layer, own: Sequence[str], rows: Tensor) -> None:
    """Write rows (outputs, d) as from `_joint_weight` back into a layer's leaves."""
    for name, part in zip(own, rows.tensor_split([layer.size], dim=1), strict=False):
        leaves[name] = layer.put(leaves[name], part)
