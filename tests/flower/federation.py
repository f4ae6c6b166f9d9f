"""Deployments in this process: nodes with clients of their own, on a network whose messages a test can change."""

import itertools
import math
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PrivateKey
from cryptography.hazmat.primitives.serialization import Encoding, NoEncryption, PrivateFormat, PublicFormat
from flwr.app import Array, ArrayRecord, ConfigRecord, Context, Message, RecordDict
from flwr.clientapp import ClientApp
from flwr.common.serde import recorddict_from_proto, recorddict_to_proto
from flwr.proto.node_pb2 import NodeInfo
from flwr.proto.recorddict_pb2 import RecordDict as ProtoRecordDict
from flwr.server.superlink.linkstate.utils import create_message_error_unavailable_res_message
from safetensors.torch import save
from torch import Tensor

import cfl
from cfl.assembly import methods
from cfl.contract import RoundInputs
from cfl.engines import Engine, Outcome
from cfl.flower import wire
from cfl.flower.deployment import DeploymentEngine, RemoteRounds
from cfl.flower.home import HomeNode
from cfl.flower.in_process import InProcessGrid
from cfl.flower.link import Link
from cfl.flower.members import Members
from cfl.flower.node import client_app
from cfl.flower.signing import SigningKeys
from cfl.runtime import checkpoint
from cfl.runtime.builder import EngineParts, Place, build_session
from cfl.runtime.result import Result
from cfl.runtime.runner import carry_out
from cfl.runtime.session import Session
from cfl.runtime.sinks import NullSink
from cfl.streams import Stream
from cfl.testing.toys import toy_stream
from tests.toy import by_client

TIMES = ("seconds", "wire_bytes_up", "wire_bytes_down")
OPTIONS = "hash of the options"  # of server and nodes
RUN = 32 * "a"  # id of a run
PUBLIC = ("feddf", "fedet", "fedproj")  # methods that read public data


class Clock:
    """Seconds that pass only while somebody sleeps, for `cfl.flower.link`."""

    def __init__(self) -> None:
        self.now = 0.0

    def monotonic(self) -> float:
        return self.now

    def sleep(self, seconds: float) -> None:
        self.now += seconds


class Sent(NamedTuple):
    """A message as it passed. request, reply: serialised by Flower; None for a reply that never came."""

    node: int
    kind: str
    request: bytes
    reply: bytes | None


Deliver = Callable[[], Message]
Fault = Callable[[int, Message, Deliver], Message | None]


def no_fault(node: int, message: Message, deliver: Deliver) -> Message | None:
    return deliver()


class Network(InProcessGrid):
    """Nodes that come and go. fault: carries out a request, or loses it, or changes its reply; sent: all messages.

    ghosts: nodes that have gone, but are still counted; starts: node to when it was added.
    """

    def __init__(self) -> None:
        super().__init__([])
        self.fault: Fault = no_fault
        self.ghosts: list[int] = []
        self.sent: list[Sent] = []
        self.starts: dict[int, str] = {}
        self._serial = itertools.count()

    def add(self, node: int, app: Callable[[Message, Context], Message]) -> None:
        self.apps[node], self.starts[node] = app, f"start {next(self._serial)}"  # type: ignore[assignment]
        self.contexts[node] = Context(run_id=1, node_id=node, node_config={}, state=RecordDict(), run_config={})

    def remove(self, node: int) -> None:
        del self.apps[node]

    def get_nodes(self) -> Iterable[NodeInfo]:
        return [NodeInfo(node_id=id, last_activated_at=self.starts[id]) for id in [*self.apps, *self.ghosts]]

    def push_messages(self, messages: Iterable[Message]) -> Iterable[str]:
        found = []
        for message in messages:
            node = message.metadata.dst_node_id
            id = message.metadata.__dict__["_message_id"] = f"message {next(self._serial)}"
            request, message.content = _carried(message.content)
            reply, data = self.fault(node, message, partial(self._deliver, node, message)), None
            if reply is not None:
                if reply.has_content():
                    data, reply.content = _carried(reply.content)
                self.arrives(reply)
            self.sent.append(Sent(node, message.metadata.message_type, request, data))
            found.append(id)
        return found

    def arrives(self, reply: Message) -> None:
        """Take a reply, which then waits to be asked for."""
        self._replies[reply.metadata.reply_to_message_id] = reply

    def _deliver(self, node: int, message: Message) -> Message:
        if node in self.apps:
            return self.apps[node](message, self.contexts[node])
        return unavailable(message)


def unavailable(message: Message) -> Message:
    """The reply of Flower's server for a node that it has lost."""
    return create_message_error_unavailable_res_message(message.metadata, "node_unavail")


def _carried(records: RecordDict) -> tuple[bytes, RecordDict]:
    """The bytes of records as they pass a network, and the records on the other side."""
    proto = recorddict_to_proto(records)
    return proto.SerializeToString(), recorddict_from_proto(proto)


class Log(NullSink):
    """Keeps rows and warnings of a run. after: number of finished rounds to what happens then."""

    def __init__(self, after: Mapping[int, Callable[[], Any]] | None = None) -> None:
        self.rows: list[dict[str, Any]] = []
        self.warnings: list[str] = []
        self.after = after or {}

    def round(self, row: dict[str, Any]) -> None:
        self.rows.append(by_client(row))
        self.after.get(row["rounds_done"], lambda: None)()

    def warn(self, text: str) -> None:
        self.warnings.append(text)


class Federation:
    """A server and its nodes; node k of n has the clients k, k + n, k + 2n, ... and the folder `folder`/k.

    ids: of nodes, in the order of their starts; own: a model, and members by name, of your own.
    nodes: number to id; said: what the server tells of its nodes.
    """

    def __init__(
        self,
        config: cfl.RunConfig,
        folder: Path,
        nodes: int = 3,
        stream: Stream | None = None,
        ids: Iterable[int] = range(1000, 0, -1),
        **own: Any,
    ) -> None:
        self.config, self.folder, self.count, self.own = config, folder, nodes, own
        self.stream = stream or toy_stream(config.tasks or 3)
        self.members = {**methods.build(config), **own.get("members", {})}
        self.network, self.said, self.nodes = Network(), list[str](), dict[int, int]()
        self._ids = iter(ids)
        self.keys = signing_keys(folder / "keys", config.partition.clients) if config.secure.consistency else None
        for number in range(nodes):
            self.start(number)

    def clients(self, number: int) -> tuple[int, ...]:
        return tuple(range(number, self.config.partition.clients, self.count))

    def node(self, number: int, **changes: Any) -> HomeNode:
        """A node on its folder. changes: arguments of HomeNode, or a stream of its own."""
        session = build_session(
            self.config, changes.pop("stream", self.stream), changes.pop("members", self.members), self.own.get("model")
        )
        folder = changes.pop("folder", self.folder / f"node {number}")
        signing = self.keys and SigningKeys(self.keys, self.clients(number), self.config.partition.clients)
        given = {
            "name": f"n{number}", "clients": self.clients(number), "options": OPTIONS, "signing": signing, **changes
        }  # fmt: skip
        return HomeNode(session.engine, session.rounds, session.recorder.fingerprint, folder, **given)

    def start(self, number: int, **changes: Any) -> int:
        """Start a node, or start it again after `stop`; return its new id."""
        id, node = next(self._ids), self.node(number, **changes)
        self.network.add(id, app_of(node))
        self.nodes[number] = id
        return id

    def stop(self, number: int) -> None:
        """End the process of a node."""
        self.network.remove(self.nodes[number])

    def place(self) -> Place:
        """Where the clients of the server's run are."""

        def engine(made_from: EngineParts) -> DeploymentEngine:
            link = Link(self.network, self.config.flower.deadline)
            folder, members = made_from.checkpoints, Members(link, made_from.fingerprint, OPTIONS, self.said.append)
            oldest = (lambda: checkpoint.oldest(folder)) if folder else (lambda: 0)
            return DeploymentEngine(made_from.inner, made_from.rounds, members, made_from.multiplier, oldest, RUN)

        return Place(rounds=RemoteRounds, engine=engine, states="on nodes")

    def run(self, log: NullSink | None = None, output: Path | None = None, resume: bool = False) -> Result:
        """Run the server."""
        return carry_out(
            self.config, self.stream, self.members, self.own.get("model"), output, resume, log or Log(),
            place=self.place(),
        )  # fmt: skip

    def session(self) -> Session:
        """The server's run, to be gone through round by round."""
        session = build_session(
            self.config, self.stream, self.members, self.own.get("model"), sink=Log(), place=self.place()
        )
        session.start(resume=False)
        return session


class LeavesOut(Engine):
    """An engine of a run that loses clients. lost: for each round, its lost clients and the stage of their loss."""

    def __init__(self, made_from: EngineParts, lost: Mapping[int, Mapping[int, str]]) -> None:
        self.inner, self.positions, self.lost = made_from.inner, made_from.rounds.positions, lost

    def round(self, inputs: RoundInputs, observe: Any = None) -> Outcome:
        lost = self.lost.get(self.positions[inputs.info.key], {})
        info = replace(inputs.info, dropped={**inputs.info.dropped, **lost})
        clients = [client for client in inputs.clients if lost.get(client.id, "unmask") == "unmask"]
        return self.inner.round(RoundInputs(info, inputs.shared, clients, inputs.states), observe)


def alone(
    config: cfl.RunConfig, lost: Mapping[int, Mapping[int, str]] | None = None, stream: Stream | None = None, **own: Any
) -> tuple[Result, Log]:
    """The run in one process with engine=loop, which loses clients as `LeavesOut` says, and its log."""
    log, members = Log(), {**methods.build(config), **own.get("members", {})}
    place = Place(engine=lambda made_from: LeavesOut(made_from, lost or {}))
    stream = stream or toy_stream(config.tasks or 3)
    return carry_out(config, stream, members, own.get("model"), sink=log, place=place), log


def signing_keys(folder: Path, clients: int) -> Path:
    """Write the files of `SigningKeys` for all clients."""
    folder.mkdir()
    for id in range(clients):
        key = Ed25519PrivateKey.generate()
        (folder / str(id)).write_bytes(key.private_bytes(Encoding.PEM, PrivateFormat.OpenSSH, NoEncryption()))
        (folder / str(id)).chmod(0o600)  # or ssh-keygen does not read it
        (folder / f"{id}.pub").write_bytes(key.public_key().public_bytes(Encoding.OpenSSH, PublicFormat.OpenSSH))
    return folder


def app_of(node: HomeNode) -> ClientApp:
    return client_app(lambda: node)


def unlike(one: Any, other: Any, tolerance: float = 1e-6, path: str = "") -> Iterator[str]:
    """Yield what differs between the figures of two runs, but for times, bytes of messages and missing clients."""
    if isinstance(one, Mapping) and isinstance(other, Mapping):
        for name in (one.keys() | other.keys()) - {*TIMES, "missing"}:
            yield from unlike(one.get(name), other.get(name), tolerance, f"{path}/{name}")
    elif isinstance(one, Sequence) and not isinstance(one, str) and len(one) == len(other):
        for place, pair in enumerate(zip(one, other)):
            yield from unlike(*pair, tolerance, f"{path}/{place}")
    elif isinstance(one, Tensor) and isinstance(other, Tensor) and one.shape == other.shape:
        if one.numel() and not float((one - other).abs().max()) <= tolerance:
            yield f"{path}: {float((one - other).abs().max()):.1e}"
    elif isinstance(one, float) and isinstance(other, float):
        if not (abs(one - other) <= tolerance or math.isnan(one) and math.isnan(other)):
            yield f"{path}: {one} and {other}"
    elif one != other:
        yield f"{path}: {one} and {other}"


def figures(result: Result, log: Log) -> dict[str, Any]:
    """All that two equal runs have in common."""
    return {"params": result.params, "rows": log.rows, **result.metrics}


# --- messages --------------------------------------------------------------------------------------------------------


def asked(message: Message) -> Any:
    """The request in a message, or the value in a reply."""
    return wire.unpack(message.content)


def read(data: bytes) -> RecordDict:
    """The records of a message that has passed."""
    return recorddict_from_proto(ProtoRecordDict.FromString(data))


Act = Callable[[Message, Deliver], Message | None]


def at(kind: str, rounds: Collection[int], nodes: Collection[int], act: Act) -> Fault:
    """A fault of some nodes at one request of some rounds, given by their places in the schedule."""

    def fault(node: int, message: Message, deliver: Deliver) -> Message | None:
        here = node in nodes and message.metadata.message_type == kind and asked(message)["round"] in rounds
        return act(message, deliver) if here else deliver()

    return fault


def lost(message: Message, deliver: Deliver) -> None:
    """The node answers, and its reply never comes, or comes too late."""
    deliver()


def changed(change: Callable[[Any], Any]) -> Act:
    """A reply whose value is changed. change: returns the new value, or None if it changes the value in place."""

    def act(message: Message, deliver: Deliver) -> Message:
        value = asked(deliver())
        found = change(value)
        return answer(message, value if found is None else found)

    return act


def answer(message: Message, value: Any) -> Message:
    """A reply with a value."""
    return Message(wire.pack(value), reply_to=message)


def raw(message: Message, body: str = "null", data: bytes | None = None, stype: str = wire.FORMAT) -> Message:
    """A reply with any text and bytes."""
    data = save({}) if data is None else data
    packed = Array(dtype="uint8", shape=(len(data),), stype=stype, data=data)
    records = {wire.BODY: ConfigRecord({wire.BODY: body}), wire.TENSORS: ArrayRecord({wire.TENSORS: packed})}
    return Message(RecordDict(records), reply_to=message)
