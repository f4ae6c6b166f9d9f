"""Convolutions of small images as products of matrices.

In a local step, a deep layer has more weights than inputs to multiply them with. torch's kernels change the memory
layout of all these weights, or multiply them by the zeros of the padding; products do neither. A product that is the
gradient by the weights can also descend, see `descents`. Products keep the layout that torch's kernels would give.
"""

import itertools
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor

from cfl.models.memory_format import is_channels_last

# Places are samples x height x width of the output.
FEW = 2  # the gradient by the weights is a product if places <= FEW * output channels
FEWER = 1  # the output, and the gradient by the input, are products if places <= FEWER * output channels

aten = torch.ops.aten
Pair = Sequence[int]


class How(NamedTuple):
    """How a convolution moves its kernel: the last arguments of torch's operators, in their order."""

    stride: Pair
    padding: Pair
    dilation: Pair
    transposed: bool
    output_padding: Pair
    groups: int


def convolution(x: Tensor, weight: Tensor, bias: Tensor | None, *rest: Any) -> Any:
    """Decompose the operator of that name where inputs are few. rest: fields of `How`."""
    how = How(*rest)
    if how.transposed or weight.dim() != 4 or not len(x):
        return NotImplemented
    outputs = len(weight) // how.groups
    span = [by * (size - 1) for by, size in zip(how.dilation, weight.shape[2:], strict=True)]
    sizes = [(x.shape[2 + axis] + 2 * how.padding[axis] - span[axis] - 1) // how.stride[axis] + 1 for axis in (0, 1)]
    if len(x) * sizes[0] * sizes[1] > FEWER * outputs:
        return NotImplemented
    last = is_channels_last(weight)
    patches = _patches(x, weight.shape[2:], how, last)
    found = torch.bmm(patches, _matrices(weight, how.groups, last).transpose(1, 2))
    images = found.unflatten(1, (len(x), *sizes)).permute(1, 0, 4, 2, 3).flatten(1, 2)
    if not (last or is_channels_last(x)):
        images = images.contiguous()
    return images if bias is None else images + bias[:, None, None]


def convolution_backward(grad: Tensor, x: Tensor, weight: Tensor, bias_sizes: Pair | None, *rest: Any) -> Any:
    """Decompose the operator of that name where inputs are few.

    grad: (samples, outputs, height, width); rest: fields of `How`, then which gradients are asked for, by input, weight
    and bias.
    """
    how, mask, groups = How(*rest[:-1]), rest[-1], rest[-2]
    outputs, kernel, places = len(weight) // groups, weight.shape[2:], grad.numel() // grad.shape[1]
    if not mask[1] or how.transposed or len(kernel) != 2 or not 0 < places <= FEW * outputs:
        return NotImplemented
    last = is_channels_last(weight)
    grads = grad.unflatten(1, (groups, outputs)).permute(1, 2, 0, 3, 4).reshape(groups, outputs, places)
    products = torch.bmm(grads, _patches(x, kernel, how, last))
    by_weight = products.view(len(weight), *kernel, -1).permute(0, 3, 1, 2) if last else products.view(weight.shape)
    by_bias = grad.sum((0, 2, 3)) if mask[2] else None
    if not mask[0]:
        return None, by_weight, by_bias
    if places > FEWER * outputs or max(how.stride) > 1:
        by_input = aten.convolution_backward(grad, x, weight, bias_sizes, *how, [True, False, False])[0]
        return by_input, by_weight, by_bias
    shares = torch.bmm(grads.transpose(1, 2), _matrices(weight, groups, last))
    sizes = (*kernel, -1) if last else (-1, *kernel)
    order = (6, 4, 5) if last else (4, 5, 6)
    shares = shares.view(groups, len(x), *grad.shape[2:], *sizes).permute(1, 0, *order, 2, 3).flatten(1, 2)
    terms = [
        aten.constant_pad_nd(shares[:, :, row, column], margins)
        for row, column in itertools.product(*map(range, kernel))
        if (margins := _margins(row, column, grad.shape[2:], kernel, how))
    ]
    return sum(terms) if terms else torch.zeros_like(x), by_weight, by_bias


def _patches(x: Tensor, kernel: Pair, how: How, last: bool) -> Tensor:
    """The inputs of each place: (groups, places, inputs x kernel), or (groups, places, kernel x inputs) if `last`."""
    stride, padding, dilation, groups = how.stride, how.padding, how.dilation, how.groups
    windows = aten.constant_pad_nd(x, [padding[1], padding[1], padding[0], padding[0]]).permute(0, 2, 3, 1)
    for axis in (0, 1):
        span = dilation[axis] * (kernel[axis] - 1) + 1
        windows = windows.unfold(axis + 1, span, stride[axis])[..., :: dilation[axis]]
    own = windows.unflatten(3, (groups, -1)).permute(3, 0, 1, 2, *((5, 6, 4) if last else (4, 5, 6)))
    return own.reshape(groups, own.shape[1] * own.shape[2] * own.shape[3], -1)


def _matrices(weight: Tensor, groups: int, last: bool) -> Tensor:
    """Views of weights as matrices: (groups, outputs, inputs x kernel), or kernel x inputs with channels last."""
    return (weight.permute(0, 2, 3, 1) if last else weight).reshape(groups, len(weight) // groups, -1)


def _margins(row: int, column: int, size: Pair, kernel: Pair, how: How) -> list[int]:
    """The padding of what a kernel's row and column add to the gradient by the input, for stride 1.

    size: of the output. Empty if all of it is outside of the image.
    """
    sides = [
        [how.dilation[axis] * taps - how.padding[axis] for taps in (at, kernel[axis] - 1 - at)]
        for axis, at in ((1, column), (0, row))
    ]
    inside = all(size[axis] > -min(pair) for axis, pair in zip((1, 0), sides, strict=True))
    return [side for pair in sides for side in pair] if inside else []


DECOMPOSITIONS: dict[Any, Callable[..., Any]] = {
    aten.convolution.default: convolution,
    aten.convolution_backward.default: convolution_backward,
}
