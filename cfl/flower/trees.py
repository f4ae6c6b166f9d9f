"""Broadcast trees by content: a node keeps those that it got, and the server sends only those that the node lacks."""

import os
from collections.abc import Mapping, Set
from hashlib import blake2b
from pathlib import Path

from flwr.app import Array, ArrayRecord

from cfl.contract import RoundInputs, TreesByOwner
from cfl.core import Tree
from cfl.flower import wire

Names = Mapping[str, tuple[str, list[str]]]
"""By owner: the hash of its tree, and the names of the leaves in their order, which safetensors does not keep."""

FIXED = "fixed"  # the frozen parameters
SENT = "sent/"  # before the name of a tree of the broadcast, which a strategy may call "fixed", too


class Missing(Exception):
    """A node lacks trees of a broadcast."""


class Broadcast:
    """The trees of a round, packed once for all nodes. names: of the trees."""

    def __init__(self, shared: TreesByOwner) -> None:
        packed = {owner: wire.array(leaves) for owner, leaves in shared.items()}
        self.names: Names = {owner: (_hash(array), list(shared[owner])) for owner, array in packed.items()}
        self._arrays = {self.names[owner][0]: array for owner, array in packed.items()}

    @property
    def hashes(self) -> set[str]:
        """Hashes of the trees."""
        return set(self._arrays)

    def record(self, but: Set[str]) -> ArrayRecord:
        """Return the trees for a node, without those that it has. but: their hashes."""
        return ArrayRecord({name: array for name, array in self._arrays.items() if name not in but})


def with_fixed(inputs: RoundInputs) -> TreesByOwner:
    """The broadcast of a round and the frozen parameters, which a node gets once, since they never change."""
    fixed, shared = inputs.info.model.fixed, {SENT + owner: leaves for owner, leaves in inputs.shared.items()}
    return {**shared, FIXED: fixed} if fixed else shared


def without_fixed(found: TreesByOwner) -> tuple[TreesByOwner, Tree]:
    """The broadcast and the frozen parameters in what `with_fixed` returns."""
    return {name.removeprefix(SENT): leaves for name, leaves in found.items() if name != FIXED}, found.get(FIXED, {})


class TreeFolder:
    """The trees of the last broadcast on a node, each in a file named by its hash, for processes that share them."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder

    def shared(self, names: Names, sent: ArrayRecord) -> TreesByOwner:
        """Return the broadcast by owner, and keep its trees instead of earlier ones. Raises Missing."""
        self.folder.mkdir(parents=True, exist_ok=True)
        found = {}
        for owner, (name, leaves) in names.items():
            array = sent[name] if name in sent else self._kept(name)
            if array is None or _hash(array) != name:
                raise Missing
            if name in sent:
                self._keep(name, array.data)
            content = wire.tree(array)
            found[owner] = {leaf: content[leaf] for leaf in leaves}
        needed = {name for name, _ in names.values()}
        for path in self.folder.iterdir():
            if path.name.partition(".")[0] not in needed:
                path.unlink(missing_ok=True)
        return found

    def _kept(self, name: str) -> Array | None:
        try:
            data = (self.folder / name).read_bytes()
        except OSError:
            return None
        return Array(dtype="uint8", shape=(len(data),), stype=wire.FORMAT, data=data)

    def _keep(self, name: str, data: bytes) -> None:
        temporary = self.folder / f"{name}.{os.getpid()}"  # other processes may write the same tree
        temporary.write_bytes(data)
        temporary.replace(self.folder / name)


def _hash(array: Array) -> str:
    return blake2b(array.data, digest_size=32).hexdigest()  # so that no server finds two trees with one hash
