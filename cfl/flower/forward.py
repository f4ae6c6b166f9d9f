"""The ClientApp of a project: it forwards messages to the process of `cfl-run join`, which computes the answers.

Flower starts a process for each message. So this file imports nothing of `cfl`, which takes seconds. A project has a
copy of it, and loads `cfl` where no such process is there, as in a simulation.
"""

import json
import socket
from collections.abc import Callable
from functools import partial
from io import BufferedIOBase
from pathlib import Path
from typing import Any

from flwr.app import Array, ArrayRecord, ConfigRecord, Context, Error, Message, RecordDict
from flwr.clientapp import ClientApp
from flwr.common.constant import ErrorCode

Answer = Callable[[str, Path, RecordDict, Context], RecordDict]
ACTIONS = ("join", "keys", "shares", "confirm", "unmask")  # queries of the server, beside "train"
ENDED = "its 'cfl-run join' has ended; start it again with the same --folder"


def client(config: Path, here: Callable[[], Answer]) -> ClientApp:
    """Return the ClientApp of a run. config: its resolved config.yaml; here: loads what answers without `cfl-run join`.

    An answer is a function of the action, `config`, and the message's records and context.
    """
    return app_of(partial(_answer, config, here))


def app_of(act: Callable[[str, Message, Context], Message]) -> ClientApp:
    """Return a ClientApp that takes the server's messages. act: answers an action, a message and a context."""
    app = ClientApp()
    app.train()(partial(act, "train"))
    for action in ACTIONS:
        app.query(action)(partial(act, action))
    return app


def send(stream: BufferedIOBase, head: dict[str, Any], records: RecordDict) -> None:
    """Write plain data and records: the length of a JSON text, the text, and the bytes of all arrays."""
    arrays = [(name, key, item) for name, record in records.array_records.items() for key, item in record.items()]
    places = [[name, key, item.dtype, list(item.shape), item.stype, len(item.data)] for name, key, item in arrays]
    empty = [name for name, record in records.array_records.items() if not record]
    configs = {name: dict(record) for name, record in records.config_records.items()}
    text = json.dumps({"head": head, "arrays": places, "empty": empty, "configs": configs}).encode()
    stream.write(len(text).to_bytes(8, "little") + text)
    for _, _, item in arrays:
        stream.write(item.data)
    stream.flush()


def receive(stream: BufferedIOBase) -> tuple[dict[str, Any], RecordDict]:
    """Read what `send` wrote. Raises EOFError if the other side has gone."""
    described = json.loads(_exactly(stream, int.from_bytes(_exactly(stream, 8), "little")))
    records = RecordDict({name: ConfigRecord(values) for name, values in described["configs"].items()})
    arrays = {name: ArrayRecord() for name in described["empty"]}
    for name, key, dtype, shape, stype, size in described["arrays"]:
        item = Array(dtype=dtype, shape=tuple(shape), stype=stype, data=_exactly(stream, size))
        arrays.setdefault(name, ArrayRecord())[key] = item
    records.update(arrays)
    return described["head"], records


def _answer(config: Path, here: Callable[[], Answer], action: str, message: Message, context: Context) -> Message:
    if "socket" in context.node_config:
        head = {"action": action, "config": str(config), "node": context.node_id, "run": context.run_id}
        try:
            return Message(_asked(str(context.node_config["socket"]), head, message.content), reply_to=message)
        except (ConnectionError, FileNotFoundError, EOFError):
            return Message(Error(ErrorCode.CLIENT_APP_RAISED_EXCEPTION, ENDED), reply_to=message)
    return Message(here()(action, config, message.content, context), reply_to=message)


def _asked(address: str, head: dict[str, Any], records: RecordDict) -> RecordDict:
    """Return the answer of `cfl-run join`, which listens at a Unix socket."""
    with socket.socket(socket.AF_UNIX) as link:
        link.connect(address)
        with link.makefile("rwb") as stream:
            send(stream, head, records)
            return receive(stream)[1]


def _exactly(stream: BufferedIOBase, size: int) -> bytes:
    data = stream.read(size)
    if len(data) < size:
        raise EOFError("the process of cfl-run join has ended")
    return data
