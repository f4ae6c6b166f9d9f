"""Descents along products: the same update as by a gradient in memory, and what keeps its gradient."""

import pytest
import torch
from torch.fx.experimental.proxy_tensor import make_fx

from cfl.core import rng
from cfl.engines.descents import Descent, descending, take_out

LR = torch.tensor(0.25, dtype=torch.float64)


def leaves(*shapes):
    draws = rng.generator(0)
    return [torch.randn(shape, generator=draws) for shape in shapes]


def update(params, grads, lr, decay=0.0):
    torch._fused_sgd_(
        params, grads, [], weight_decay=decay, momentum=0.0, lr=lr, dampening=0.0, nesterov=False, maximize=False,
        is_first_step=False,
    )  # fmt: skip


def traced(work, given):
    """A trace of work, without descents along products and with them, and these descents."""
    plain, other = (make_fx(work, tracing_mode="fake")(*given) for _ in range(2))
    descents = take_out(other)
    return plain, descending(other, descents), descents


def both(work, given):
    """Results and inputs after a step by either trace, and the descents."""
    plain, run, descents = traced(work, given)
    ends = []
    for each in (plain, run):
        copies = [leaf.clone() for leaf in given]
        ends.append([*each(*copies), *copies])
    return (*ends, descents)


@pytest.mark.parametrize("decay", [0.0, 0.5])
def test_a_layers_step(decay):
    """Weights (clients, out, in) by inputs (clients, batch, in): the gradient is g^T x, and g needs the old weights."""

    def work(weight, bias, x, g, lr):
        slope = torch.bmm(g.transpose(1, 2), x)
        back = torch.bmm(g, weight)
        update([weight, bias], [slope, g.sum(1)], lr, decay)
        return [back, g.sum()]

    given = [*leaves((2, 3, 4), (2, 3), (2, 5, 4), (2, 5, 3)), LR]
    expected, found, descents = both(work, given)
    assert descents == [Descent(param=0, lr=4, decay=decay)]  # the bias's gradient is no product
    weight, bias, x, g, _ = given
    by_hand = weight - 0.25 * (torch.einsum("bno,bni->boi", g, x) + decay * weight)
    assert torch.allclose(found[2], by_hand, atol=1e-6)
    assert len(found) == len(expected)
    assert all(torch.allclose(one, other, atol=1e-6) for one, other in zip(found, expected, strict=True))
    assert not torch.equal(found[2], weight) and not torch.equal(found[3], bias)


def test_gradients_that_others_read_stay():
    def work(weight, x, g, lr):
        slope = torch.bmm(g.transpose(1, 2), x)
        update([weight], [slope], lr)
        return [slope.norm()]

    expected, found, descents = both(work, [*leaves((2, 3, 4), (2, 5, 4), (2, 5, 3)), LR])
    assert not descents
    assert all(torch.equal(one, other) for one, other in zip(found, expected, strict=True))


def test_sums_of_products_stay():
    """A layer that runs twice has the sum of two products as its gradient."""

    def work(weight, x, g, lr):
        update([weight], [torch.bmm(g.transpose(1, 2), x) + torch.bmm(g.transpose(1, 2), x * x)], lr)
        return [g.sum()]

    assert not traced(work, [*leaves((2, 3, 4), (2, 5, 4), (2, 5, 3)), LR])[2]


def test_a_square():
    """g^T g has one factor twice."""

    def work(weight, g, lr):
        update([weight], [torch.bmm(g.transpose(1, 2), g)], lr)
        return [g.sum()]

    expected, found, _ = both(work, [*leaves((2, 3, 3), (2, 5, 3)), LR])
    assert torch.allclose(found[1], expected[1], atol=1e-6)


def test_factors_in_bfloat16():
    """The gradient is turned, converted and turned back, as autocast leaves it; its sum is then one in float32."""

    def work(weight, x, g, lr):
        slope = torch.bmm(g.transpose(1, 2), x).transpose(1, 2).to(torch.float32).transpose(1, 2)
        update([weight], [slope], lr)
        return [g.sum()]

    for batch, count in ((32, 1), (33, 0)):  # of large batches the product stays in bfloat16
        weight, x, g = leaves((2, 3, 4), (2, batch, 4), (2, batch, 3))
        x, g = x.bfloat16(), g.bfloat16()
        _, found, descents = both(work, [weight, x, g, LR])
        assert len(descents) == count
        exact = weight - 0.25 * torch.einsum("bno,bni->boi", g.float(), x.float())
        error = (found[1] - exact).abs().max()
        assert error < 1e-5 if count else 1e-4 < error < 0.1


def test_a_convolutions_weights():
    """A gradient (clients, outputs, inputs, height, width) that is a product (clients, outputs, the rest)."""

    def work(weight, x, g, lr):
        update([weight], [torch.bmm(g.transpose(1, 2), x).view(weight.shape)], lr)
        return [g.sum()]

    given = [*leaves((2, 3, 2, 2, 1), (2, 5, 4), (2, 5, 3)), LR]
    expected, found, descents = both(work, given)
    assert len(descents) == 1
    assert all(torch.allclose(one, other, atol=1e-6) for one, other in zip(found, expected, strict=True))


def test_a_convolutions_weights_with_channels_last():
    """The product (clients, outputs, height x width x inputs) has the order of the weights in memory."""

    def work(weight, x, g, lr):
        slope = torch.bmm(g.transpose(1, 2), x).view(1, 3, 2, 2, 5).permute(0, 1, 4, 2, 3)
        update([weight.permute(0, 1, 3, 4, 2)], [slope.permute(0, 1, 3, 4, 2)], lr)
        return [g.sum()]

    weight, x, g = leaves((1, 3, 5, 2, 2), (1, 6, 20), (1, 6, 3))
    last = weight[0].contiguous(memory_format=torch.channels_last)[None]
    expected, found, descents = both(work, [last, x, g, LR])
    assert len(descents) == 1
    assert all(torch.allclose(one, other, atol=1e-6) for one, other in zip(found, expected, strict=True))
    assert found[1].stride() == last.stride()
    assert not traced(work, [weight, x, g, LR])[2]  # contiguous weights have another order than the product


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_turned_products_stay(dtype):
    def work(weight, x, g, lr):
        turned = torch.bmm(g.transpose(1, 2), x).transpose(1, 2)
        update([weight], [turned.to(torch.float32, memory_format=torch.contiguous_format)], lr)
        return [g.sum()]

    weight, x, g = leaves((2, 4, 4), (2, 5, 4), (2, 5, 4))
    assert not traced(work, [weight, x.to(dtype), g.to(dtype), LR])[2]


def test_factors_that_are_weights_stay():
    """The weight of y = x (b a)^T is a product of two parameters: each is a factor of the other's gradient."""

    def work(a, b, x, g, lr):
        slope = torch.bmm(g.transpose(1, 2), x)  # by the product (out, in)
        update([a, b], [torch.bmm(b.transpose(1, 2), slope), torch.bmm(slope, a.transpose(1, 2))], lr)
        return [g.sum()]

    given = [*leaves((2, 2, 4), (2, 3, 2), (2, 5, 4), (2, 5, 3)), LR]
    expected, found, descents = both(work, given)
    assert not descents
    assert all(torch.allclose(one, other, atol=1e-6) for one, other in zip(found, expected, strict=True))


def test_parts_of_weights_and_rates_that_are_computed_stay():
    """A descent changes the whole of an input, at a rate that is an input."""

    def part(weight, x, g, lr):
        update([weight[1:]], [torch.bmm(g.transpose(1, 2), x)], lr)
        return [g.sum()]

    def halved(weight, x, g, lr):
        update([weight], [torch.bmm(g.transpose(1, 2), x)], lr / 2)
        return [g.sum()]

    weight, x, g = leaves((3, 3, 4), (3, 5, 4), (3, 5, 3))
    slope = torch.einsum("bno,bni->boi", g, x)
    for work, first, rate in ((part, 1, 0.25), (halved, 0, 0.125)):
        _, found, descents = both(work, [weight, x[first:], g[first:], LR])
        by_hand = torch.cat([weight[:first], weight[first:] - rate * slope[first:]])
        assert not descents and torch.allclose(found[1], by_hand, atol=1e-6)


def test_factors_that_are_permuted_weights_stay():
    """The update sees the weight in the order of memory; its slope has the weight itself as a factor."""

    def work(weight, g, lr):
        update([weight.permute(0, 2, 1)], [torch.bmm(g, weight).view(2, 4, 4)], lr)
        return [g.sum()]

    weight, g = leaves((2, 4, 4), (2, 4, 4))
    last = weight.transpose(1, 2).contiguous().transpose(1, 2)
    expected, found, descents = both(work, [last, g, LR])
    assert not descents and torch.allclose(found[1], expected[1], atol=1e-6)


def test_conversions_that_lose_something_stay():
    """A hook that rounds gradients to whole numbers."""

    def work(weight, x, g, lr):
        update([weight], [torch.bmm(g.transpose(1, 2), x).to(torch.int8).to(torch.float32)], lr)
        return [g.sum()]

    assert not traced(work, [*leaves((2, 3, 4), (2, 5, 4), (2, 5, 3)), LR])[2]
