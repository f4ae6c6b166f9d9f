"""Gradients of convolutions as products of matrices, for small images.

In a local step, a deep layer has more weights than inputs to multiply them with. torch's kernel changes the memory
layout of all these weights, the product does not. The product can also descend, see `descents`.
"""

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

FEW = 2  # inputs are few if places <= FEW * output channels, where places are samples x height x width of the output

aten = torch.ops.aten


def convolution_backward(
    grad: Tensor,
    x: Tensor,
    weight: Tensor,
    bias_sizes: Sequence[int] | None,
    stride: Sequence[int],
    padding: Sequence[int],
    dilation: Sequence[int],
    transposed: bool,
    output_padding: Sequence[int],
    groups: int,
    mask: Sequence[bool],
) -> Any:
    """Decompose the operator of that name where inputs are few: compute the gradient by the weights as a product.

    grad: (samples, outputs, height, width); mask: which gradients are asked for, by input, weight and bias.
    """
    outputs, kernel, places = len(weight) // groups, weight.shape[2:], grad.numel() // grad.shape[1]
    if not mask[1] or transposed or len(kernel) != 2 or places > FEW * outputs:
        return NotImplemented
    patches = aten.im2col(x, kernel, dilation, padding, stride)  # (samples, inputs x kernel, height x width)
    factor = patches.unflatten(1, (groups, -1)).permute(1, 0, 3, 2).reshape(groups, places, -1)
    grads = grad.flatten(2).unflatten(1, (groups, outputs)).permute(1, 2, 0, 3).reshape(groups, outputs, places)
    by_weight = torch.bmm(grads, factor).view(weight.shape)
    if not (mask[0] or mask[2]):
        return None, by_weight, None
    by_input, _, by_bias = aten.convolution_backward(
        grad,
        x,
        weight,
        bias_sizes,
        stride,
        padding,
        dilation,
        transposed,
        output_padding,
        groups,
        [mask[0], False, mask[2]],
    )
    return by_input, by_weight, by_bias


DECOMPOSITIONS = {aten.convolution_backward.default: convolution_backward}
