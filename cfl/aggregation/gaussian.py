"""Gaussian mechanism: bound the contribution of one unit to a sum, and add noise in proportion to the bound."""

from dataclasses import dataclass

import torch
from torch import Tensor

from cfl.core import Tree, rng, tree


def clipped(vector: Tensor, bound: float) -> Tensor:
    """Return the vector (n,), scaled down to the norm `bound` if it is longer."""
    norm = vector.norm()
    return vector * (bound / norm) if norm > bound else vector


def noise(like: Tensor, std: float, key: int) -> Tensor:
    """Draw independent normal noise of standard deviation `std`, with the shape, dtype and device of `like`."""
    draws = torch.randn(like.shape, dtype=torch.float64, generator=rng.generator(key))
    return (std * draws).to(like)


@dataclass(frozen=True)
class SampleNoise:
    """DP-SGD (Abadi et al., 2016, Algorithm 1): clip the gradient of each sample, sum the gradients, and add noise.

    clip: bound on the L2 norm of a sample's gradient over all leaves; multiplier: standard deviation of the noise over
    `clip`; expected: mean number of samples in a Poisson batch, the divisor of the sum for batches of any size.
    """

    clip: float
    multiplier: float
    expected: int

    def __call__(self, grads: Tree, mask: Tensor, key: int) -> Tree:
        """Return the noisy mean gradient. grads: leaves (batch, ...), one per sample; mask: (batch,), 0 for padding."""
        norms = torch.stack([leaf.flatten(1).norm(dim=1) for leaf in grads.values()]).norm(dim=0)
        factors = mask * (self.clip / norms.clamp(min=self.clip))
        sums = tree.map(lambda leaf: torch.tensordot(factors.to(leaf), leaf, dims=1), grads)
        std = self.clip * self.multiplier
        return {
            name: (leaf + noise(leaf, std, rng.key(key, "noise", name))) / self.expected for name, leaf in sums.items()
        }
