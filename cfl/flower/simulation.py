"""Flower's simulation as an engine: virtual nodes on this machine or on a Ray cluster."""

import logging
import tempfile
import threading
import uuid
from collections.abc import Callable
from pathlib import Path
from queue import Queue

from flwr.app import Context
from flwr.serverapp import Grid, ServerApp

from cfl.assembly import methods, resolve
from cfl.core import ConfigError, machine
from cfl.core.plugins import engines
from cfl.engines.base import Engine
from cfl.engines.loop import LoopEngine
from cfl.flower.engine import SimulationEngine
from cfl.flower.in_process import InProcessGrid
from cfl.flower.link import Link
from cfl.flower.node import Node, client_app
from cfl.runtime.builder import build_session
from cfl.runtime.fingerprint import Fingerprint
from cfl.runtime.rounds import Rounds
from cfl.runtime.runner import stream_of

IN_PROCESS = "in-process"
START = 300.0  # seconds within which a simulation has to start


@engines.register("flower")
def engine(inner: LoopEngine, rounds: Rounds, fingerprint: Fingerprint, data_root: Path | None) -> Engine:
    """Return the engine of a run. inner: computes the clients of a node."""
    config = rounds.config
    workers, folder = config.workers or machine.cores(), tempfile.mkdtemp(prefix="cfl-flower-")
    if config.flower.address == IN_PROCESS:
        apps = [client_app(lambda context: Node(inner, rounds, Path(folder, str(node)))) for node in range(workers)]
        return SimulationEngine(inner, Link(InProcessGrid(apps), config.flower.deadline))
    raise NotImplementedError
