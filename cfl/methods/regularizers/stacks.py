"""Arithmetic on the stacked updates of a round, for rules that combine them: trees with leaves (clients, ...)."""

import math

import torch
from torch import Tensor

from cfl.core import Tree, warn


def part(share: float, clients: int) -> int:
    """The number of clients that a share of them makes, rounded down. Warns if a share above 0 is no client."""
    found = math.floor(share * clients + 1e-9)  # 0.2 of 5 clients is one
    if share and not found:
        warn(
            f"a share of {share:g} of {clients} clients is no client, so nothing protects against hostile ones; use a "
            f"share of at least {1 / clients:.3g}, or more clients a round"
        )
    return found


def rows(updates: Tree) -> Tensor:
    """Each client's update as one vector: (clients, numbers), in float64."""
    return torch.cat([leaf.double().reshape(len(leaf), -1) for leaf in updates.values()], dim=1)


def distances(vectors: Tensor) -> Tensor:
    """Squared distances (clients, clients) between the rows of `vectors`."""
    return torch.stack([(vectors - own).square().sum(dim=1) for own in vectors])


def krum_scores(squared: Tensor, hostile: int) -> Tensor:
    """Krum's score (clients,) of each client: the sum of its squared distances to the n - hostile - 2 nearest others.

    squared: of `distances`. Source: Blanchard et al., NeurIPS 2017, Section 4.
    """
    nearest = max(1, len(squared) - hostile - 2) + 1  # with the client itself, at distance 0
    return squared.sort(dim=1).values[:, :nearest].sum(dim=1)


def median(leaf: Tensor) -> Tensor:
    """The median of each coordinate of a leaf (clients, ...); of an even number, the mean of the two middle values."""
    ordered, clients = leaf.sort(dim=0).values, len(leaf)
    return (ordered[(clients - 1) // 2] + ordered[clients // 2]) / 2


def along(weights: Tensor, leaf: Tensor) -> Tensor:
    """Numbers (clients,) in the type of a leaf (clients, ...), to multiply it by."""
    return weights.to(leaf).reshape(-1, *[1] * (leaf.dim() - 1))
