"""A node: it computes the clients that a message names, with a local engine, and answers with their result."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

from flwr.app import Context, Message, RecordDict
from flwr.clientapp import ClientApp

from cfl.contract import RoundInputs
from cfl.engines import parts
from cfl.engines.loop import LoopEngine
from cfl.flower import link, wire
from cfl.flower.messages import rebuilt
from cfl.flower.trees import Missing, TreeFolder
from cfl.runtime.rounds import Rounds


class Node:
    """The part of a run that a node has. engine: computes clients; folder: for the trees of broadcasts."""

    def __init__(self, engine: LoopEngine, rounds: Rounds, folder: Path) -> None:
        self.engine, self.rounds, self.trees = engine, rounds, TreeFolder(folder)

    def train(self, request: Any, records: RecordDict) -> list[dict[str, Any]]:
        """Compute blocks of clients. Returns a result of `parts.compute` for each block. Raises Missing."""
        info = rebuilt(request["info"], self.rounds.model, self.rounds.public)
        shared = self.trees.shared(request[link.SHARED], records.array_records[link.TREES])
        sees = self.rounds.sees(info.task)
        found = []
        for states in request["blocks"]:
            clients = [self.rounds.population.client(id, info.task, sees) for id in states]
            inputs = RoundInputs(info, shared, clients, states)
            found.append(parts.compute(self.engine, inputs, request["observed"]))
        return found


def client_app(build: Callable[[Context], Node]) -> ClientApp:
    """Return a Flower ClientApp. build: makes the node when its first message comes."""
    app, built = ClientApp(), list[Node]()

    @app.train()
    def train(message: Message, context: Context) -> Message:
        try:
            if not built:
                built.append(build(context))
            answer = wire.pack(built[0].train(wire.unpack(message.content), message.content))
        except Missing:
            answer = link.missing()
        except Exception as error:  # of any kind: the server names the node and the error
            answer = link.fault(error)
        return Message(answer, reply_to=message)

    return app
