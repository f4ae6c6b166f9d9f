"""Traces: the tensor operations of a block's step, recorded once and then repeated without Python overhead.

With many small clients a step is mostly overhead of `vmap`, autograd and hooks. `make_fx` records the tensor operations
below all three. A trace does the same operations on the same shapes, so its results equal those of the step to the bit,
whenever it was recorded; with `compile` they are equal up to rounding. This holds for hooks and modules whose results
depend on their inputs alone: internal state and Python's random numbers would keep the values that they had at the
recording.
"""

from collections import Counter
from collections.abc import Callable, Hashable, Mapping
from typing import Any

import torch
from torch import Tensor, fx

from cfl.contract import Ctx
from cfl.core import Tree
from cfl.engines.compiled import compiled, draws
from cfl.engines.conversions import converting, take_out_conversions, with_conversions
from cfl.engines.decompositions import DECOMPOSITIONS
from cfl.engines.descents import descending, take_out
from cfl.engines.products import reorder

AFTER, MOST = 8, 64  # a trace is recorded when its shapes come for the eighth time; number of traces kept
UNUSED = 1024  # steps after which an unused trace makes way for another
_FROZEN = frozenset(("step", "key"))  # fields of a context that change from step to step; a trace would freeze them

Trees = Mapping[str, Tree]
Work = Callable[[Trees, type[Ctx]], Trees]


class Traces:
    """Recorded traces, by the shapes of the inputs."""

    def __init__(self) -> None:
        self._times: Counter[Hashable] = Counter()
        self._known: dict[Hashable, Callable[[Trees], Trees] | None] = {}  # the least recently used first
        self._steps, self._used = 0, dict[Hashable, int]()  # number of steps, and that of each trace's last step
        self._fixed: dict[Hashable, tuple[str, ...]] = {}  # by shapes: whether a trace is of one task, of one rate

    def __call__(
        self,
        work: Work,
        inputs: Trees,
        task: int,
        alike: bool,
        lr: float = 0.0,
        kind: type[Ctx] = Ctx,
        compile: bool = False,
    ) -> Trees:
        """Return work(inputs, kind), by a trace if possible.

        alike: the model runs the same operations for every task; compile: always by a compiled trace if possible.
        work: its operations depend on nothing but the shapes of its inputs, the task, the learning rate, and the
        contexts that it creates with the class `kind`.
        """
        shapes = tuple(
            (owner, *((name, leaf.shape, leaf.stride(), leaf.dtype) for name, leaf in tree.items()))
            for owner, tree in inputs.items()
        )
        given = {"task": task, "lr": lr}
        fixed = self._fixed.get(shapes, () if alike else ("task",))
        compile = compile and "lr" not in fixed
        place = shapes, *(given[name] for name in fixed)
        self._steps += 1
        if place not in self._known:
            self._times[place] += 1
            if not compile and (self._times[place] < AFTER or not self._has_room(once="lr" in fixed)):
                return work(inputs, kind)
            trace, read = record(work, inputs, compile)
            self._fixed[shapes] = tuple(name for name in given if name in read or name in fixed)
            place = shapes, *(given[name] for name in self._fixed[shapes])
            self._known[place] = None if read & _FROZEN else trace
        self._used[place] = self._steps
        known = self._known[place] = self._known.pop(place)
        return work(inputs, kind) if known is None else known(inputs)

    def _has_room(self, once: bool) -> bool:
        """Whether a further trace may be kept, perhaps in place of one that has not been used for long.

        once: whether it serves a single learning rate, so that it may not be worth its recording.
        """
        if len(self._known) >= MOST:
            oldest = next(iter(self._known))
            if once or self._steps - self._used[oldest] < UNUSED:
                return False
            del self._known[oldest], self._used[oldest]
        return True


def record(work: Work, inputs: Trees, compile: bool = False) -> tuple[Callable[[Trees], Trees] | None, set[str]]:
    """Return a trace of the work, or None if it cannot be traced, and the fields of contexts that the work reads.

    compile: reorder products, let weights descend along them, and compile the trace, see `compiled`; work that
    reads the learning rate is only traced.
    """
    from torch.fx.experimental.proxy_tensor import make_fx  # slow to import, and most runs do not need it

    read: set[str] = set()

    class Noted(Ctx):
        """A context that notes which of its fields are read."""

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
            # Fake tensors have no values: work that branches on one fails here instead of freezing the branch.
            how = DECOMPOSITIONS if compile else None
            graph = make_fx(flat, how, "fake", _allow_non_fake_inputs=True)(*leaves)
    except Exception:  # the step runs untraced, and raises its own error if it has one
        return None, read
    if compile and "lr" in read:  # each learning rate would be compiled anew
        return record(work, inputs)
    _tidy(graph)
    run: Callable[..., Any] = graph
    if compile and not read & _FROZEN:
        reorder(graph)
        conversions = take_out_conversions(graph)
        descents = take_out(graph)
        run = descending(converting(compiled(graph, with_conversions(leaves, conversions)), conversions), descents)

    def repeat(inputs: Trees) -> Trees:
        with torch.no_grad():
            results = iter(run(*_leaves(inputs)))
        return {owner: {name: next(results) for name in tree} for owner, tree in names.items()}

    return repeat, read


def _tidy(graph: fx.GraphModule) -> None:
    """Remove operations that return one of their own inputs, and operations whose results are unused."""
    aten = torch.ops.aten
    views = (aten.expand.default, aten.view.default, aten._unsafe_view.default, aten.slice.Tensor)
    for node in graph.graph.nodes:
        given: Any = node.args[0] if node.args else None
        how = [*node.args[1:]]
        known = "val" in getattr(given, "meta", {})  # not of a constant, such as a frozen parameter
        if node.target in views and known and node.meta["val"].shape == given.meta["val"].shape:
            same = given
        elif node.target == aten.mul.Scalar and how == [1]:
            same = given
        elif node.target == aten.transpose.int and given.target == aten.transpose.int and how == [*given.args[1:]]:
            same = given.args[0]  # two transposes cancel out
        else:
            continue
        node.replace_all_uses_with(same)
        graph.graph.erase_node(node)
    # Random draws stay even if unused: the draws after them depend on the generator's state.
    graph.graph.eliminate_dead_code(lambda node: node.is_impure() or draws(node))
    graph.recompile()


def _leaves(trees: Trees) -> list[Tensor]:
    return [leaf for tree in trees.values() for leaf in tree.values()]
