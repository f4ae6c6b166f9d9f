"""The process of `cfl-run join`: it answers the messages that Flower's processes forward, one at a time.

It holds the run of the node, and the secrets of secure aggregation, which are therefore never on disk.
"""

import os
import socketserver
import time
from collections.abc import Callable, Mapping
from io import BufferedIOBase
from pathlib import Path
from typing import Any

from flwr.app import Context, RecordDict

from cfl.flower import apps
from cfl.flower.forward import receive, send
from cfl.flower.link import FAULT

LOOK = 0.2  # seconds between looks whether the SuperNode has ended


def serve(address: str | Path, options: Mapping[str, str], ended: Callable[[], Any]) -> None:
    """Answer at a Unix socket until `ended` returns something else than None. options: those of the node."""
    contexts: dict[tuple[int, int], Context] = {}

    class Handler(socketserver.BaseRequestHandler):
        def handle(self) -> None:
            try:
                with self.request.makefile("rwb") as stream:
                    print(self._answer(stream), flush=True)
            except (ConnectionError, EOFError):  # as when the SuperLink ends within a round
                print("Flower's process ended before it had the answer to its message", flush=True)

        def _answer(self, stream: BufferedIOBase) -> str:
            """Answer a message, and return a line about it."""
            start, (head, records) = time.monotonic(), receive(stream)
            action, run, node = head["action"], head["run"], head["node"]
            if (run, node) not in contexts:
                contexts[run, node] = Context(run, node, dict(options), RecordDict(), {})
            answer = apps.answer(action, Path(head["config"]), records, contexts[run, node])
            send(stream, {}, answer)
            if FAULT in answer.config_records:
                return f"cannot answer {action}: " + str(answer.config_records[FAULT]["text"])
            if action == "join":
                return "asked to join; the server decides, and prints the reason if it refuses"
            return f"answered {action} in {time.monotonic() - start:.2f} s"

    with socketserver.UnixStreamServer(str(address), Handler) as server:
        os.chmod(address, 0o600)
        server.timeout = LOOK
        while ended() is None:
            server.handle_request()
