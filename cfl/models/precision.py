"""The number format of matrix products and convolutions: float32, or bfloat16 with weights in float32."""

import time
from contextlib import AbstractContextManager
from typing import Any, Literal

import torch
from torch import Tensor, nn

from cfl.core.functorch import transforming
from cfl.models.layers import NORMS

Precision = Literal["float32", "bf16"]


def lowered(device: torch.device) -> AbstractContextManager:
    """Let torch compute products and convolutions, and their gradients, with factors rounded to bfloat16.

    The cache of rounded weights is off: it would keep those of all steps, and serve old ones after an update in place.
    On a CPU, a convolution under vmap is computed in float32 unless its gradient is taken there.
    """
    return torch.autocast(device.type, torch.bfloat16, cache_enabled=False)


def prepare(module: nn.Module) -> None:
    """Let a module's normalisation layers take and return bfloat16 under `torch.func`, as they do outside of it.

    Outside, torch's kernels accept bfloat16 inputs beside float32 weights; under `torch.func` they accept no mixture.
    """
    for layer in module.modules():
        if isinstance(layer, NORMS):
            layer.register_forward_pre_hook(_widened, with_kwargs=True)
            layer.register_forward_hook(_narrowed)


def _widened(layer: nn.Module, args: tuple[Tensor, ...], named: dict[str, Tensor]) -> tuple[Any, Any] | None:
    if not transforming():
        return None
    first = args[0] if args else next(iter(named.values()))
    layer.__dict__["given"] = first.dtype
    return ((first.float(), *args[1:]), named) if args else (args, named | {next(iter(named)): first.float()})


def _narrowed(layer: nn.Module, args: tuple[Tensor, ...], output: Tensor) -> Tensor:
    return output.to(layer.__dict__["given"]) if transforming() else output


def notes(precision: Precision, device: torch.device) -> list[str]:
    """Lines shown at the start of a run."""
    if precision == "float32":
        return []
    found = ["precision=bf16: factors of products have 8 significant bits, so results differ from those in float32"]
    if not fast(device):
        found.append("this device multiplies bfloat16 matrices more slowly: steps take longer than with float32")
    return found


def fast(device: torch.device) -> bool:
    """Whether the device multiplies bfloat16 matrices faster than float32 ones; on a CPU by a short measurement.

    Instructions for bfloat16 are no proof: some processors with AVX512-BF16 are slower by them.
    """
    if device.type == "cuda":
        return torch.cuda.get_device_capability(device) >= (8, 0)
    return _seconds(torch.bfloat16) < _seconds(torch.float32)


def _seconds(dtype: torch.dtype) -> float:
    """Least seconds of a product of two matrices (256, 256) on the CPU, out of ten."""
    factor, found = torch.ones(256, 256, dtype=dtype), []
    for _ in range(10):
        began = time.perf_counter()
        factor @ factor
        found.append(time.perf_counter() - began)
    return min(found)
