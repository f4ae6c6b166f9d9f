"""The server's conversation with the nodes: requests of one kind to several nodes, and their answers."""

import time
from collections import Counter, defaultdict
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Protocol

from flwr.app import ConfigRecord, Message, RecordDict
from flwr.common.constant import ErrorCode
from flwr.proto.node_pb2 import NodeInfo

from cfl.core import CflError
from cfl.core.errors import reason
from cfl.flower import wire
from cfl.flower.trees import Broadcast

SHARED = "shared"  # entry of a request: the names of the broadcast
TREES, MISSING, FAULT = "trees", "missing", "fault"  # further records of a message
SHOWN = 300  # characters of a text of a node that are shown
LATE = (ErrorCode.MESSAGE_UNAVAILABLE, ErrorCode.REPLY_MESSAGE_UNAVAILABLE)  # Flower's, after the deadline


class Grid(Protocol):
    """The part of `flwr.serverapp.Grid` that is used."""

    def get_nodes(self) -> Iterable[NodeInfo]: ...

    def push_messages(self, messages: Iterable[Message]) -> Iterable[str]: ...

    def pull_messages(self, message_ids: Iterable[str]) -> Iterable[Message]: ...


@dataclass(frozen=True)
class Answer:
    """What a node answers: a value, or the reason why there is none. error: class of an error of `cfl`, by name."""

    value: Any = None
    fault: str | None = None
    error: str = ""


@dataclass
class Link:
    """Requests over a grid. deadline: seconds for the answers to a request; patience: between looks for answers."""

    grid: Grid
    deadline: float
    patience: float = 0.02
    _bytes: Counter[str] = field(default_factory=Counter)
    _open: dict[str, tuple[int, float]] = field(default_factory=dict)  # by message, its node and when it was sent
    _held: dict[int, set[str]] = field(default_factory=lambda: defaultdict(set))  # by node, hashes of its trees

    def ask(self, kind: str, requests: Mapping[int, Any], broadcast: Broadcast | None = None) -> dict[int, Answer]:
        """Send each node its request, and return the answers by node, in the order of the requests.

        kind: a message type of Flower, such as "train"; broadcast: trees that all of the requests refer to.
        A node that has lost its trees gets them again.
        """
        replies = self._exchange(kind, requests, broadcast)
        lost = [node for node, reply in replies.items() if MISSING in _configs(reply)]
        self._held.update((node, set()) for node in lost)
        replies |= self._exchange(kind, {node: requests[node] for node in lost}, broadcast)
        answers = {node: self._answer(replies.get(node)) for node in requests}
        if broadcast is not None:
            self._held.update((node, set() if answer.fault else broadcast.hashes) for node, answer in answers.items())
        return answers

    def poll(self, kind: str, requests: Mapping[int, Any], wait: float) -> dict[int, Answer]:
        """Ask as `ask` does, but wait only `wait` seconds for answers to new requests.

        An answer that takes longer is that of a later call, whose request is then not sent again before the deadline.
        """
        now = time.monotonic()
        self._open = {
            id: (node, sent)
            for id, (node, sent) in self._open.items()
            if node in requests and now < sent + self.deadline
        }
        asked = {node for node, _ in self._open.values()}
        messages = [self._message(kind, node, request, None) for node, request in requests.items() if node not in asked]
        sent = self._push(messages)
        self._open |= {id: (node, now) for id, node in sent.items()}
        waiting = {id: node for id, (node, _) in self._open.items()}
        found = self._pull(waiting, wait if messages else 0.0)
        self._open = {id: pair for id, pair in self._open.items() if pair[0] not in found}
        late = {node for node, _ in self._open.values()}
        return {
            node: Answer(fault="it has not answered so far") if node in late else self._answer(found.get(node))
            for node in requests
        }

    def forget(self, node: int) -> None:
        """Wait no longer for answers of a node to `poll`, for example since it has started again."""
        self._open = {id: pair for id, pair in self._open.items() if pair[0] != node}

    def spent(self) -> dict[str, int]:
        """Return the bytes of the content of all messages from and to nodes since the last call."""
        found, self._bytes = dict(self._bytes), Counter()
        return found

    def _message(self, kind: str, node: int, request: Any, broadcast: Broadcast | None) -> Message:
        records = wire.pack(request if broadcast is None else {**request, SHARED: broadcast.names})
        if broadcast is not None:
            records[TREES] = broadcast.record(but=self._held[node])
        self._bytes["wire_bytes_down"] += wire.size(records)
        return Message(records, dst_node_id=node, message_type=kind, ttl=self.deadline)

    def _exchange(self, kind: str, requests: Mapping[int, Any], broadcast: Broadcast | None) -> dict[int, Message]:
        """Send requests and wait for the replies. Returns those that came in time, by node."""
        messages = [self._message(kind, node, request, broadcast) for node, request in requests.items()]
        return self._pull(self._push(messages), self.deadline)

    def _push(self, messages: Sequence[Message]) -> dict[str, int]:
        """Send messages. Returns node by id of those that are on their way."""
        ids = set(self.grid.push_messages(messages)) if messages else set()
        asked = {message.metadata.message_id: message.metadata.dst_node_id for message in messages}
        # The SuperLink gives no id, or an empty one, for a node that it does not know.
        return {id: node for id, node in asked.items() if id in ids}

    def _pull(self, asked: Mapping[str, int], seconds: float) -> dict[int, Message]:
        """Wait for replies, and look at least once. asked: node by id of its message. Returns replies by node."""
        waiting, end = set(asked), time.monotonic() + seconds
        found: dict[int, Message] = {}
        while waiting:
            for reply in self.grid.pull_messages(waiting):
                waiting.discard(reply.metadata.reply_to_message_id)
                # not by the sender: the SuperLink answers for a node that it has lost
                found[asked[reply.metadata.reply_to_message_id]] = reply
                self._bytes["wire_bytes_up"] += wire.size(reply.content) if reply.has_content() else 0
            if not waiting or time.monotonic() >= end:
                break
            time.sleep(self.patience)
        return found

    def _answer(self, reply: Message | None) -> Answer:
        if reply is None or (reply.has_error() and reply.error.code in LATE):
            return Answer(fault=f"it did not answer within {self.deadline:g} seconds")
        if reply.has_error():
            return Answer(fault=printable(reply.error.reason or f"its error has the code {reply.error.code}"))
        configs = _configs(reply)
        if FAULT in configs:
            return Answer(fault=printable(str(configs[FAULT].get("text"))), error=str(configs[FAULT].get("error")))
        if MISSING in configs:
            return Answer(fault="it lost the trees of the broadcast")
        try:
            return Answer(wire.unpack(reply.content))
        except CflError as error:
            return Answer(fault=printable(str(error)))


def printable(text: str, most: int = SHOWN) -> str:
    """Return a text of a node for the operator's terminal: no control characters, and not more than `most` others."""
    plain = "".join(char if char.isprintable() else " " for char in text[:most])
    return f"{plain} ..." if len(text) > most else plain


def fault(error: Exception) -> RecordDict:
    """Records of a node that cannot answer, and says why."""
    return RecordDict({FAULT: ConfigRecord({"text": reason(error), "error": type(error).__name__})})


def missing() -> RecordDict:
    """Records of a node that lacks trees of the broadcast."""
    return RecordDict({MISSING: ConfigRecord()})


def _configs(reply: Message) -> Mapping[str, ConfigRecord]:
    return reply.content.config_records if reply.has_content() else {}
