"""A grid whose nodes are in this process, for checks and debugging: they answer one after another."""

from collections.abc import Iterable, Mapping, Sequence

from flwr.app import Context, Message, RecordDict
from flwr.clientapp import ClientApp
from flwr.proto.node_pb2 import NodeInfo
from flwr.supercore.task_identity import TaskIdentity


class InProcessGrid:
    """Nodes 1 to n, one for each ClientApp; the part of a Flower grid that `Link` uses. options: of the nodes."""

    def __init__(self, apps: Sequence[ClientApp], options: Sequence[Mapping[str, str]] = ()) -> None:
        self.apps = dict(enumerate(apps, 1))
        self.contexts = {
            node: Context(run_id=1, node_id=node, node_config=dict(given), state=RecordDict(), run_config={})
            for node, given in zip(self.apps, options or [{}] * len(apps), strict=True)
        }
        self._replies: dict[str, Message] = {}
        TaskIdentity.task_id = TaskIdentity.run_id = 1  # messages carry them
        TaskIdentity.node_id = 0

    def get_nodes(self) -> Iterable[NodeInfo]:
        return [NodeInfo(node_id=node) for node in self.apps]

    def push_messages(self, messages: Iterable[Message]) -> Iterable[str]:
        found = list[str]()
        for message in messages:
            node = message.metadata.dst_node_id
            id = message.metadata.__dict__["_message_id"] = f"message {len(found)} to {node}"
            self._replies[id] = self.apps[node](message, self.contexts[node])
            found.append(id)
        return found

    def pull_messages(self, message_ids: Iterable[str]) -> Iterable[Message]:
        return [self._replies.pop(id) for id in list(message_ids) if id in self._replies]
