"""The nodes of a deployment: who has joined, and which clients each of them computes."""

from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import Any

from cfl.core.errors import FEW_NAMES, few
from cfl.core.version import __version__
from cfl.flower.link import Link, printable
from cfl.flower.results import MOST
from cfl.runtime.fingerprint import Fingerprint

JOIN = 5.0  # seconds that a round waits for new nodes; a node that needs longer joins at a later one
NAME = 100  # characters of a node's name that are shown
RESTARTED = "it has started again under another id"


@dataclass(frozen=True)
class Member:
    """A node that has joined. name: for messages; token: stays with the node's folder when the node restarts.

    clients: ids of its clients; samples: for each task the number of samples, of nodes with data of their own.
    """

    node: int
    name: str
    token: str
    clients: tuple[int, ...]
    samples: tuple[int, ...] | None = None


class Members:
    """The nodes that have joined. fingerprint: of the server's run; options: hash of its configuration.

    refused: node to the reason, for nodes that may not join; samples: by client, of nodes with data of their own, also
    of those that have left; say: called with a line for each change.
    """

    def __init__(self, link: Link, fingerprint: Fingerprint, options: str, say: Callable[[str], None]) -> None:
        self.link, self.fingerprint, self.options, self.say = link, fingerprint, options, say
        self.population = fingerprint.config.partition.clients
        self.joined: dict[int, Member] = {}
        self.refused: dict[int, str] = {}
        self.samples: dict[int, tuple[int, ...]] = {}
        self._starts = dict[int, str]()  # by node, when it has started: one with a registered key keeps its id
        self._replaced = dict[int, str]()  # by node that another has replaced: the token of both
        self._silent = dict[int, str]()  # nodes that have not answered, and why

    def refresh(self) -> None:
        """Ask new nodes to join, also those that have started again, and forget those that have left."""
        starts = {node.node_id: node.last_activated_at for node in self.link.grid.get_nodes()}
        for node in [node for node, start in starts.items() if start != self._starts.get(node)]:
            self.joined.pop(node, None)  # it may have other clients now
            self.refused.pop(node, None)
            self.link.forget(node)
        self._starts, present = starts, starts.keys()
        if (self.joined.keys() | self.refused.keys()) - present:  # what was in the way of others may be gone
            there = {member.token for node, member in self.joined.items() if node in present}
            self.refused = {
                node: why
                for node, why in self.refused.items()
                if why == RESTARTED and node in present and self._replaced[node] in there
            }
        for node in sorted(self.joined.keys() - present):
            self.say(f"{_named(self.joined.pop(node))} has left")
        new = sorted(present - self.joined.keys() - self.refused.keys())
        before, self._silent = self._silent, {}
        for node, answer in self.link.poll("query.join", dict.fromkeys(new), JOIN).items():
            if answer.fault and not answer.error:  # it may answer the next time
                self._silent[node] = answer.fault
                if before.get(node) != answer.fault:
                    self.say(f"node {node} has not joined yet: {answer.fault}")
            elif fault := answer.fault or self._take_in(node, answer.value):
                self.refused[node] = fault = printable(fault)
                self.say(f"node {node} may not join: {fault}")

    def of(self, clients: Iterable[int]) -> tuple[dict[int, list[int]], list[int]]:
        """Return the clients by node, and those whose node is not there."""
        home = {client: node for node, member in self.joined.items() for client in member.clients}
        found: dict[int, list[int]] = {}
        absent = []
        for client in clients:
            if client in home:
                found.setdefault(home[client], []).append(client)
            else:
                absent.append(client)
        return found, absent

    def name(self, node: int) -> str:
        """Name of a node for messages."""
        return _named(self.joined[node]) if node in self.joined else f"node {node}"

    def _take_in(self, node: int, answer: Any) -> str | None:
        """Take a node in, or return why it may not join."""
        try:
            clients = tuple(sorted({int(client) for client in answer["clients"]}))
            samples = None if answer["samples"] is None else tuple(map(int, answer["samples"]))
            member = Member(node, printable(str(answer["name"]), NAME), str(answer["token"]), clients, samples)
            version, options, parts = str(answer["version"]), str(answer["options"]), dict(answer["parts"])
            if not all(isinstance(value, str) for value in parts.values()):
                raise TypeError("a hash is not a text")
            if sum(samples or ()) >= MOST // self.population:  # so that the sum over all clients fits int64
                raise ValueError("its numbers of samples are too large")
        except Exception as error:  # whatever an answer of another kind leads to
            return f"its answer is not one of cfl's ({type(error).__name__}: {error})"
        if version != __version__:
            return f"it has cfl {version}, the server {__version__}; install the same version"
        if options != self.options:
            return "it resolves the configuration to other options; give it the server's config.yaml"
        own = self.fingerprint.parts if samples is None else self.fingerprint.without_data
        if samples is not None and (fault := self._fault_of_data(clients, samples)):
            return fault
        if (self.joined or self.samples) and (samples is None) == bool(self.samples):
            return "some nodes have data of their own, and others parts of the benchmark; give all --data, or none"
        if other := next((name for name in {**own, **parts} if own.get(name) != parts.get(name)), None):
            return f"it differs from the server in {other}; install the same packages and data"
        if not clients or clients[-1] >= self.population or clients[0] < 0:
            named = few([*map(str, clients)], FEW_NAMES) or "none"
            return f"its clients are {named}, of 0 to {self.population - 1}; give it some of these"
        for other_member in [*self.joined.values()]:
            if other_member.token == member.token:
                if clients != other_member.clients:
                    return f"its folder is a copy of that of {_named(other_member)}; give each node a folder of its own"
                del self.joined[other_member.node]  # the node has restarted, and Flower still counts the old process
                self.refused[other_member.node], self._replaced[other_member.node] = RESTARTED, member.token
            elif shared := set(clients) & set(other_member.clients):
                return f"{_named(other_member)} has client {min(shared)} already; give each node clients of its own"
        self.joined[node] = member
        if samples is not None:
            self.samples[clients[0]] = samples
        self.say(f"{_named(member)} has joined")
        return None

    def _fault_of_data(self, clients: tuple[int, ...], samples: tuple[int, ...]) -> str | None:
        """Return why a node may not have data of its own."""
        tasks = len(self.fingerprint.stream)
        if len(samples) != tasks or min(samples) < 0 or len(clients) != 1:
            return f"with data of its own, a node has one client, and a number of samples of each of the {tasks} tasks"
        if self.fingerprint.config.dp.level != "none":
            return "it has data of its own, and epsilon is computed for the parts of the benchmark; leave out --data"
        return None


def _named(member: Member) -> str:
    ids = few([*map(str, member.clients)], FEW_NAMES)
    return f"node '{member.name}' (client{'s' * (len(member.clients) > 1)} {ids})"
