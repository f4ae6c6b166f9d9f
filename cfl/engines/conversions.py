"""Conversions of images and of convolutions' weights to bfloat16, made once before a compiled step.

Inductor would loop over the dimensions in the order of the shape, not of memory, and convert for each operation that
reads the weights. Matrices stay with Inductor: torch copies transposed stacks in bfloat16 before a product, and
Inductor transposes them as it converts.
"""

from collections.abc import Sequence
from typing import Any

import torch
from torch import fx

from cfl.engines.descents import VIEWS, Run, keeps_layout
from cfl.engines.products import writes

aten = torch.ops.aten


def take_out_conversions(graph: fx.GraphModule) -> list[int]:
    """Replace conversions of inputs with at least four dimensions by new inputs; return the places of those inputs.

    The new inputs come after the trace's own, in the order of the places. A trace that writes in place, except for the
    update of the weights at its end, stays as it is.
    """
    if any(writes(node) for node in graph.graph.nodes):
        return []
    inputs = graph.graph.find_nodes(op="placeholder")
    last, converted = inputs[-1], dict[fx.Node, fx.Node]()
    for node in graph.graph.find_nodes(op="call_function", target=aten._to_copy.default):
        if node.meta["val"].dtype != torch.bfloat16 or not keeps_layout(node):
            continue
        source: Any = node.args[0]
        views: list[Any] = []
        while getattr(source, "target", None) in VIEWS:
            views.append(source)
            source = source.args[0]
        if source not in inputs or source.meta["val"].dim() < 4:
            continue
        if source not in converted:
            with graph.graph.inserting_after(last):
                last = converted[source] = graph.graph.placeholder(f"converted_{len(converted)}")
            last.meta["val"] = source.meta["val"].to(torch.bfloat16)
        found: Any = converted[source]
        with graph.graph.inserting_before(node):
            for view in reversed(views):
                given, found = found, graph.graph.call_function(view.target, (found, *view.args[1:]))
                found.meta["val"] = view.target(given.meta["val"], *view.args[1:])
        node.replace_all_uses_with(found)
        graph.graph.erase_node(node)
    graph.graph.eliminate_dead_code()
    graph.recompile()
    return [inputs.index(source) for source in converted]


def converting(run: Run, places: Sequence[int]) -> Run:
    """Return a function that calls `run` with the inputs at these places once more, in bfloat16, after all inputs."""
    return (lambda *given: run(*with_conversions(given, places))) if places else run


def with_conversions(given: Sequence[Any], places: Sequence[int]) -> list[Any]:
    """Inputs, and then those at these places in bfloat16."""
    return [*given, *(given[place].to(torch.bfloat16) for place in places)]
