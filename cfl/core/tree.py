"""Algebra on trees: dictionaries from names to tensors, in a fixed order."""

import math
from collections.abc import Callable, Iterable, Mapping, Sequence

import torch
from torch import Tensor

Tree = dict[str, Tensor]


def map(fn: Callable[..., Tensor], first: Mapping[str, Tensor], *rest: Mapping[str, Tensor]) -> Tree:
    """Apply `fn` to the leaves of the same name; the names and their order are those of the first tree."""
    return {name: fn(leaf, *(tree[name] for tree in rest)) for name, leaf in first.items()}


def add(a: Tree, b: Tree) -> Tree:
    """a + b, leaf by leaf."""
    return map(torch.add, a, b)


def sub(a: Tree, b: Tree) -> Tree:
    """a - b, leaf by leaf."""
    return map(torch.sub, a, b)


def scale(a: Tree, factor: float | Tensor) -> Tree:
    """factor * a for the floating-point leaves; integer leaves are passed on as they are."""
    return map(lambda leaf: leaf * factor if leaf.is_floating_point() else leaf, a)


def select(a: Mapping[str, Tensor], names: Iterable[str]) -> Tree:
    """The leaves of those names, in the order of `names`."""
    return {name: a[name] for name in names}


def dot(a: Tree, b: Tree) -> Tensor:
    """Sum over all leaves of the elementwise product: a scalar."""
    return torch.stack([(leaf * b[name]).sum() for name, leaf in a.items()]).sum()


def clone(a: Mapping[str, Tensor]) -> Tree:
    """Detached copies of all leaves: writing to the copy never touches the original."""
    return {name: leaf.detach().clone() for name, leaf in a.items()}


def stack(trees: Sequence[Tree]) -> Tree:
    """One tree whose leaves have a new first dimension of length len(trees)."""
    return {name: torch.stack([tree[name] for tree in trees]) for name in trees[0]}


def unstack(a: Tree) -> list[Tree]:
    """The inverse of `stack`."""
    length = next(iter(a.values())).shape[0]
    return [{name: leaf[i] for name, leaf in a.items()} for i in range(length)]


def flatten(a: Tree) -> tuple[Tensor, dict[str, torch.Size]]:
    """All leaves end to end as one vector, and the shapes that `unflatten` needs."""
    return torch.cat([leaf.reshape(-1) for leaf in a.values()]), {name: leaf.shape for name, leaf in a.items()}


def unflatten(vector: Tensor, shapes: Mapping[str, torch.Size]) -> Tree:
    """The inverse of `flatten`."""
    parts = vector.split([shape.numel() for shape in shapes.values()])
    return {name: part.reshape(shape) for part, (name, shape) in zip(parts, shapes.items())}


def nbytes(a: Mapping[str, Tensor]) -> int:
    """Size of all leaves in bytes."""
    return sum(leaf.numel() * leaf.element_size() for leaf in a.values())


def all_finite(a: Mapping[str, Tensor]) -> bool:
    """Whether no floating-point leaf holds a NaN or an infinity."""
    floating = [leaf for leaf in a.values() if leaf.is_floating_point()]
    # A sum is finite only where all its terms are, and needs one pass; it may overflow, so look again.
    total = sum(leaf.sum() for leaf in floating)
    return math.isfinite(total) or all(bool(torch.isfinite(leaf).all()) for leaf in floating)
