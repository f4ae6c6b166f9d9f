"""Conversions in the order of memory: the same values, and the same layout of the results."""

import torch
from torch.fx.experimental.proxy_tensor import make_fx

from cfl.core import rng
from cfl.engines.conversions import convert_in_order

LAST = torch.channels_last


def converted(leaf):
    """A trace that converts a leaf to bfloat16 and doubles it, the result, and the leaf that the conversion sees."""

    def work(leaf):
        return [leaf.to(torch.bfloat16) * 2]

    graph = make_fx(work, tracing_mode="fake")(leaf)
    convert_in_order(graph)
    (node,) = graph.graph.find_nodes(op="call_function", target=torch.ops.aten._to_copy.default)
    return graph(leaf)[0], node.args[0].meta["val"]


def test_weights_with_channels_last():
    last = torch.randn(5, 4, 3, 3, generator=rng.generator(0)).contiguous(memory_format=LAST)[None]
    for given in (last, last[0]):
        found, seen = converted(given)
        assert seen.is_contiguous() and not given.is_contiguous()
        assert torch.equal(found, given.to(torch.bfloat16) * 2)
        assert found.stride() == given.stride()


def test_what_stays():
    """Contiguous tensors, matrices in any layout, and tensors with gaps."""
    leaf = torch.randn(4, 6, 3, 3, generator=rng.generator(0))
    for given in (leaf, leaf[..., 0, 0].t(), leaf.contiguous(memory_format=LAST)[:, ::2]):
        found, seen = converted(given)
        assert seen.stride() == given.stride()
        assert torch.equal(found, given.to(torch.bfloat16) * 2)
