"""Products of three matrices: the same value in either order, and the cheaper order is taken."""

import pytest
import torch
from torch.fx.experimental.proxy_tensor import make_fx

from cfl.core import rng
from cfl.engines.products import reorder


def after(work, *shapes):
    """The largest difference that reordering makes in float64, and multiplications before and after it."""
    draws = rng.generator(0)
    given = [torch.randn(shape, dtype=torch.float64, generator=draws) for shape in shapes]
    expected, graph = work(*given), make_fx(work, tracing_mode="fake")(*given)
    before = multiplications(graph)
    reorder(graph)
    return float((graph(*given) - expected).abs().max()), before, multiplications(graph)


def multiplications(graph):
    return sum(
        node.args[0].meta["val"].numel() * node.args[1].meta["val"].shape[2]
        for node in graph.graph.find_nodes(op="call_function", target=torch.ops.aten.bmm.default)
    )


@pytest.mark.parametrize(
    ("batch", "expected"),
    [
        (2, 2 * (2 * 7 * 7 + 5 * 2 * 7)),  # g^T (x P)
        (20, 2 * (5 * 20 * 7 + 5 * 7 * 7)),  # (g^T x) P, as written
    ],
)
def test_a_gradient_by_a_matrix(batch, expected):
    """Two clients, inputs of 7 numbers, 5 outputs; P (7, 7)."""

    def work(g, x, p):
        return torch.bmm(torch.bmm(g.transpose(1, 2), x), p)

    difference, _, found = after(work, (2, batch, 5), (2, batch, 7), (2, 7, 7))
    assert difference < 1e-12 and found == expected


def test_a_projected_gradient():
    """g - (g B) B^T: the gradient g = d^T x stays, since it is used twice; its projection is d^T ((x B) B^T)."""

    def work(d, x, basis):
        g = torch.bmm(d.transpose(1, 2), x)
        return g - torch.bmm(torch.bmm(g, basis), basis.transpose(1, 2))

    difference, before, found = after(work, (1, 2, 50), (1, 2, 30), (1, 30, 10))
    assert difference < 1e-12
    assert before == 50 * 2 * 30 + 2 * 50 * 30 * 10
    assert found == 2 * 50 * 2 * 30 + 2 * 2 * 30 * 10


def test_traces_that_write_in_place_stay():
    """The first product is read before the write in the new order, after it in the old one."""

    def work(a, b, c):
        h = torch.bmm(a, b)
        h[0].mul_(2)
        return torch.bmm(h, c)

    difference, before, found = after(work, (1, 50, 2), (1, 2, 50), (1, 50, 2))
    assert difference < 1e-12 and found == before
