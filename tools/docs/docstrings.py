"""Extension of griffe: docstrings as Markdown, and a table of the options of each method.

A docstring names arguments and fields in lines such as `name: meaning` or `first, second: meaning; third: meaning`.
On a page each of them becomes an item of a list, and what is raised a paragraph.
"""

import re
from collections.abc import Iterable
from dataclasses import is_dataclass
from importlib import import_module
from typing import Any

import griffe

from cfl.core import options

_FIELD = r"(?P<names>\w+(?:, \w+)*): "
_HEAD = ["option", "default", "values", "meaning", "source"]
_SAID = {"source": "Source", "sends": "A client sends"}


class Docstrings(griffe.Extension):
    """Rewrites the docstrings of a package once it is loaded."""

    def on_package(self, *, pkg: griffe.Module, **_: Any) -> None:
        """Rewrite all docstrings of the package."""
        for item in _objects(pkg):
            if item.docstring is not None:
                item.docstring.value = markdown(item.docstring.value, _names(item))
        for item in _objects(pkg):
            if item.is_class and item.docstring is not None and item.path.startswith("cfl.methods."):
                item.docstring.value += _method(item)


def markdown(text: str, names: Iterable[str]) -> str:
    """Return a docstring as Markdown. names: the arguments or fields that it may describe."""
    known, blocks = set(names), []
    for block in re.split(r"\n\s*\n", text):
        blocks.append(block if block.startswith("    ") else _block(block, known))
    return "\n\n".join(blocks)


def _block(block: str, known: set[str]) -> str:
    """A paragraph as Markdown: descriptions of known names as a list, other lines that are set in as they are."""

    def item(found: re.Match[str]) -> str:
        names = found["names"].split(", ")
        return f"\n\n- {', '.join(f'`{name}`' for name in names)}: " if set(names) <= known else found[0]

    if known:
        block = re.sub(rf"(?:^|\n|(?<=[;.]) )\s*{_FIELD}", item, block)
        block = re.sub(r"(?:^|\n|(?<=\.) )(?=Raises? [A-Z`])", "\n\n", block)
        block = re.sub(r"\n\s*- (?!`\w+`(?:, `\w+`)*: )", "\n\n    - ", block)  # a list below an item
    else:
        block = re.sub(r"(?:(?:^|(?<=\n)) {4}.*(?:\n|$))+", lambda lines: f"\n\n{lines[0].rstrip()}\n\n", block)
    return "\n\n".join(_flowing(part.strip("\n")) for part in re.split(r"\n\n+", block) if part.strip())


def _flowing(part: str) -> str:
    """A paragraph or an item in one line; lines that are code stay."""
    indent = part[: len(part) - len(part.lstrip())]
    if len(indent) == 4 and not part.startswith("    - "):
        return part
    return indent + _plain(" ".join(part.split()).rstrip(";"))


def _plain(text: str) -> str:
    """A text in which names such as w_global, and X* for a residual, are no markup; `code` and *stress* stay."""
    texts = re.split(r"(`[^`]*`|(?<!\w)\*\w+\*(?!\w))", text)
    return "".join(part if number % 2 else re.sub(r"[_*]", r"\\\g<0>", part) for number, part in enumerate(texts))


def _method(item: Any) -> str:
    """The head of the module of a method, and what the class declares: source, uploads and options."""
    cls = getattr(import_module(item.parent.path), item.name)
    module = item.parent.docstring
    about = module.value.partition("\n\n")[2] if module is not None else ""
    said = [f"{title}: {_plain(vars(cls)[name])}." for name, title in _SAID.items() if vars(cls).get(name)]
    return "".join(f"\n\n{part}" for part in [about, *said, _table(cls)] if part)


def _table(cls: type) -> str:
    """The options of a method as a table; empty if it has none."""
    rows = options.describe(cls) if is_dataclass(cls) else []
    cells = [
        [f"`{row['name']}`", f"`{row['default']}`", *(_plain(row[name]) for name in ("range", "help", "source"))]
        for row in rows
    ]
    lines = [_HEAD, ["---"] * len(_HEAD), *([cell.replace("|", "&#124;") for cell in line] for line in cells)]
    return "\n".join(f"| {' | '.join(line)} |" for line in lines) if rows else ""


def _objects(item: Any) -> Iterable[Any]:
    yield item
    for member in item.members.values():
        if not member.is_alias:
            yield from _objects(member)


def _names(item: Any) -> list[str]:
    """Names of the arguments of a function, or of the fields of a class and the arguments of its constructor."""
    if item.is_function:
        return [one.name for one in item.parameters]
    if not item.is_class:
        return []
    made = item.members.get("__init__")
    return [*item.members, *(_names(made) if made is not None and made.is_function else [])]
