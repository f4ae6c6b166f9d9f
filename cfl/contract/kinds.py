"""Descriptions of values, and of what is wrong with a tree, in few words."""

from collections.abc import Iterable, Mapping
from typing import Any

from torch import Tensor

from cfl.core.errors import few


def kind(value: Any) -> str:
    """Describe a value in few words, such as "a tensor of shape (3,)"."""
    if value is None:
        return "None"
    if isinstance(value, Tensor):
        return f"{_article(str(value.dtype).removeprefix('torch.'))} tensor of shape {tuple(value.shape)}"
    if isinstance(value, tuple | list | dict) and not value:
        return f"an empty {type(value).__name__}"
    if isinstance(value, tuple | list):
        return f"a {type(value).__name__} of {len(value)}"
    shown = f" ({value!r:.40})" if isinstance(value, str | int | float) else ""
    return _article(type(value).__name__) + shown


def _article(noun: str) -> str:
    return f"{'an' if noun[0] in 'aeiou' else 'a'} {noun}"


def tree_fault(value: Any, *_: Any) -> str:
    if not isinstance(value, dict):
        return kind(value)
    for name, leaf in value.items():
        if not isinstance(name, str):
            return f"a tree with {kind(name)} in place of a name"
        if not isinstance(leaf, Tensor):
            return f"a tree whose leaf '{name}' is {kind(leaf)}"
    return ""


def unlike_fault(
    value: Any, like: Mapping[str, Tensor], needed: Iterable[str], what: str = "a tree", types: bool = False
) -> str:
    """Compare a tree with leaves that it may have. needed: names that it must have; types: whether dtypes count."""
    if text := tree_fault(value):
        return text
    if missing := [name for name in needed if name not in value]:
        return f"{what} without {few([*map(repr, missing)], 1)}"
    if others := [name for name in value if name not in like]:
        return f"{what} with the unknown name {few([*map(repr, others)], 1)}"
    for name, leaf in value.items():
        if leaf.shape != like[name].shape or (types and leaf.dtype != like[name].dtype):
            return f"{what} whose leaf '{name}' is {kind(leaf)} instead of {kind(like[name])}"
    return ""
