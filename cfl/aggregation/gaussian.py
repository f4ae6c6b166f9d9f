"""Gaussian mechanism: bound the contribution of one unit to a sum, and add noise in proportion to the bound."""

from dataclasses import dataclass

import torch
from torch import Tensor

from cfl.core import Tree, rng, tree


def clipped(vector: Tensor, bound: float) -> Tensor:
    """Return the vector (n,), scaled down to the norm `bound` if it is longer."""
    norm = vector.norm()
    return vector * (bound / norm) if norm > bound else vector


def noise(like: Tensor, std: float, seed: int | None, *path: int | str) -> Tensor:
    """Draw independent normal noise of standard deviation `std`, with the shape, dtype and device of `like`.

    seed, path: decide the draws, see `rng.private_generator`.
    """
    draws = rng.private_generator(seed, *path).standard_normal(tuple(like.shape))
    return (std * torch.as_tensor(draws)).to(like)


@dataclass(frozen=True)
class SampleNoise:
    """DP-SGD (Abadi et al., 2016, Algorithm 1): clip the gradient of each sample, sum the gradients, and add noise.

    clip: bound on the L2 norm of a sample's gradient over all leaves; multiplier: standard deviation of the noise over
    `clip`; expected: mean number of samples in a Poisson batch, the divisor of the sum for batches of any size.
    seed: of the noise and the Poisson batches, see `rng.private_generator`.
    """

    clip: float
    multiplier: float
    expected: int
    seed: int | None

    def draw(self, like: Tree, key: int) -> Tree:
        """Draw the noise of one step, with the shapes of `like`. key: of the client's step."""
        std = self.clip * self.multiplier
        return {name: noise(leaf, std, self.seed, "sample noise", key, name) for name, leaf in like.items()}

    def __call__(self, grads: Tree, mask: Tensor, drawn: Tree) -> Tree:
        """Return the noisy mean gradient. A gradient that is not finite counts as zero.

        grads: leaves (batch, ...), one per sample; mask: (batch,), 0 for padding; drawn: noise of the step.
        """
        norms = torch.stack([leaf[..., None].flatten(1).norm(dim=1) for leaf in grads.values()]).norm(dim=0)
        finite = norms.isfinite()
        factors = mask * (self.clip / norms.clamp(min=self.clip))

        def mean(leaf: Tensor, own: Tensor) -> Tensor:
            bounded = torch.where(finite.view(-1, *[1] * (leaf.dim() - 1)), leaf, 0.0)  # 0 x inf would be NaN
            weights = torch.where(finite, factors, 0.0).to(leaf)
            return (torch.tensordot(weights, bounded, dims=1) + own) / self.expected

        return tree.map(mean, grads, drawn)
