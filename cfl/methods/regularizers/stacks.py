"""Arithmetic on the stacked updates of a round, for rules that combine them: trees with leaves (clients, ...)."""

import torch
from torch import Tensor

from cfl.core import Tree


def rows(updates: Tree) -> Tensor:
    """Each client's update as one vector: (clients, numbers), in float64."""
    return torch.cat([leaf.double().reshape(len(leaf), -1) for leaf in updates.values()], dim=1)


def along(weights: Tensor, leaf: Tensor) -> Tensor:
    """Numbers (clients,) in the type of a leaf (clients, ...), to multiply it by."""
    return weights.to(leaf).reshape(-1, *[1] * (leaf.dim() - 1))
