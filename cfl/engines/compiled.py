"""Compiled traces: Inductor joins the small operations of a step to a few loops in C++.

A compiled step equals its trace up to rounding, not to the bit. So a run that compiles has to compile the same steps
whether or not it was killed: from their first time on. The code is cached on disk, see TORCHINDUCTOR_CACHE_DIR.
Compiled code would draw other random numbers, so the uniform ones of `cfl`'s dropout are drawn before it, as in the
trace. A trace with other draws is not compiled.
"""

import copy
import sys
import sysconfig
from collections.abc import Callable, Sequence
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, fx

from cfl.core import ConfigError


def obstacle(device: torch.device) -> str:
    """Return why this machine cannot compile steps; empty if it can."""
    if device.type != "cpu":
        return f"steps on device={device} are not compiled, only those on a CPU"
    from torch._inductor.cpp_builder import get_cpp_compiler  # slow to import, and few runs need it
    from torch._inductor.exc import InvalidCxxCompiler

    try:
        get_cpp_compiler()
    except InvalidCxxCompiler:
        return "no C++ compiler is found (g++, or the one that CXX names)"
    folders = sysconfig.get_path("include"), sysconfig.get_path("include", "posix_prefix")  # those that torch names
    if sys.platform == "linux" and not any(Path(folder, "Python.h").is_file() for folder in folders):
        return "the C headers of Python are missing (Debian's package python3-dev)"
    return ""


def compiled(graph: fx.GraphModule, leaves: Sequence[Tensor]) -> Callable[..., Sequence[Tensor]]:
    """Compile a trace, or return one with other than uniform draws. leaves: its inputs.

    Raises ConfigError if the compiler fails.
    """
    import torch._inductor.config as settings
    from torch.fx.experimental.proxy_tensor import make_fx

    plain = copy.deepcopy(graph)
    empty = _take_out_draws(plain)
    for node in plain.graph.nodes:
        if draws(node):
            return graph
        if node.target is torch.ops.aten._fused_sgd_.tensor_lr:
            node.target = _sgd  # operations that the compiler joins with those before
    plain.recompile()
    # Processes of the compiler's own would be forked with the pool's workers.
    with torch.no_grad(), settings.patch(compile_threads=1):
        from torch._functorch.compile_utils import fx_graph_cse
        from torch._guards import TracingContext, tracing
        from torch._inductor.compile_fx import compile_fx_inner
        from torch._inductor.decomposition import select_decomp_table

        pure = torch.func.functionalize(plain, remove="mutations")
        try:  # frozen parameters are constants of the trace, and no fake tensors
            lowered = make_fx(pure, select_decomp_table(), "fake", _allow_non_fake_inputs=True)(
                *leaves, *(one() for one in empty)
            )
            lowered.graph = fx_graph_cse(lowered.graph)  # hooks repeat passes at the same weights
            fakes = [node.meta["val"] for node in lowered.graph.nodes if node.op == "placeholder"]
            with tracing(TracingContext(fakes[0].fake_mode)):
                run = compile_fx_inner(lowered, fakes)
        except Exception as error:
            raise ConfigError(f"the local step cannot be compiled: {error}; leave compile=true out") from error
    return lambda *given: run([*given, *(one().uniform_() for one in empty)])  # the code empties the list


def draws(node: fx.Node) -> bool:
    """True if an operation of a trace draws random numbers."""
    return torch.Tag.nondeterministic_seeded in getattr(node.target, "tags", ())


def _take_out_draws(graph: fx.GraphModule) -> list[Callable[[], Tensor]]:
    """Turn uniform draws in a trace into inputs after its own, and return functions that create the empty inputs."""
    places, empty = graph.graph.find_nodes(op="placeholder"), list[Callable[[], Tensor]]()
    for node in graph.graph.find_nodes(op="call_function", target=torch.ops.aten.rand_like.default):
        with graph.graph.inserting_after(places[-1]):
            places.append(graph.graph.placeholder(f"drawn_{len(empty)}"))
        node.replace_all_uses_with(places[-1])
        graph.graph.erase_node(node)
        like = node.meta["val"]
        empty.append(partial(torch.empty_strided, like.shape, like.stride(), dtype=like.dtype, device=like.device))
    return empty


def _sgd(
    params: Sequence[Tensor], grads: Sequence[Tensor], momenta: Sequence[Tensor], *, lr: Tensor, **options: Any
) -> None:
    """Do what torch's fused kernel does, without momentum."""
    decay = options["weight_decay"]
    for param, grad in zip(params, grads, strict=True):
        param.sub_(lr.to(param.dtype) * (grad.add(param, alpha=decay) if decay else grad))
