"""Traces: the tensor operations of a block's step, recorded once and repeated without what leads to them.

A step of many small clients is mostly overhead: of `vmap`, of autograd, of hooks. `make_fx` sees through all three. A
trace does the same operations on the same shapes, so its results are those of the step to the bit, and a run does not
depend on when it was made. That holds for hooks and modules whose results depend on what they are given alone; state of
their own, or Python's random numbers, would stay what they were at the trace.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Hashable, Mapping
from typing import Any

import torch
from torch import Tensor, fx

from cfl.contract.context import Ctx
from cfl.core.tree import Tree

AFTER, MOST = 8, 64  # times that shapes must have come before they are traced; traces that are kept
_FROZEN = frozenset(("step", "lr", "key"))  # numbers of a context that change, and that a trace would keep

Trees = Mapping[str, Tree]
Work = Callable[[Trees, type[Ctx]], Trees]


class Traces:
    """What has been traced so far, by the shapes of the inputs."""

    def __init__(self) -> None:
        self._times: Counter[Hashable] = Counter()
        self._known: dict[Hashable, Callable[[Trees], Trees] | None] = {}
        self._of_one_task: set[Hashable] = set()

    def __call__(self, work: Work, inputs: Trees, task: int, alike: bool) -> Trees:
        """work(inputs, Ctx), by a trace where there is one. alike: only hooks could tell the task from another.

        work: its operations are decided by the shapes of its inputs, the task, and contexts, made as the given class.
        """
        shapes = tuple(
            (owner, *((name, leaf.shape, leaf.stride(), leaf.dtype) for name, leaf in tree.items()))
            for owner, tree in inputs.items()
        )
        place = shapes if alike and shapes not in self._of_one_task else (task, shapes)
        if place not in self._known:
            self._times[place] += 1
            if self._times[place] < AFTER or len(self._known) == MOST:
                return work(inputs, Ctx)
            trace, read = _traced(work, inputs)
            if place == shapes and "task" in read:
                self._of_one_task.add(shapes)
                place = task, shapes
            self._known[place] = None if read & _FROZEN else trace
        known = self._known[place]
        return work(inputs, Ctx) if known is None else known(inputs)


def _traced(work: Work, inputs: Trees) -> tuple[Callable[[Trees], Trees] | None, set[str]]:
    """The work's trace, None where it cannot be traced, and what it reads of contexts."""
    from torch.fx.experimental.proxy_tensor import make_fx  # slow to import, and most runs need none

    read: set[str] = set()

    class Noted(Ctx):
        """A context that notes what is read of it."""

        def __getattribute__(self, name: str) -> Any:
            read.add(name)
            return super().__getattribute__(name)

    names: dict[str, list[str]] = {}

    def flat(*leaves: Tensor) -> list[Tensor]:
        given = iter(leaves)
        result = work({owner: {name: next(given) for name in tree} for owner, tree in inputs.items()}, Noted)
        names.update((owner, list(tree)) for owner, tree in result.items())
        return _leaves(result)

    leaves = _leaves(inputs)
    devices = [leaves[0].device] if leaves[0].is_cuda else []
    try:
        with torch.random.fork_rng(devices):
            # with fake tensors, which have no values: what asks for one is not traced, rather than traced with it
            graph = make_fx(flat, tracing_mode="fake", _allow_non_fake_inputs=True)(*leaves)
    except Exception:  # whatever is in the way of a trace: the step runs as it did, and raises what is wrong with it
        return None, read
    _tidy(graph)

    def repeat(inputs: Trees) -> Trees:
        with torch.no_grad():
            results = iter(graph(*_leaves(inputs)))
        return {owner: {name: next(results) for name in tree} for owner, tree in names.items()}

    return repeat, read


def _tidy(graph: fx.GraphModule) -> None:
    """Take out the operations that give what they or those before them get, and those whose results nobody needs."""
    aten = torch.ops.aten
    views = (aten.expand.default, aten.view.default, aten._unsafe_view.default)
    for node in graph.graph.nodes:
        given: Any = node.args[0] if node.args else None
        how = [*node.args[1:]]
        if node.target in views and node.meta["val"].shape == given.meta["val"].shape:
            same = given
        elif node.target == aten.mul.Scalar and how == [1]:
            same = given
        elif node.target == aten.transpose.int and given.target == aten.transpose.int and how == [*given.args[1:]]:
            same = given.args[0]
        else:
            continue
        node.replace_all_uses_with(same)
        graph.graph.erase_node(node)
    # what draws random numbers stays, so that those after it are the same
    drawn = torch.Tag.nondeterministic_seeded
    graph.graph.eliminate_dead_code(lambda node: node.is_impure() or drawn in getattr(node.target, "tags", ()))
    graph.recompile()


def _leaves(trees: Trees) -> list[Tensor]:
    return [leaf for tree in trees.values() for leaf in tree.values()]
