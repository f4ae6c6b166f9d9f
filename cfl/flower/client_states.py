"""The states of a node's clients, in a folder of the node: the server has only references to them."""

from collections.abc import Mapping, Sequence
from pathlib import Path

import torch

from cfl.contract.composed import STRATEGY
from cfl.core import CheckpointError, Tree, files
from cfl.runtime import tree_file

_OF_STRATEGY, _OF_OTHERS = f"{STRATEGY}/elsewhere", "regularizers/elsewhere"  # removed at the end of a task


def reference(version: int, task: int, sizes: Sequence[int]) -> Tree:
    """Return what the server keeps instead of a client's state.

    version: rounds of the run up to the state; task: of its round; sizes: bytes of its two `parts`.
    """
    own, others = sizes
    return {_OF_STRATEGY: torch.tensor([version, task, own]), _OF_OTHERS: torch.tensor([others])}


def version(reference: Tree) -> tuple[int, int]:
    """Return the version and the task of a state, zeros for a client that has none."""
    number, task, _ = reference[_OF_STRATEGY].tolist() if reference else (0, 0, 0)
    return number, task


def stored_bytes(reference: Tree) -> int:
    """Return the bytes of the state that a reference stands for."""
    return sum(int(leaf[-1]) for leaf in reference.values())


def parts(state: Tree) -> tuple[Tree, Tree]:
    """Split a state into the strategy's part, which lasts, and that of the regularizers, which ends with the task."""
    own = {name: leaf for name, leaf in state.items() if name.startswith(f"{STRATEGY}/")}
    return own, {name: leaf for name, leaf in state.items() if name not in own}


class ClientStates:
    """A folder with a file for each version of a client's state. A version is written whole or not at all."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder

    def load(self, client: int, version: int) -> Tree:
        """Return a version of a client's state; empty for version 0. Raises CheckpointError if it is not there."""
        if version == 0:
            return {}
        path = self._path(client, version)
        try:
            trees, _ = tree_file.decode(path.read_bytes())
        except OSError as error:
            raise CheckpointError(
                f"client {client} has no state of round {version} ({error.strerror}); put the node's "
                "folder back, or give the client a new id"
            ) from error
        except ValueError as error:
            raise CheckpointError(f"the state of client {client} is damaged ({error})") from error
        return trees["state"]

    def store(self, version: int, states: Mapping[int, Tree], current: Mapping[int, int], kept: int) -> None:
        """Write a version of the states of clients.

        current: the version of each client that the server has taken last, 0 for none; later ones are of rounds that
        came to nothing. kept: the oldest version to which the run may return.
        """
        for client, state in states.items():
            path = self._path(client, version)
            path.parent.mkdir(parents=True, exist_ok=True)
            files.replace(path, tree_file.encode({"state": state}), path.with_suffix(".tmp"))
            others = {int(other.stem): other for other in path.parent.glob("*.safetensors") if other != path}
            needed = {number for number in others if kept < number <= current[client]}
            needed |= {max((number for number in others if number <= min(kept, current[client])), default=0)}
            for number in others.keys() - needed:
                others[number].unlink(missing_ok=True)

    def _path(self, client: int, version: int) -> Path:
        return self.folder / f"client-{client}" / f"{version:08d}.safetensors"
