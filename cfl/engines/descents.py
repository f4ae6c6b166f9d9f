"""Descents along products: a gradient that is a product of matrices is subtracted from the weights by the product.

No memory then holds the gradient, and the weights are read and written once. The result equals that of the fused kernel
up to rounding. Factors in bfloat16 are multiplied in float32 if each sum has few terms, so no gradient is converted.
"""

import operator
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor, fx

from cfl.core.optim import same_layout

SMALL = 32  # products in bfloat16 with more terms in each sum stay in bfloat16

Run = Callable[..., Sequence[Tensor]]
aten = torch.ops.aten
VIEWS = (aten.view.default, aten.transpose.int, aten.permute.default, aten.unsqueeze.default, aten.squeeze.dim)


class Descent(NamedTuple):
    """A step of one parameter. param, lr: their positions among the inputs; decay: weight decay."""

    param: int
    lr: int
    decay: float


def take_out(graph: fx.GraphModule) -> list[Descent]:
    """Remove descents along products from the updates in a trace, which then returns their factors after its results.

    A gradient qualifies if it is a product of two matrices, and nothing else reads it. The matrices may not share
    memory with weights, which change while the descents are made one after another.
    """
    inputs = {node: place for place, node in enumerate(graph.graph.find_nodes(op="placeholder"))}
    (output,) = graph.graph.find_nodes(op="output")
    found, factors = list[Descent](), list[fx.Node]()
    updates = graph.graph.find_nodes(op="call_function", target=aten._fused_sgd_.tensor_lr)
    changing = {_origin(param) for update in updates for param in update.args[0]}
    for node in updates:
        params, grads, rate = node.args[0], node.args[1], node.kwargs["lr"]
        kept = []
        for param, grad in zip(params, grads, strict=True):
            whole = _origin(param)  # the update may see a permutation of it
            known = whole in inputs and rate in inputs and same_layout(param.meta["val"], grad.meta["val"])
            pair = _factors(grad) if known and param.meta["val"].numel() == whole.meta["val"].numel() else []
            if pair and not changing & {*map(_origin, pair)}:
                found.append(Descent(inputs[whole], inputs[rate], node.kwargs["weight_decay"]))
                factors += pair
            else:
                kept.append((param, grad))
        node.args = ([param for param, _ in kept], [grad for _, grad in kept], *node.args[2:])
        if not kept:
            graph.graph.erase_node(node)
    output.args = ([*output.args[0], *factors],)
    graph.graph.eliminate_dead_code()
    graph.recompile()
    return found


def descending(run: Run, descents: Sequence[Descent]) -> Run:
    """Return a function that calls `run` and makes the descents, whose factors are at the end of its results."""

    def step(*given: Tensor) -> Sequence[Tensor]:
        results = run(*given)
        own = len(results) - 2 * len(descents)
        factors = results[own:]
        for descent, one, other in zip(descents, factors[::2], factors[1::2], strict=True):
            rate, param = float(given[descent.lr]), given[descent.param]
            count, rows, columns = *one.shape[:2], other.shape[2]
            matrices = param.as_strided((count, rows, columns), (rows * columns, columns, 1))
            matrices.baddbmm_(one.to(param.dtype), other.to(param.dtype), beta=1 - rate * descent.decay, alpha=-rate)
        return results[:own]

    return step if descents else run


def _factors(grad: Any) -> list[fx.Node]:
    """The factors (matrices, m, k) and (matrices, k, n) of a gradient in any shape; none if it is no product.

    Between the product and its use as a gradient may be views of it, and conversions.
    """
    while len(grad.users) == 1:
        if grad.target == aten.bmm.default:
            small = grad.meta["val"].dtype != torch.bfloat16 or grad.args[0].meta["val"].shape[2] <= SMALL
            pair = grad.all_input_nodes
            return list(pair) if small and len(pair) == 2 else []
        if grad.target not in VIEWS and not _widens(grad):
            break
        grad = grad.args[0]
    return []


def _widens(node: Any) -> bool:
    """True for a conversion that changes neither a value nor the layout."""
    if node.target != aten._to_copy.default or not keeps_layout(node):
        return False
    given, found = node.args[0].meta["val"].dtype, node.meta["val"].dtype
    return given.is_floating_point and torch.promote_types(given, found) == found


def keeps_layout(node: fx.Node) -> bool:
    """Whether a conversion leaves the order of the numbers in memory as it is."""
    return node.kwargs.get("memory_format") in (None, torch.preserve_format)


def _origin(node: Any) -> fx.Node:
    """The node whose memory a factor shares."""
    while getattr(node.target, "is_view", False) or node.target in (aten._unsafe_view.default, operator.getitem):
        node = node.args[0]
    return node
