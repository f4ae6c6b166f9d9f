"""The answer of a node in a deployment, found to be of the right kinds, as no node is trusted to send them."""

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from torch import Tensor

from cfl.aggregation.plain import UploadSum
from cfl.config.schema import RunConfig
from cfl.contract import RoundInputs
from cfl.contract.combining import STRATEGY, WEIGHTS
from cfl.core import Tree, tree

Outlines = frozenset[tuple[str, str, tuple[int, ...], str]]
MOST = 2**62  # of a count


@dataclass(frozen=True)
class Expected:
    """What the server knows of a round's answers before they come.

    names: of the entries of a part; owners, stacked: of uploads, see `UploadSum`; uniform: whether each client's weight
    is 1; shows: whether no client uploads, and one shows the shapes; model: the parameters and buffers that were
    broadcast; trained: whether the strategy's uploads are updates of them; counters: names of the integer leaves of
    protected sums; word: type of the integers of secure sums, None without.
    """

    names: frozenset[str]
    owners: frozenset[str]
    stacked: frozenset[str]
    uniform: bool
    shows: bool
    model: Tree
    trained: bool
    counters: frozenset[str]
    word: str | None

    @classmethod
    def of(cls, total: UploadSum, inputs: RoundInputs, config: RunConfig) -> "Expected":
        """Return what is expected of a round. total: its empty sum."""
        info, names = inputs.info, frozenset(total.part())
        return cls(
            names, frozenset(total.gathers) | total.stacked, frozenset(total.stacked), config.agg.weights == "uniform",
            shows=not info.uploading, model=inputs.shared["params"], trained=info.phase.train,
            counters=frozenset(info.model.buffers(info.task)),
            word=f"uint{config.secure.bits}" if config.secagg == "full" and "_integers" in names else None,
        )  # fmt: skip

    @property
    def largest(self) -> int:
        """The most entries of a leaf that came as a single number."""
        return sum(leaf.numel() for leaf in self.model.values())


class NodeResult:
    """A part of a round's sum, and what goes with it. Any exception of the constructor says that it is not one.

    part: for `UploadSum.merge`; done: clients in the sum; sizes: bytes of the parts of each client's state; losses: of
    clients; excluded: clients with an upload that is not finite; outlines: owner, name, shape and type of all that a
    client uploads, and the lengths of its vectors.
    """

    def __init__(self, answer: Any, ids: Sequence[int], expected: Expected) -> None:
        self.part, self.expected, own = dict(answer["part"]), expected, set(ids)
        if self.part.keys() != expected.names:
            raise ValueError("its sum has other parts than those of the run")
        self.done, self.excluded = _ids(answer["done"], own), _ids(answer["excluded"], own)
        self._check_counts(own)
        self.sizes = {id: list(map(int, answer["sizes"][id])) for id in _ids(answer["sizes"], own)}
        if any(len(sizes) != 2 or not all(0 <= size < MOST for size in sizes) for sizes in self.sizes.values()):
            raise ValueError("its sizes of states are not byte counts")
        self.losses = {id: _loss(answer["losses"][id]) for id in _ids(answer["losses"], own)}
        self._check_outlines()
        self._check_sums(own)
        self._check_stacks()
        self._check_vectors()
        self.outlines = self._outlined()

    def _check_counts(self, own: set[int]) -> None:
        part = self.part
        counts = [part[name] for name in ("clipped", "shortened", "_bytes_up", "_count") if name in part]
        if any(type(count) is not int or not 0 <= count < MOST for count in counts):
            raise ValueError("its counts are not numbers")
        protected, clients = "_vector" in part, len(own - {*self.excluded} if self.expected.shows else set(self.done))
        least = int(part["_lowest"] != -1 and not protected)  # vectors hold the weights of their clients
        if type(part["_weight"]) not in (int, float) or not least <= part["_weight"] < MOST:
            raise ValueError("its weight is not a number of samples")
        if protected and not self.done and not self.expected.shows and part["_lowest"] != -1:
            # nothing that was sent would bound their sizes
            raise ValueError("it describes uploads of no client")
        if protected and (part["_count"] != len(self.done) or part["_weight"]):
            raise ValueError(f"it counts {part['_count']} clients in its sum of {len(self.done)}")
        if not protected and self.expected.uniform and part["_weight"] != clients:
            raise ValueError(f"its weight is {part['_weight']:g}, not the {clients} of its clients")
        if type(part["_lowest"]) is not int or part["_lowest"] not in {*own, -1}:
            raise ValueError("its lowest client is not its own")
        if not isinstance(part["zeroed"], list):
            raise ValueError("its clients that count as zero are not a list")
        _ids(part["zeroed"], own)

    def _check_outlines(self) -> None:
        """Raise ValueError unless the uploads have owners of the run, and fit the model where they update it."""
        outlines: Mapping[str, Tree] = self.part["_outlines"]
        if strangers := [owner for owner in outlines if owner not in self.expected.owners]:
            raise ValueError(f"its sum has uploads of {strangers[0]!r}, which the run has not")
        for owner, leaves in outlines.items():
            for name, leaf in leaves.items():
                if not isinstance(name, str) or not isinstance(leaf, Tensor) or leaf.is_complex():
                    raise ValueError(f"its sum of '{owner}' is not a tree of real numbers")
                protected = "_vector" in self.part and name not in self.expected.counters
                if protected and not leaf.is_floating_point():
                    raise ValueError(f"its sum of '{owner}' has {leaf.dtype} in '{name}', not floats")
        if not self.expected.trained:
            return
        for name in outlines.get(STRATEGY, {}).keys() & self.expected.model.keys():
            sent, leaf = outlines[STRATEGY][name], self.expected.model[name]
            if (sent.shape, sent.is_floating_point()) != (leaf.shape, leaf.is_floating_point()):
                raise ValueError(
                    f"its '{STRATEGY}/{name}' has shape {tuple(sent.shape)} and type {sent.dtype}, the model "
                    f"{tuple(leaf.shape)} and {leaf.dtype}"
                )

    def _check_sums(self, own: set[int]) -> None:
        part = self.part
        _ids(part["_stacks"], own)
        summed = set() if "_vector" in part else part["_outlines"].keys() - self.expected.stacked
        if part["_sums"].keys() != summed:
            raise ValueError("its sum has other owners than it says")
        for trees in (part["_sums"], *part["_stacks"].values()):
            for owner, leaves in trees.items():
                if {name: _kind(leaf) for name, leaf in leaves.items()} != self._kinds(owner):
                    raise ValueError(f"its sum of '{owner}' has other names, shapes or types than it says")
                for leaf in leaves.values():
                    self._check_size(owner, leaf)
                if not tree.all_finite(leaves):
                    raise ValueError(f"its sum of '{owner}' has NaN or infinity")

    def _check_size(self, owner: str, leaf: Tensor) -> None:
        """Raise ValueError for a leaf of more entries than the model has, of which the node sent one."""
        if not any(leaf.stride()) and leaf.numel() > self.expected.largest:
            raise ValueError(f"its sum of '{owner}' has one number for {leaf.numel()} entries, more than the model has")

    def _check_stacks(self) -> None:
        """Raise ValueError unless each client in the sum has all that is stacked, with a weight that can be one."""
        stacks, owners = self.part["_stacks"], self.expected.stacked & self.part["_outlines"].keys()
        found = dict.fromkeys(self.done, owners) if owners else {}
        if {id: set(own) for id, own in stacks.items()} != found:
            raise ValueError("its stacks are not those of the clients that it has computed")
        weights = [float(own[WEIGHTS][""]) for own in stacks.values() if WEIGHTS in owners]
        if any(weight <= 0 or (self.expected.uniform and weight != 1) for weight in weights):
            raise ValueError("its clients' weights are not those of agg.weights")

    def _check_vectors(self) -> None:
        """Raise ValueError unless the vectors of protected sums have the entries of the uploads."""
        if "_vector" not in self.part:
            return
        vector, integers = self.part["_vector"], self.part["_integers"]
        leaves = [leaf for own in self.part["_outlines"].values() for leaf in own.values() if leaf.is_floating_point()]
        length = sum(map(torch.Tensor.numel, leaves)) + (not self.expected.uniform)
        lengths = (0, length) if self.expected.word or not self.done else (length,)
        single = length > 1 and not any(vector.stride())  # which stands for any number of entries
        if vector.dtype != torch.float64 or vector.dim() != 1 or len(vector) not in lengths or single:
            raise ValueError(f"its vector has not the {length} entries of its uploads, as float64")
        if not tree.all_finite({"": vector}):
            raise ValueError("its sum has NaN or infinity")
        if integers.keys() != (set(self.done) if self.expected.word else set()):
            raise ValueError("its integers are not those of the clients that it has computed")
        if any(_kind(one) != ((length,), self.expected.word) for one in integers.values()):
            raise ValueError(f"its integers are not {length} of type {self.expected.word} for each client")

    def _kinds(self, owner: str) -> dict[str, Any]:
        return {name: _kind(leaf) for name, leaf in self.part["_outlines"][owner].items()}

    def _outlined(self) -> Outlines:
        return frozenset(
            (owner, name, shape, dtype)
            for owner in self.part["_outlines"]
            for name, (shape, dtype) in self._kinds(owner).items()
        )


def _loss(value: Any) -> Tensor:
    """Return a loss as float64. Raises ValueError unless it is one real number that float32 holds, so that sums fit."""
    if not isinstance(value, Tensor) or value.shape != () or not value.is_floating_point():
        raise ValueError("its losses are not numbers")
    if not value.float().isfinite():
        raise ValueError("its losses are not finite in float32")
    return value.double()


def _kind(leaf: Tensor | np.ndarray) -> tuple[tuple[int, ...], str]:
    return tuple(leaf.shape), str(leaf.dtype)


def _ids(found: Iterable[int], own: set[int]) -> list[int]:
    """Return ids as a list. Raises ValueError if a client is not the node's."""
    ids = list(found)
    if not own.issuperset(ids):
        raise ValueError("it answers for clients that it was not asked for")
    if len(set(ids)) < len(ids):
        raise ValueError("it answers twice for a client")
    return ids
