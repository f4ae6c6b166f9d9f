"""A node: it computes the clients that a message names, with a local engine, and answers with their result."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from flwr.app import Context, Message, RecordDict
from flwr.clientapp import ClientApp

from cfl.assembly import methods
from cfl.config.schema import RunConfig
from cfl.contract import RoundInputs, TreesByOwner
from cfl.core import machine, tree
from cfl.core.version import __version__
from cfl.engines import Engine, parts
from cfl.flower import link, wire
from cfl.flower.forward import app_of
from cfl.flower.messages import rebuilt
from cfl.flower.trees import Missing, TreeFolder, without_fixed
from cfl.runtime.builder import HERE, Place, build_session
from cfl.runtime.fingerprint import Fingerprint
from cfl.runtime.rounds import Rounds
from cfl.runtime.runner import compiling, stream_of
from cfl.runtime.sinks import PlainSink
from cfl.streams import Stream


class Node:
    """The part of a run that a node has. engine: computes clients; folder: for the trees of broadcasts."""

    def __init__(self, engine: Engine, rounds: Rounds, fingerprint: Fingerprint, folder: Path) -> None:
        self.engine, self.rounds, self.fingerprint, self.trees = engine, rounds, fingerprint, TreeFolder(folder)

    def join(self, request: Any, records: RecordDict, context: Context) -> dict[str, Any]:
        """Return what the node would compute with: the version of `cfl`, and hashes of data, network and methods."""
        return {"version": __version__, "parts": self.fingerprint.parts}

    def train(self, request: Any, records: RecordDict, context: Context) -> Any:
        """Compute blocks of clients. Returns a result of `parts.compute` for each block. Raises Missing."""
        info = rebuilt(request["info"], self.rounds.model, self.rounds.public)
        shared = self._shared(request, records)
        sees = self.rounds.sees(info.task)
        found = []
        for states in request["blocks"]:
            clients = [self.rounds.population.client(id, info.task, sees) for id in states]
            inputs = RoundInputs(info, shared, clients, states)
            found.append(parts.compute(self.engine, inputs, request["observed"]))
        return found

    def _shared(self, request: Any, records: RecordDict) -> TreesByOwner:
        """Return the broadcast of a request. The frozen parameters that came with it become those of the model."""
        found = self.trees.shared(request[link.SHARED], records.array_records[link.TREES])
        model, (shared, fixed) = self.rounds.model, without_fixed(found)
        if not tree.equal(model.fixed, fixed):
            model.start_from({**model.params, **fixed})
        return shared


def built(
    config: RunConfig, data_root: Path | None, stream: Stream | None = None, place: Place = HERE
) -> tuple[Engine, Rounds, Fingerprint]:
    """Build the part of a run that a node needs, for a process of its own. stream: in place of the run's benchmark."""
    torch.set_num_threads(config.threads)
    machine.keep_memory()
    members = methods.build(config)
    if stream is None:
        stream = stream_of(config, data_root, False, public=methods.need_public(members))
    model = config.model.model_copy(update={"weights": None})  # the server broadcasts the starting model
    config = compiling(config.model_copy(update={"start": None, "model": model}), PlainSink())
    session = build_session(config, stream, members, place=place)
    return session.engine, session.rounds, session.recorder.fingerprint


def answer(node: Callable[[], Node], action: str, records: RecordDict, context: Context) -> RecordDict:
    """Return a node's answer to the records of a message. node: makes it; action: name of one of its methods."""
    try:
        return wire.pack(getattr(node(), action)(wire.unpack(records), records, context))
    except Missing:
        return link.missing()
    except Exception as error:  # of any kind: the server names the node and the error
        return link.fault(error)


def client_app(node: Callable[[], Node]) -> ClientApp:
    """Return a Flower ClientApp. node: makes the node, or returns the one that it made before."""

    def act(action: str, message: Message, context: Context) -> Message:
        return Message(answer(node, action, message.content, context), reply_to=message)

    return app_of(act)
