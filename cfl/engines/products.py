"""Products of three matrices in the order that takes fewer operations.

A gradient is a product of two matrices with few rows between them, those of a batch. A method that multiplies the
gradient by a matrix, such as a projection, can multiply the smaller factor instead.
"""

import torch
from torch import fx

aten = torch.ops.aten


def reorder(graph: fx.GraphModule) -> None:
    """Replace (a b) c by a (b c) in a trace where that is cheaper, for products of stacked matrices.

    A trace that writes in place, except for the update of the weights at its end, stays as it is.
    """
    if any(writes(node) for node in graph.graph.nodes):
        return
    for node in graph.graph.find_nodes(op="call_function", target=aten.bmm.default):
        inner, c = node.args
        if inner.target != aten.bmm.default:
            continue
        a, b = inner.args
        (_, rows, between), (_, _, columns), (_, _, last) = (each.meta["val"].shape for each in (a, b, c))
        saved = rows * columns * last + (rows * between * columns if len(inner.users) == 1 else 0)
        if (rows + columns) * between * last < saved:
            with graph.graph.inserting_before(node):
                later = graph.graph.call_function(aten.bmm.default, (b, c))
                later.meta["val"] = aten.bmm.default(b.meta["val"], c.meta["val"])
            node.args = (a, later)
    graph.graph.eliminate_dead_code()
    graph.recompile()


def writes(node: fx.Node) -> bool:
    """Whether an operation writes in place, other than the update of the weights at the end of a step."""
    schema = getattr(node.target, "_schema", None)
    return schema is not None and schema.is_mutable and node.target != aten._fused_sgd_.tensor_lr
