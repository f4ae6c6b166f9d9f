"""Conversions of convolutions' weights before a compiled step: the same results, and each weight converted once."""

import torch
import torch.nn.functional as F
from torch.fx.experimental.proxy_tensor import make_fx

from cfl.core import rng
from cfl.engines.conversions import converting, take_out_conversions, with_conversions


def taken_out(work, given):
    """Results of a trace as it is and without its conversions, the places of what they convert, and how many stay."""
    plain, other = (make_fx(work, tracing_mode="fake")(*given) for _ in range(2))
    places = take_out_conversions(other)
    stay = other.graph.find_nodes(op="call_function", target=torch.ops.aten._to_copy.default)
    return plain(*given), converting(other, places)(*given), places, len(stay)


def test_a_weight_that_two_operations_read():
    """A block's weights (1, outputs, inputs, height, width), with channels last, seen through views."""

    def work(x, weight):
        low = weight.squeeze(0).to(torch.bfloat16)
        again = weight.squeeze(0).transpose(0, 1).to(torch.bfloat16)
        return [F.conv2d(x.to(torch.bfloat16), low), again]

    draws = rng.generator(0)
    weight = torch.randn(4, 3, 2, 2, generator=draws).contiguous(memory_format=torch.channels_last)[None]
    expected, found, places, stay = taken_out(work, [torch.randn(2, 3, 4, 4, generator=draws), weight])
    assert sorted(places) == [0, 1] and not stay
    assert all(torch.equal(one, other) for one, other in zip(found, expected, strict=True))
    assert with_conversions([weight], [0])[1].stride() == weight.stride()


def test_what_stays():
    """Conversions of matrices, of what the step computes, and to other types; and all, where the trace writes."""

    def work(matrix, images):
        return [matrix.to(torch.bfloat16), (images + 1).to(torch.bfloat16), images.to(torch.float64)]

    def writing(matrix, images):
        images[0].mul_(2)  # through a view, so that the conversion still reads the input
        return [images.to(torch.bfloat16)]

    given = [torch.ones(3, 2), torch.ones(1, 2, 3, 3)]
    for kind, count in ((work, 3), (writing, 1)):
        expected, found, places, stay = taken_out(kind, [leaf.clone() for leaf in given])
        assert not places and stay == count
        if kind is work:
            assert all(torch.equal(one, other) for one, other in zip(found, expected, strict=True))
