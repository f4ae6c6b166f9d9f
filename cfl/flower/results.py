"""The answer of a node in a deployment, found to be of the right kinds, as no node is trusted to send them."""

from collections.abc import Collection, Iterable, Sequence
from typing import Any

import numpy as np
import torch
from torch import Tensor

from cfl.contract.combining import WEIGHTS
from cfl.core import tree

Outlines = frozenset[tuple[str, str, tuple[int, ...], str]]
MOST = 2**62  # of a count


class NodeResult:
    """A part of a round's sum, and what goes with it. Any exception of the constructor says that it is not one.

    part: for `UploadSum.merge`; done: clients in the sum; sizes: bytes of the parts of each client's state; losses: of
    clients; excluded: clients with an upload that is not finite; outlines: owner, name, shape and type of all that a
    client uploads, and the lengths of its vectors.
    names: of the entries of a part; stacked: see `UploadSum`; uniform: whether each client's weight is 1.
    """

    def __init__(
        self, answer: Any, ids: Sequence[int], names: Collection[str], stacked: Collection[str], uniform: bool
    ) -> None:
        self.part, own = dict(answer["part"]), set(ids)
        if self.part.keys() != set(names):
            raise ValueError("its sum has other parts than those of the run")
        self._check_counts(own)
        self.done, self.excluded = _ids(answer["done"], own), _ids(answer["excluded"], own)
        self.sizes = {id: list(map(int, answer["sizes"][id])) for id in _ids(answer["sizes"], own)}
        self.losses: dict[int, Tensor] = {id: answer["losses"][id] for id in _ids(answer["losses"], own)}
        if any(len(sizes) != 2 or not all(0 <= size < MOST for size in sizes) for sizes in self.sizes.values()):
            raise ValueError("its sizes of states are not byte counts")
        if any(
            not isinstance(loss, Tensor) or loss.shape != () or not loss.isfinite() for loss in self.losses.values()
        ):
            raise ValueError("its losses are not numbers")
        self._check_sums(own)
        self._check_stacks(stacked, uniform)
        self.outlines = self._outlined()

    def _check_counts(self, own: set[int]) -> None:
        part = self.part
        counts = [part[name] for name in ("clipped", "shortened", "_bytes_up", "_count") if name in part]
        if any(type(count) is not int or not 0 <= count < MOST for count in counts):
            raise ValueError("its counts are not numbers")
        least = int(part["_lowest"] != -1 and "_vector" not in part)  # vectors hold the weights of their clients
        if type(part["_weight"]) not in (int, float) or not least <= part["_weight"] < MOST:
            raise ValueError("its weight is not a number of samples")
        if type(part["_lowest"]) is not int or part["_lowest"] not in {*own, -1}:
            raise ValueError("its lowest client is not its own")
        if not isinstance(part["zeroed"], list):
            raise ValueError("its clients that count as zero are not a list")
        _ids(part["zeroed"], own)

    def _check_sums(self, own: set[int]) -> None:
        part = self.part
        _ids(part["_stacks"], own)
        _ids(part.get("_integers", {}), own)
        for trees in (part["_sums"], *part["_stacks"].values()):
            for owner, leaves in trees.items():
                if not tree.all_finite(leaves):
                    raise ValueError(f"its sum of '{owner}' has NaN or infinity")
                if {name: _kind(leaf) for name, leaf in leaves.items()} != self._kinds(owner):
                    raise ValueError(f"its sum of '{owner}' has other names, shapes or types than it says")
        if "_vector" in part and not tree.all_finite({"": part["_vector"]}):
            raise ValueError("its sum has NaN or infinity")

    def _check_stacks(self, stacked: Collection[str], uniform: bool) -> None:
        """Raise ValueError unless each client in the sum has all that is stacked, with a weight that can be one."""
        stacks, owners = self.part["_stacks"], {*stacked} & self.part["_outlines"].keys()
        expected = dict.fromkeys(self.done, owners) if owners else {}
        if {id: set(own) for id, own in stacks.items()} != expected:
            raise ValueError("its stacks are not those of the clients that it has computed")
        weights = [float(own[WEIGHTS][""]) for own in stacks.values() if WEIGHTS in owners]
        if any(weight <= 0 or (uniform and weight != 1) for weight in weights):
            raise ValueError("its clients' weights are not those of agg.weights")

    def _kinds(self, owner: str) -> dict[str, Any]:
        return {name: _kind(leaf) for name, leaf in self.part["_outlines"][owner].items()}

    def _outlined(self) -> Outlines:
        shapes = {
            (owner, name, shape, dtype)
            for owner in self.part["_outlines"]
            for name, (shape, dtype) in self._kinds(owner).items()
        }
        vectors = {("integers", "", *_kind(vector)) for vector in self.part.get("_integers", {}).values()}
        return frozenset(shapes | vectors | {("vector", "", *_kind(self.part.get("_vector", torch.empty(0))))})


def _kind(leaf: Tensor | np.ndarray) -> tuple[tuple[int, ...], str]:
    return tuple(leaf.shape), str(leaf.dtype)


def _ids(found: Iterable[int], own: set[int]) -> list[int]:
    """Return ids as a list. Raises ValueError if a client is not the node's."""
    ids = list(found)
    if not own.issuperset(ids):
        raise ValueError("it answers for clients that it was not asked for")
    return ids
