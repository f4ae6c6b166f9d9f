"""Flower's simulation as an engine: virtual nodes on this machine or on a Ray cluster."""

import contextlib
import json
import logging
import os
import shutil
import tempfile
import threading
import time
from collections.abc import Iterable
from functools import lru_cache, partial
from pathlib import Path
from queue import Empty, Queue
from typing import Any

from flwr.app import Context, Message
from flwr.clientapp import ClientApp
from flwr.proto.node_pb2 import NodeInfo
from flwr.serverapp import Grid, ServerApp
from flwr.simulation import run_simulation

from cfl.assembly import resolve
from cfl.core import ConfigError, UpdateError, machine
from cfl.core.errors import reason
from cfl.core.plugins import engines
from cfl.engines.base import Engine
from cfl.engines.loop import LoopEngine
from cfl.engines.vmapped import VmappedEngine
from cfl.flower.engine import SimulationEngine
from cfl.flower.in_process import InProcessGrid
from cfl.flower.link import Link
from cfl.flower.node import Node, built, client_app
from cfl.runtime.builder import EngineParts

IN_PROCESS = "in-process"


@engines.register("flower")
def engine(made_from: EngineParts) -> Engine:
    """Return the engine of a run."""
    inner, rounds, fingerprint = made_from.inner, made_from.rounds, made_from.fingerprint
    data_root, config = made_from.data_root, rounds.config
    if config.device != "cpu":
        raise ConfigError("engine=flower runs on CPU cores only; set device=cpu, or engine=vmapped for a GPU")
    assert isinstance(inner, LoopEngine)
    workers, folder = config.workers or machine.cores(), Path(tempfile.mkdtemp(prefix="cfl-flower-"))
    grid: InProcessGrid | SimulatedGrid
    if config.flower.address == IN_PROCESS:
        nodes = [Node(inner, rounds, fingerprint, folder / str(number)) for number in range(workers)]
        grid = InProcessGrid([client_app(partial(_known, node)) for node in nodes])
    else:
        block = inner.block if isinstance(inner, VmappedEngine) else None
        local = config.model_copy(update={"engine": "vmapped" if block else "loop", "block": block})
        options, root = json.dumps(resolve.dump(local)), str(data_root) if data_root else None
        grid = SimulatedGrid(client_app(partial(_rebuilt, options, root, str(folder))), workers, config.flower.address)

    def end() -> None:
        if isinstance(grid, SimulatedGrid):
            grid.close()
        shutil.rmtree(folder, ignore_errors=True)

    return SimulationEngine(inner, Link(grid, config.flower.deadline), fingerprint, end)


class SimulatedGrid:
    """The grid of a simulation of Flower's, which runs in a thread from the first use until `close`.

    address: of a Ray cluster, None for one on this machine that ends with the simulation.
    """

    def __init__(self, app: ClientApp, workers: int, address: str | None) -> None:
        self.app, self.workers, self.address = app, workers, address
        self._grid: Grid | None = None
        self._failed: list[BaseException] = []
        self._done = threading.Event()
        self._thread = threading.Thread()

    def get_nodes(self) -> Iterable[NodeInfo]:
        return self._started().get_nodes()

    def push_messages(self, messages: Iterable[Message]) -> Iterable[str]:
        return self._started().push_messages(messages)

    def pull_messages(self, message_ids: Iterable[str]) -> Iterable[Message]:
        self._check()
        return self._started().pull_messages(message_ids)

    def close(self) -> None:
        """End the simulation."""
        if self._grid is not None:
            self._done.set()
            self._thread.join()
            self._grid = None

    def _started(self) -> Grid:
        if self._grid is None:
            handed: Queue[Grid] = Queue()
            self._done, self._failed = threading.Event(), []
            self._thread = threading.Thread(target=self._simulate, args=(handed,), daemon=True)
            self._thread.start()
            while self._grid is None:
                self._check()
                with contextlib.suppress(Empty):
                    self._grid = handed.get(timeout=0.1)
            while len(list(self._grid.get_nodes())) < self.workers:
                self._check()
                time.sleep(0.01)
        return self._grid

    def _check(self) -> None:
        """Raise UpdateError if the simulation has ended."""
        if self._failed:
            self._grid = None
            raise UpdateError(f"Flower's simulation ended: {reason(self._failed[0])}") from self._failed[0]

    def _simulate(self, handed: Queue[Grid]) -> None:
        """Run the simulation, whose ServerApp hands its grid over and waits."""
        server = ServerApp()

        @server.main()
        def main(grid: Grid, context: Context) -> None:
            handed.put(grid)
            self._done.wait()

        local: dict[str, Any] = {"num_cpus": self.workers, "_node_ip_address": "127.0.0.1"}
        start = {"address": self.address} if self.address else local
        logging.getLogger("flwr").setLevel(logging.CRITICAL)
        os.environ.setdefault("RAY_ACCEL_ENV_VAR_OVERRIDE_ON_ZERO", "0")  # else Ray warns of its next version
        try:
            run_simulation(
                server, self.app, self.workers,
                backend_config={
                    "init_args": {**start, "logging_level": logging.ERROR, "log_to_driver": False},
                    "client_resources": {"num_cpus": 1, "num_gpus": 0.0},
                },
            )  # fmt: skip
        except BaseException as error:  # of any kind: the caller's thread raises it
            self._failed.append(_first(error))


def _first(error: BaseException) -> BaseException:
    while error.__cause__ is not None:
        error = error.__cause__
    return error


def _known(node: Node) -> Node:
    return node


@lru_cache(maxsize=1)
def _rebuilt(options: str, data_root: str | None, folder: str) -> Node:
    """The node of a process of the simulation, which any of the virtual nodes uses."""
    return Node(*built(resolve.load(json.loads(options)), Path(data_root) if data_root else None), Path(folder))
