"""Convolutions and their gradients as products: equal to torch's, and only where inputs are few."""

import itertools

import pytest
import torch
import torch.nn.functional as F

from cfl.core import rng
from cfl.core.optim import same_layout
from cfl.engines.decompositions import FEWER, convolution, convolution_backward

SHAPES = [*itertools.product((1, 3), (1, 2), (0, 1), (1, 2), ((3, 3), (1, 2)))]


@pytest.mark.parametrize(("groups", "stride", "padding", "dilation", "kernel"), SHAPES)
def test_gradients_equal_those_of_torch(groups, stride, padding, dilation, kernel):
    draws = rng.generator(0)
    x = torch.randn(2, 6, 7, 6, dtype=torch.float64, generator=draws)
    weight = torch.randn(240, 6 // groups, *kernel, dtype=torch.float64, generator=draws)
    out = F.conv2d(x, weight, None, stride, padding, dilation, groups)
    grad = torch.randn(out.shape, dtype=torch.float64, generator=draws)
    for mask in ([True, True, True], [True, True, False], [False, True, False]):
        given = grad, x, weight, [240], [stride] * 2, [padding] * 2, [dilation] * 2, False, [0, 0], groups, mask
        found, expected = convolution_backward(*given), torch.ops.aten.convolution_backward(*given)
        for asked, one, other in zip(mask, found, expected, strict=True):
            assert torch.allclose(one, other, rtol=1e-12, atol=1e-12) if asked else one is None


@pytest.mark.parametrize(("groups", "stride", "padding", "dilation", "kernel"), SHAPES)
@pytest.mark.parametrize("outputs", [120, 240])  # for each of 3 groups fewer than the places in some cases, and more
@pytest.mark.parametrize("last", [False, True])
def test_outputs_and_gradients_by_the_input_equal_those_of_torch(
    groups, stride, padding, dilation, kernel, outputs, last
):
    draws = rng.generator(0)
    x = torch.randn(1, 6, 7, 6, dtype=torch.float64, generator=draws)
    weight = torch.randn(outputs, 6 // groups, *kernel, dtype=torch.float64, generator=draws)
    if last:
        weight = weight.contiguous(memory_format=torch.channels_last)
    how = [stride] * 2, [padding] * 2, [dilation] * 2, False, [0, 0], groups
    for bias in (None, torch.randn(outputs, dtype=torch.float64, generator=draws)):
        found, expected = convolution(x, weight, bias, *how), torch.ops.aten.convolution(x, weight, bias, *how)
        few = expected[0, 0].numel() <= FEWER * outputs // groups
        assert torch.allclose(found, expected, rtol=1e-12, atol=1e-12) if few else found is NotImplemented
    grad = torch.randn(expected.shape, dtype=torch.float64, generator=draws)
    given = grad, x, weight, [outputs], *how, [True, True, True]
    found = convolution_backward(*given)
    pairs = zip(found, torch.ops.aten.convolution_backward(*given), strict=True)
    assert all(torch.allclose(one, other, rtol=1e-12, atol=1e-12) for one, other in pairs)
    assert same_layout(weight, found[1])


@pytest.mark.parametrize("last", [False, True])
def test_outputs_keep_the_layout_of_torch(last):
    """A forward may call `view` on them."""
    format = torch.channels_last if last else torch.contiguous_format
    x, weight = torch.ones(2, 3, 2, 2), torch.ones(32, 3, 3, 3).contiguous(memory_format=format)
    for images in (x, x.contiguous(memory_format=torch.channels_last)):
        given = images, weight, None, [1, 1], [1, 1], [1, 1], False, [0, 0], 1
        assert convolution(*given).stride() == torch.ops.aten.convolution(*given).stride()


@pytest.mark.parametrize(
    ("kernel", "padding", "dilation", "side"), [(5, 2, 1, 1), (7, 3, 1, 2), (3, 2, 2, 1), (2, 2, 3, 1)]
)
def test_kernels_that_reach_beyond_the_padding(kernel, padding, dilation, side):
    """Some rows and columns of these kernels meet nothing but padding; all of them in the last case."""
    draws = rng.generator(0)
    x = torch.randn(2, 3, side, side, dtype=torch.float64, generator=draws)
    weight = torch.randn(64, 3, kernel, kernel, dtype=torch.float64, generator=draws)
    how = [1, 1], [padding] * 2, [dilation] * 2, False, [0, 0], 1
    expected = torch.ops.aten.convolution(x, weight, None, *how)
    assert torch.allclose(convolution(x, weight, None, *how), expected, rtol=1e-12, atol=1e-12)
    given = torch.randn(expected.shape, dtype=torch.float64, generator=draws), x, weight, [64], *how, [True, True, True]
    pairs = zip(convolution_backward(*given), torch.ops.aten.convolution_backward(*given), strict=True)
    assert all(torch.allclose(one, other, rtol=1e-12, atol=1e-12) for one, other in pairs)


def test_empty_batches_stay_as_they_are():
    x, weight, how = torch.ones(0, 3, 2, 2), torch.ones(32, 3, 3, 3), ([1, 1], [1, 1], [1, 1], False, [0, 0], 1)
    assert convolution(x, weight, None, *how) is NotImplemented
    assert convolution_backward(torch.ones(0, 32, 2, 2), x, weight, [32], *how, [True] * 3) is NotImplemented


def test_large_images_and_other_convolutions_stay_as_they_are():
    def product(outputs, side, mask=(True, True, False), transposed=False):
        x, grad = torch.ones(1, 3, side, side), torch.ones(1, outputs, side, side)
        given = grad, x, torch.ones(outputs, 3, 1, 1), None, [1, 1], [0, 0], [1, 1], transposed, [0, 0], 1, list(mask)
        return convolution_backward(*given) is not NotImplemented

    assert product(8, side=4)  # 16 places, 8 output channels
    assert not product(7, side=4)
    assert not product(8, side=4, mask=(True, False, False))
    assert not product(8, side=4, transposed=True)
