"""FedCIL's server: the mean of the uploads, and batches that the clients' generators draw (Qi et al., ICLR 2023)."""

from collections.abc import Sequence

import torch
from torch import Tensor

from cfl.core import Tree, tree
from cfl.methods.balanced import balanced
from cfl.methods.generative.acgan import ACGAN, Labelled, choose

Owned = tuple[Tree, Tensor]
"""A client's generator, under its own names, and the classes (k,) that it has seen, of those that are asked for."""


def averaged(stacked: Tensor, weights: Tensor) -> Tensor:
    """Weighted mean of a leaf (clients, ...), by weights (clients,); of counters, that of the lowest id."""
    if not stacked.is_floating_point():
        return stacked[0]
    shares = (weights / weights.sum()).to(stacked)
    return torch.stack([share * own for share, own in zip(shares, stacked, strict=True)]).sum(dim=0)


def groups_of(uploads: Tree, first: int) -> list[list[Owned]]:
    """The clients' generators with their classes of the task, and with their earlier ones; groups without any are left.

    uploads: leaves (clients, ...) named "generator/...", and "labels" (clients, classes of the stream), 1 for a class
    that the client has seen; first: first class of the task.
    """
    generators, new, earlier = tree.part(uploads, "generator"), list[Owned](), list[Owned]()
    for row, seen in enumerate(uploads["labels"]):
        generator, classes = tree.map(lambda leaf, row=row: leaf[row], generators), seen.nonzero().flatten()
        for group, own in ((new, classes[classes >= first]), (earlier, classes[classes < first])):
            if len(own):
                group.append((generator, own))
    return [group for group in (new, earlier) if group]


def pool(gan: ACGAN, group: Sequence[Owned], count: int, source: torch.Generator) -> Labelled:
    """Draw `count` images with each generator, of its classes uniformly, and keep `count` of all, balanced by class."""
    drawn = [gan.fakes(generator, choose(classes, count, source), source) for generator, classes in group]
    return resampled(Labelled(*map(torch.cat, zip(*drawn, strict=True))), count, source)


def resampled(batch: Labelled, count: int, source: torch.Generator) -> Labelled:
    """At most `count` samples at random, with as many of each class: the numbers of two classes differ by 1 at most.

    A class with too few samples has all of them in the result.
    """
    order = torch.randperm(len(batch.classes), generator=source).to(batch.classes.device)
    rows = balanced(batch.classes, order)[:count]
    return Labelled(batch.x[rows], batch.classes[rows])
