"""A node: it computes the clients that a message names, with a local engine, and answers with their result."""

from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

from flwr.app import Context, Message, RecordDict
from flwr.clientapp import ClientApp

from cfl.contract import RoundInputs
from cfl.core.version import __version__
from cfl.engines import parts
from cfl.engines.loop import LoopEngine
from cfl.flower import link, wire
from cfl.flower.messages import rebuilt
from cfl.flower.trees import Missing, TreeFolder
from cfl.runtime.fingerprint import Fingerprint
from cfl.runtime.rounds import Rounds

QUERIES = ("join", "keys", "shares", "unmask")  # methods of a node, beside `train`


class Node:
    """The part of a run that a node has. engine: computes clients; folder: for the trees of broadcasts."""

    def __init__(self, engine: LoopEngine, rounds: Rounds, fingerprint: Fingerprint, folder: Path) -> None:
        self.engine, self.rounds, self.fingerprint, self.trees = engine, rounds, fingerprint, TreeFolder(folder)

    def join(self, request: Any, records: RecordDict, context: Context) -> dict[str, Any]:
        """Return what the node would compute with: the version of `cfl`, and hashes of data, network and methods."""
        return {"version": __version__, "parts": self.fingerprint.parts}

    def train(self, request: Any, records: RecordDict, context: Context) -> Any:
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
    """Return a Flower ClientApp. build: makes the node, or returns the one that it made before."""
    app = ClientApp()

    def answer(act: str, message: Message, context: Context) -> Message:
        try:
            node = build(context)
            records = wire.pack(getattr(node, act)(wire.unpack(message.content), message.content, context))
        except Missing:
            records = link.missing()
        except Exception as error:  # of any kind: the server names the node and the error
            records = link.fault(error)
        return Message(records, reply_to=message)

    app.train()(partial(answer, "train"))
    for name in QUERIES:
        app.query(name)(partial(answer, name))
    return app
