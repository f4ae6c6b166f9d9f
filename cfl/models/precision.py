"""The number format of matrix products and convolutions: float32, or bfloat16 with weights in float32."""

import platform
from contextlib import AbstractContextManager
from typing import Literal

import torch
from torch import nn

from cfl.models.layers import NORMS

Precision = Literal["float32", "bf16"]


def lowered(device: torch.device) -> AbstractContextManager:
    """Let torch compute products and convolutions, and their gradients, with factors rounded to bfloat16.

    The cache of rounded weights is off: it would keep those of all steps, and serve old ones after an update in place.
    """
    return torch.autocast(device.type, torch.bfloat16, cache_enabled=False)


def prepare(module: nn.Module) -> None:
    """Let a module's normalisation layers take float32 inputs: under `torch.func` they accept no mixture."""
    for layer in module.modules():
        if isinstance(layer, NORMS):
            layer.register_forward_pre_hook(lambda _, args: (args[0].float(), *args[1:]))


def notes(precision: Precision, device: torch.device) -> list[str]:
    """Lines shown at the start of a run."""
    if precision == "float32":
        return []
    found = ["precision=bf16: factors of products have 8 significant bits, so results differ from those in float32"]
    if not fast(device):
        found.append("this processor has no bfloat16 instructions: steps take longer than with precision=float32")
    return found


def fast(device: torch.device) -> bool:
    """True if the device multiplies bfloat16 numbers by instructions of its own, as far as torch can tell."""
    if device.type == "cuda":
        return torch.cuda.get_device_capability(device) >= (8, 0)
    found = torch.cpu.get_capabilities() if hasattr(torch.cpu, "get_capabilities") else {}
    known = [found[name] for name in ("avx512_bf16", "amx_bf16", "bf16") if name in found]
    return any(known) if known else platform.machine() not in ("x86_64", "AMD64")
