"""Checks that the server's trees are finite, where a hook returns them."""

from collections.abc import Iterable, Mapping

import torch
from torch import Tensor

from cfl.core import Tree, UpdateError, tree

_STRICT = ("params", "step")  # other trees may hold infinity, such as the start of a running minimum


def check_finite(
    what: str, found: Mapping[str, Tree], known: Mapping[str, Tree], given: Mapping[str, Tree], cure: str
) -> None:
    """Raise UpdateError if a hook of the server returns NaN, or infinity in the model or in its step.

    Leaves of `known` are not looked at again.

    what: the hook and its owner; found: trees by name; given: the aggregated uploads that the hook got;
    cure: place in the run and remedy, for the end of the message.
    """
    for name, leaves in found.items():
        before = known.get(name, {})
        new = {key: leaf for key, leaf in leaves.items() if leaf is not before.get(key)}
        if tree.all_finite(new) or (name not in _STRICT and not any(leaf.isnan().any() for leaf in new.values())):
            continue
        if not all(map(tree.all_finite, given.values())):
            raise UpdateError(f"the aggregated uploads hold {_named(given)} {cure}")
        raise UpdateError(f"{what} returns {_named({name: new})} {cure}")


def fault(leaf: Tensor) -> str:
    """NaN or infinity, whichever a leaf that is not finite holds."""
    return "NaN" if torch.isnan(leaf).any() else "infinity"


def any_of(names: Iterable[str]) -> str:
    """Join words: "a, b or c"."""
    *first, last = names
    return f"{', '.join(first)} or {last}" if first else last


def _named(trees: Mapping[str, Tree]) -> str:
    """The first leaf that is not finite: "NaN in 'params/w'"."""
    bad = ((f"{name}/{key}", leaf) for name, leaves in trees.items() for key, leaf in leaves.items())
    path, leaf = next((path, leaf) for path, leaf in bad if not tree.all_finite({path: leaf}))
    return f"{fault(leaf)} in '{path}'"
