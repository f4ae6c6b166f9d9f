"""Packs: files that hold the trees of many clients, so that a checkpoint writes only the trees that changed.

A pack never changes. Its name is its checksum, and a checkpoint lists the packs that it needs, with the trees that it
takes from each. A tree that changes is written to a new pack; the old pack keeps its former value. When a checkpoint
needs less than half of a pack, that half is copied to a new pack. So the packs of a checkpoint take at most twice the
space of its trees.
"""

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from operator import is_
from pathlib import Path

from cfl.core import Tree, files, tree
from cfl.runtime import tree_file

NAMES = "pack-*.safetensors"
LARGEST = 32 << 20  # bytes of a pack, unless a single tree has more: limits the memory for writing
SMALL, MANY = 1 << 20, 64  # if more than `MANY` packs have less than `SMALL` bytes, their trees go to one
_NAMED = 150  # bytes that a tree and each of its leaves take in the header of a file, about


@dataclass(frozen=True)
class _Pack:
    """A pack on disk. sizes: name of each of its trees to bytes; held: those trees that the last checkpoint needs."""

    sizes: Mapping[str, int]
    held: Mapping[str, Tree]

    @property
    def size(self) -> int:
        """Bytes of all trees in the file."""
        return sum(self.sizes.values())

    @property
    def mostly_unused(self) -> bool:
        """Whether less than half of the file is needed."""
        return 2 * sum(self.sizes[name] for name in self.held) < self.size

    def select(self, states: Mapping[str, Tree]) -> "_Pack":
        """Return the pack with only those trees that are unchanged in `states`."""
        both = ((name, before, states.get(name)) for name, before in self.held.items())
        return _Pack(self.sizes, {name: now for name, before, now in both if now is not None and _same(before, now)})


class Packs:
    """The packs of a run's last checkpoint.

    A tree with the same leaves as in that checkpoint counts as unchanged, so leaves must not be written to in place.
    To compare, the object refers to the trees of that checkpoint; those that did not change are the run's own.
    """

    def __init__(self) -> None:
        self._packs: dict[str, _Pack] = {}

    def write(self, folder: Path, states: Mapping[str, Tree]) -> list[tuple[str, list[str]]]:
        """Write the trees that no pack holds. Return the name of each pack, and the names of the trees to take from it.

        New packs are on disk afterwards, and older ones are not touched. Raises OSError.
        """
        selected = {name: pack.select(states) for name, pack in self._packs.items()}
        packs = {name: pack for name, pack in selected.items() if not pack.mostly_unused}
        small = {name for name, pack in packs.items() if pack.size < SMALL}
        if len(small) > MANY:
            packs = {name: pack for name, pack in packs.items() if name not in small}
        there = {name for pack in packs.values() for name in pack.held}
        missing = {name: leaves for name, leaves in states.items() if name not in there}
        for sizes in _groups(missing):
            group = {name: missing[name] for name in sizes}
            data = tree_file.encode(group)
            target = folder / _name(data)
            files.replace(target, data, folder / f"{target.name}.tmp")
            packs[target.name] = _Pack(sizes, group)
        if missing:
            files.sync(folder)
        self._packs = packs
        return [(name, list(pack.held)) for name, pack in packs.items()]

    def read(self, folder: Path, listed: Sequence[tuple[str, Sequence[str]]]) -> dict[str, Tree]:
        """Return the trees that `write` listed, and count them as written. Raises OSError or ValueError for damage."""
        packs, states = dict[str, _Pack](), dict[str, Tree]()
        for name, wanted in listed:
            data = (folder / name).read_bytes()
            if _name(data) != name:
                raise ValueError(f"{name} has the content of another pack")
            trees, _ = tree_file.decode(data)
            held = {each: trees[each] for each in wanted}
            packs[name] = _Pack({each: _size(leaves) for each, leaves in trees.items()}, held)
            states |= held
        self._packs = packs
        return states


def _name(data: bytes | bytearray) -> str:
    return NAMES.replace("*", tree_file.checksum(data))


def _same(before: Tree, now: Tree) -> bool:
    return now is before or (list(now) == list(before) and all(map(is_, now.values(), before.values())))


def _size(leaves: Tree) -> int:
    return tree.nbytes(leaves) + _NAMED * (1 + len(leaves))


def _groups(trees: Mapping[str, Tree]) -> Iterator[dict[str, int]]:
    """Split trees, in their order, into groups of at most `LARGEST` bytes: name to bytes."""
    group, room = dict[str, int](), LARGEST
    for name, leaves in trees.items():
        size = _size(leaves)
        if group and size > room:
            yield group
            group, room = {}, LARGEST
        group[name] = size
        room -= size
    if group:
        yield group
