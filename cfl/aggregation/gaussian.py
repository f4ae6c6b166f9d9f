"""The Gaussian mechanism: bound what one unit adds to a sum, and add noise in proportion to the bound."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from cfl.core import rng, tree
from cfl.core.tree import Tree


def clipped(vector: Tensor, bound: float) -> Tensor:
    """The vector (n,), scaled down to the norm `bound` where it is longer."""
    norm = vector.norm()
    return vector * (bound / norm) if norm > bound else vector


def noise(like: Tensor, std: float, key: int) -> Tensor:
    """Independent normal draws of that standard deviation, of the shape, precision and device of `like`."""
    draws = torch.randn(like.shape, dtype=torch.float64, generator=rng.generator(key))
    return (std * draws).to(like)


@dataclass(frozen=True)
class SampleNoise:
    """DP-SGD (Abadi et al., 2016, Algorithm 1): single samples' gradients are clipped, summed, and noise is added.

    clip: bound on a sample's gradient, all leaves together; multiplier: standard deviation of the noise over `clip`;
    expected: samples that a Poisson batch holds on average, by which the sum is divided whatever the batch holds.
    """

    clip: float
    multiplier: float
    expected: int

    def __call__(self, grads: Tree, mask: Tensor, key: int) -> Tree:
        """The noisy mean gradient. grads: leaves (batch, ...), one gradient a sample; mask: (batch,) 0 for padding."""
        norms = torch.stack([leaf.flatten(1).norm(dim=1) for leaf in grads.values()]).norm(dim=0)
        factors = mask * (self.clip / norms.clamp(min=self.clip))
        sums = tree.map(lambda leaf: torch.tensordot(factors.to(leaf), leaf, dims=1), grads)
        std = self.clip * self.multiplier
        return {
            name: (leaf + noise(leaf, std, rng.key(key, "noise", name))) / self.expected for name, leaf in sums.items()
        }
