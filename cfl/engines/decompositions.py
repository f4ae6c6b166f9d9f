"""Convolutions of small images as products of matrices.

In a local step, a deep layer has more weights than inputs to multiply them with. torch's kernels change the memory
layout of all these weights, or multiply them by zeros around the images; products do neither. A product that is the
gradient by the weights can also descend, see `descents`.
"""

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor

# Places are samples x height x width of the output. Products are used
FEW = 2  # for the gradient by the weights, if places <= FEW * output channels
FEWER = 1  # for the output and the gradient by the input, if places <= FEWER * output channels

aten = torch.ops.aten
Pair = Sequence[int]


def convolution(
    x: Tensor,
    weight: Tensor,
    bias: Tensor | None,
    stride: Pair,
    padding: Pair,
    dilation: Pair,
    transposed: bool,
    output_padding: Pair,
    groups: int,
) -> Any:
    """Decompose the operator of that name where inputs are few."""
    if transposed or weight.dim() != 4:
        return NotImplemented
    outputs, span = (
        len(weight) // groups,
        [by * (size - 1) for by, size in zip(dilation, weight.shape[2:], strict=True)],
    )
    sizes = [(x.shape[2 + axis] + 2 * padding[axis] - span[axis] - 1) // stride[axis] + 1 for axis in (0, 1)]
    if len(x) * sizes[0] * sizes[1] > FEWER * outputs:
        return NotImplemented
    patches = _patches(x, weight.shape[2:], stride, padding, dilation, groups)
    found = torch.bmm(patches, _matrices(weight, groups).transpose(1, 2))
    images = found.unflatten(1, (len(x), *sizes)).permute(1, 0, 4, 2, 3).flatten(1, 2)
    return images if bias is None else images + bias[:, None, None]


def convolution_backward(
    grad: Tensor,
    x: Tensor,
    weight: Tensor,
    bias_sizes: Sequence[int] | None,
    stride: Pair,
    padding: Pair,
    dilation: Pair,
    transposed: bool,
    output_padding: Pair,
    groups: int,
    mask: Sequence[bool],
) -> Any:
    """Decompose the operator of that name where inputs are few.

    grad: (samples, outputs, height, width); mask: which gradients are asked for, by input, weight and bias.
    """
    outputs, kernel, places = len(weight) // groups, weight.shape[2:], grad.numel() // grad.shape[1]
    if not mask[1] or transposed or len(kernel) != 2 or places > FEW * outputs:
        return NotImplemented
    grads = grad.unflatten(1, (groups, outputs)).permute(1, 2, 0, 3, 4).reshape(groups, outputs, places)
    products = torch.bmm(grads, _patches(x, kernel, stride, padding, dilation, groups))
    by_weight = products.view(len(weight), *kernel, -1).permute(0, 3, 1, 2)
    by_bias = grad.sum((0, 2, 3)) if mask[2] else None
    if not mask[0]:
        return None, by_weight, by_bias
    if places > FEWER * outputs or max(stride) > 1:
        rest = stride, padding, dilation, transposed, output_padding, groups, [True, False, False]
        return aten.convolution_backward(grad, x, weight, bias_sizes, *rest)[0], by_weight, by_bias
    shares = torch.bmm(grads.transpose(1, 2), _matrices(weight, groups))
    shares = shares.view(groups, len(x), *grad.shape[2:], *kernel, -1).permute(1, 0, 6, 4, 5, 2, 3).flatten(1, 2)
    by_input = sum(
        aten.constant_pad_nd(shares[:, :, row, column], _around(row, column, kernel, padding, dilation))
        for row in range(kernel[0])
        for column in range(kernel[1])
    )
    return by_input, by_weight, by_bias


def _patches(x: Tensor, kernel: Pair, stride: Pair, padding: Pair, dilation: Pair, groups: int) -> Tensor:
    """The inputs of each place: (groups, places, kernel x inputs), in the order of weights with channels last."""
    windows = aten.constant_pad_nd(x, [padding[1], padding[1], padding[0], padding[0]]).permute(0, 2, 3, 1)
    for axis in (0, 1):
        span = dilation[axis] * (kernel[axis] - 1) + 1
        windows = windows.unfold(axis + 1, span, stride[axis])[..., :: dilation[axis]]
    own = windows.unflatten(3, (groups, -1)).permute(3, 0, 1, 2, 5, 6, 4)
    return own.reshape(groups, own.shape[1] * own.shape[2] * own.shape[3], -1)


def _matrices(weight: Tensor, groups: int) -> Tensor:
    """Weights as matrices (groups, outputs, kernel x inputs): a view of those with channels last."""
    return weight.permute(0, 2, 3, 1).reshape(groups, len(weight) // groups, -1)


def _around(row: int, column: int, kernel: Pair, padding: Pair, dilation: Pair) -> list[int]:
    """The padding of what a kernel's row and column add to the gradient by the input, for stride 1."""
    sides = [
        (dilation[axis] * at - padding[axis], dilation[axis] * (kernel[axis] - 1 - at) - padding[axis])
        for axis, at in ((1, column), (0, row))
    ]
    return [side for pair in sides for side in pair]


DECOMPOSITIONS: dict[Any, Callable[..., Any]] = {
    aten.convolution.default: convolution,
    aten.convolution_backward.default: convolution_backward,
}
