"""Algebra on trees: dictionaries from names to tensors, in a fixed order."""

import math
from collections.abc import Callable, Iterable, Mapping, Sequence

import torch
from torch import Tensor

Tree = dict[str, Tensor]


def map(fn: Callable[..., Tensor], first: Mapping[str, Tensor], *rest: Mapping[str, Tensor]) -> Tree:
    """Apply `fn` to leaves of the same name. The result has the names of the first tree, in its order."""
    return {name: fn(leaf, *(tree[name] for tree in rest)) for name, leaf in first.items()}


def add(a: Tree, b: Tree) -> Tree:
    """a + b, leaf by leaf."""
    return map(torch.add, a, b)


def sub(a: Tree, b: Tree) -> Tree:
    """a - b, leaf by leaf."""
    return map(torch.sub, a, b)


def scale(a: Tree, factor: float | Tensor) -> Tree:
    """Multiply the floating-point leaves by `factor`; integer leaves stay as they are."""
    return map(lambda leaf: leaf * factor if leaf.is_floating_point() else leaf, a)


def select(a: Mapping[str, Tensor], names: Iterable[str]) -> Tree:
    """Select the leaves of these names, in the order of `names`."""
    return {name: a[name] for name in names}


def floats(a: Mapping[str, Tensor]) -> Tree:
    """Select the floating-point leaves; the others are counters of normalisation layers."""
    return {name: leaf for name, leaf in a.items() if leaf.is_floating_point()}


def under(owner: str, a: Mapping[str, Tensor]) -> Tree:
    """Name the leaves "owner/name"."""
    return {f"{owner}/{name}": leaf for name, leaf in a.items()}


def part(a: Mapping[str, Tensor], owner: str) -> Tree:
    """Select the leaves named "owner/name", under the names alone."""
    start = f"{owner}/"
    return {name.removeprefix(start): leaf for name, leaf in a.items() if name.startswith(start)}


def dot(a: Tree, b: Tree) -> Tensor:
    """Inner product over all leaves: a tensor ()."""
    return torch.stack([(leaf * b[name]).sum() for name, leaf in a.items()]).sum()


def clone(a: Mapping[str, Tensor]) -> Tree:
    """Copy all leaves, detached from the graph."""
    return {name: leaf.detach().clone() for name, leaf in a.items()}


def stack(trees: Sequence[Tree]) -> Tree:
    """Stack trees to one tree whose leaves have a new first dimension of length len(trees)."""
    return {name: torch.stack([tree[name] for tree in trees]) for name in trees[0]}


def weighted_mean(stacked: Tree, weights: Sequence[float]) -> Tree:
    """Mean of stacked trees with leaves (n, ...), added up in their order. weights: n numbers."""
    return scale(weighted_sum(stacked, weights), 1 / sum(weights))


def weighted_sum(stacked: Tree, weights: Sequence[float]) -> Tree:
    """Sum of stacked trees with leaves (n, ...), each times its weight, added up in their order."""

    def total(leaf: Tensor) -> Tensor:
        found = leaf[0] * weights[0]
        for own, weight in zip(leaf[1:], weights[1:], strict=True):
            found.add_(own, alpha=weight)
        return found

    return map(total, stacked)


def equal(a: Mapping[str, Tensor], b: Mapping[str, Tensor]) -> bool:
    """Whether two trees have the same names and equal leaves."""
    return a.keys() == b.keys() and all(leaf is b[name] or torch.equal(leaf, b[name]) for name, leaf in a.items())


def nbytes(a: Mapping[str, Tensor]) -> int:
    """Size of all leaves in bytes."""
    return sum(leaf.numel() * leaf.element_size() for leaf in a.values())


def all_finite(a: Mapping[str, Tensor]) -> bool:
    """Whether all floating-point leaves are finite."""
    floating = floats(a).values()
    # A finite sum proves that all terms are finite in one pass; a sum may also overflow, hence the second look.
    total = sum(leaf.sum() for leaf in floating)
    return math.isfinite(total) or all(bool(torch.isfinite(leaf).all()) for leaf in floating)
