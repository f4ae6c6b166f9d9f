"""The state of a run: all that a checkpoint holds."""

import copy
import json
from collections.abc import Mapping
from typing import Any

import numpy as np
import torch

from cfl.contract import Server
from cfl.core import Tree, tree

WIRE = ("wire_bytes_up", "wire_bytes_down")
"""Bytes of the content of messages to and from nodes, beside the bytes that the method sends."""


class RunState:
    """State of a run. server: its trees; clients: id to state, if not empty; position: place of the next round.

    skipped: places of the rounds that callbacks have skipped; stops: their decisions, as in metrics.json.
    pending: of a round that is computed, but after which a callback failed, its row and the name of the callback.
    last_task: id to the last task in which the client took part.

    accuracy_matrix: (tasks, tasks) fractions, NaN where not evaluated; validation_matrix: the same on held-out training
    samples, NaN without any; initial_accuracy: of the initial model on each task, fractions; empty if later tasks are
    not evaluated; bytes: phase name to {"up", "down"};
    seconds: who spent them ("clients", "server", "measurement") to phase name, "evaluate" or "checkpoint", to seconds;
    local: last figures of the local models; reports: the method's own figures after each task.
    """

    def __init__(self, server: Server, tasks: int) -> None:
        self.server, self.position = server, 0
        self.clients: dict[int, Tree] = {}
        self.last_task: dict[int, int] = {}
        self.accuracy_matrix = np.full((tasks, tasks), np.nan)
        self.validation_matrix = self.accuracy_matrix.copy()
        self.initial_accuracy: list[float] = []
        self.bytes: dict[str, dict[str, int]] = {}
        self.seconds: dict[str, dict[str, float]] = {"clients": {}, "server": {}, "measurement": {}}
        self.local: dict[str, list[float]] = {}
        self.reports: list[dict[str, Any]] = []
        self.skipped: set[int] = set()
        self.stops: list[dict[str, Any]] = []
        self.pending: tuple[dict[str, Any], str] | None = None

    @property
    def done(self) -> int:
        """Number of completed rounds."""
        return self.position - sum(place < self.position for place in self.skipped)

    def count(self, row: Mapping[str, Any]) -> None:
        """Add a round's bytes to its phase."""
        sums = self.bytes.setdefault(row["phase"], {"up": 0, "down": 0})
        for name in ("bytes_up", "bytes_down", *WIRE):
            if name in row:
                short = name.removeprefix("bytes_")
                sums[short] = sums.get(short, 0) + row[name]

    def widen(self, tasks: int) -> None:
        """Make room for the accuracies of more tasks."""
        more = tasks - len(self.accuracy_matrix)
        self.accuracy_matrix = np.pad(self.accuracy_matrix, (0, more), constant_values=np.nan)
        self.validation_matrix = np.pad(self.validation_matrix, (0, more), constant_values=np.nan)

    def spent(self, kind: str, what: str, seconds: float) -> None:
        """Add seconds of a kind to a phase."""
        self.seconds[kind][what] = self.seconds[kind].get(what, 0.0) + seconds

    def totals(self) -> dict[str, Any]:
        """Bytes and seconds of the run so far, and the last accuracy of the local models, if measured."""
        return {
            "bytes_up": sum(sums["up"] for sums in self.bytes.values()),
            "bytes_down": sum(sums["down"] for sums in self.bytes.values()),
            "bytes_by_phase": {
                name: {"up": sums["up"], "down": sums["down"]} for name, sums in sorted(self.bytes.items())
            },
            **self._wire(),
            "seconds": sum(sum(by_phase.values()) for by_phase in self.seconds.values()),
            **({"local_accuracy": self.local["accuracy"]} if self.local else {}),
        }

    def _wire(self) -> dict[str, int]:
        """Bytes of messages between processes, if the engine counts them."""
        found = {name: sum(sums.get(name, 0) for sums in self.bytes.values()) for name in WIRE}
        return found if any(found.values()) else {}

    def saved(self) -> tuple[dict[str, Tree], dict[str, Any], dict[str, Tree]]:
        """Trees, JSON data and the clients' states for a checkpoint; later rounds do not change them."""
        trees = {f"server/{name}": dict(leaves) for name, leaves in self.server.items()}
        trees["run"] = {"acc": torch.tensor(self.accuracy_matrix)}
        if not np.isnan(self.validation_matrix).all():
            trees["run"]["validation"] = torch.tensor(self.validation_matrix)
        kept = {"bytes": self.bytes, "seconds": self.seconds, "local": self.local}
        reports = json.dumps(self.reports)  # as text: the checkpoint would sort the layers
        meta = {"position": self.position, **copy.deepcopy(kept), "reports": reports}
        meta["last_task"] = {str(id): task for id, task in sorted(self.last_task.items())}
        if self.initial_accuracy:
            meta["initial_accuracy"] = list(self.initial_accuracy)
        if self.stops:
            meta |= {"skipped": sorted(self.skipped), "stops": json.dumps(self.stops)}
        if self.pending is not None:
            meta["pending"] = json.dumps(self.pending)
        # No copies: a round replaces a client's tree, and the same tree need not be written again.
        return trees, meta, {f"client/{id}": leaves for id, leaves in sorted(self.clients.items())}

    def restore(self, trees: Mapping[str, Tree], meta: Mapping[str, Any], device: torch.device) -> None:
        """Restore the result of `saved`."""
        self.server, self.clients = {}, {}
        for name, leaves in trees.items():
            owner, _, rest = name.partition("/")
            moved = tree.map(lambda leaf: leaf.to(device), leaves)
            if owner == "server":
                self.server[rest] = moved
            elif owner == "client":
                self.clients[int(rest)] = moved
        self.accuracy_matrix = trees["run"]["acc"].numpy().copy()
        if "validation" in trees["run"]:
            self.validation_matrix = trees["run"]["validation"].numpy().copy()
        self.initial_accuracy = list(meta.get("initial_accuracy", self.initial_accuracy))
        self.position, self.bytes, self.seconds = meta["position"], dict(meta["bytes"]), dict(meta["seconds"])
        self.local, self.reports = dict(meta["local"]), json.loads(meta["reports"])
        self.last_task = {int(id): task for id, task in meta["last_task"].items()}
        self.skipped, self.stops = set(meta.get("skipped", ())), json.loads(meta.get("stops", "[]"))
        self.pending = tuple(json.loads(meta["pending"])) if "pending" in meta else None
