"""Compiled traces: Inductor joins the small operations of a step to a few loops in C++.

A compiled step equals its trace up to rounding, not to the bit. So a run that compiles has to compile the same steps
whether or not it was killed: from their first time on. The code is cached on disk, see TORCHINDUCTOR_CACHE_DIR.
"""

import copy
from collections.abc import Callable, Sequence
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
    return ""


def compiled(graph: fx.GraphModule, leaves: Sequence[Tensor]) -> Callable[..., Sequence[Tensor]]:
    """Compile a trace. leaves: its inputs. Raises ConfigError if the compiler fails."""
    import torch._inductor.config as settings
    from torch.fx.experimental.proxy_tensor import make_fx

    plain = copy.deepcopy(graph)
    for node in plain.graph.nodes:
        if node.target is torch.ops.aten._fused_sgd_.tensor_lr:
            node.target = _sgd  # operations that the compiler joins with those before
    plain.recompile()
    # Processes of the compiler's own would be forked with the pool's workers.
    with torch.no_grad(), settings.patch(compile_threads=1):
        from torch._guards import TracingContext, tracing
        from torch._inductor.compile_fx import compile_fx_inner
        from torch._inductor.decomposition import select_decomp_table

        pure = torch.func.functionalize(plain, remove="mutations")
        try:  # frozen parameters are constants of the trace, and no fake tensors
            lowered = make_fx(pure, select_decomp_table(), "fake", _allow_non_fake_inputs=True)(*leaves)
            fakes = [node.meta["val"] for node in lowered.graph.nodes if node.op == "placeholder"]
            with tracing(TracingContext(fakes[0].fake_mode)):
                run = compile_fx_inner(lowered, fakes)
        except Exception as error:
            raise ConfigError(f"the local step cannot be compiled: {error}; leave compile=true out") from error
    return lambda *given: run([*given])  # the code empties the list


def _sgd(
    params: Sequence[Tensor], grads: Sequence[Tensor], momenta: Sequence[Tensor], *, lr: Tensor, **options: Any
) -> None:
    """Do what torch's fused kernel does, without momentum."""
    decay = options["weight_decay"]
    for param, grad in zip(params, grads, strict=True):
        param.sub_(lr.to(param.dtype) * (grad.add(param, alpha=decay) if decay else grad))
