"""Dropout with a mask that is cheap to draw on a CPU."""

import contextlib
from collections.abc import Iterator

import torch
from torch import Tensor, nn
from torch.nn.modules.dropout import _DropoutNd


class Dropout(nn.Dropout):
    """`nn.Dropout` in distribution, with masks from uniform draws: faster on a CPU than torch's Bernoulli draws."""

    def forward(self, x: Tensor) -> Tensor:
        """In training mode, set each element of x to zero with probability p and divide the others by 1 - p."""
        if not self.training or not self.p or x.is_cuda:
            return super().forward(x)
        drawn = torch.rand_like(x, dtype=torch.promote_types(x.dtype, torch.float32))  # half precision is too coarse
        kept = (drawn >= self.p).to(x.dtype)
        return x * (kept / (1 - self.p) if self.p < 1 else kept)


@contextlib.contextmanager
def switched_off(module: nn.Module) -> Iterator[None]:
    """Switch the dropout layers of a module off; all other layers keep their mode."""
    active = [layer for layer in module.modules() if isinstance(layer, _DropoutNd) and layer.training]
    for layer in active:
        layer.training = False
    try:
        yield
    finally:
        for layer in active:
            layer.training = True
