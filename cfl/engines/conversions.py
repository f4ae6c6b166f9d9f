"""Conversions in the order of memory: weights with channels last are converted to bfloat16 without a change of layout.

Inductor would loop over the dimensions as they are named, and transpose twice. Matrices stay as they are: torch copies
transposed factors in bfloat16 before it multiplies them, and Inductor turns them as it converts.
"""

from typing import Any

import torch
from torch import fx

from cfl.core.optim import memory_order, same_layout

aten = torch.ops.aten


def convert_in_order(graph: fx.GraphModule) -> None:
    """Let conversions in a trace see images and weights of convolutions as contiguous, if their memory has no gaps."""
    for node in graph.graph.find_nodes(op="call_function", target=aten._to_copy.default):
        given: Any = node.args[0]
        value = getattr(given, "meta", {}).get("val")  # constants have none
        if value is None or value.dim() < 4 or value.is_contiguous() or not same_layout(value, value):
            continue
        order = memory_order(value)
        with graph.graph.inserting_before(node):
            turned = graph.graph.call_function(aten.permute.default, (given, order))
        with graph.graph.inserting_after(node):
            back = graph.graph.call_function(aten.permute.default, (node, [*map(order.index, range(len(order)))]))
        node.replace_all_uses_with(back, lambda user, back=back: user is not back)
        node.args = (turned, *node.args[1:])
        turned.meta["val"], back.meta["val"] = value.permute(order), node.meta["val"]
        node.meta["val"] = node.meta["val"].permute(order)
    graph.recompile()
