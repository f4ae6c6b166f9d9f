"""Dropout with a cheap mask."""

import torch
from torch import Tensor, nn


class Dropout(nn.Dropout):
    """`nn.Dropout` in law; its masks are uniform numbers compared, cheaper on a CPU than torch's Bernoulli draws."""

    def forward(self, x: Tensor) -> Tensor:
        """x of any shape, with each element zero at probability `p` and the others over 1 - p, while training."""
        if not self.training or not self.p or x.is_cuda:
            return super().forward(x)
        drawn = torch.rand_like(x, dtype=torch.promote_types(x.dtype, torch.float32))  # half floats are too coarse
        kept = (drawn >= self.p).to(x.dtype)
        return x * (kept / (1 - self.p) if self.p < 1 else kept)
