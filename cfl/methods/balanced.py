"""An order of samples in which every prefix is balanced over groups, such as classes."""

import torch
from torch import Tensor


def balanced(groups: Tensor, order: Tensor) -> Tensor:
    """Rearrange `order` (n,) so that the groups take turns, and each prefix is balanced over them.

    groups: (n,) int64 group of each member; order: permutation of the members, whose order within a group is kept.
    """
    ordered, turn = groups[order], torch.empty_like(order)
    together = ordered.argsort(stable=True)
    sizes = ordered[together].unique_consecutive(return_counts=True)[1]
    starts = (sizes.cumsum(0) - sizes).repeat_interleave(sizes)
    turn[together] = torch.arange(len(order), device=order.device) - starts  # number of earlier members of the group
    return order[turn.argsort(stable=True)]
