"""The `pool` engine: worker processes, each with one thread, compute the clients of a round in chunks.

Workers are forked, so they inherit the model, the method and the data. Shared memory holds the broadcast of a round.
A worker sums the uploads of a chunk, and the server merges these sums in the order of the chunks. So neither the number
of workers nor the death of a worker changes a bit of the result.
"""

from __future__ import annotations

import contextlib
import multiprocessing
import signal
from collections import Counter, deque
from collections.abc import Generator, Iterable, Mapping, Sequence
from itertools import count
from multiprocessing.connection import Connection, wait
from typing import Any

import numpy as np
import torch
from torch import Tensor

from cfl.aggregation.plain import UploadSum
from cfl.contract import Client, RoundInfo, RoundInputs
from cfl.core import ConfigError, Tree, UpdateError, machine
from cfl.engines import parts
from cfl.engines.base import Collected, Observe, OuterEngine
from cfl.engines.loop import LoopEngine
from cfl.engines.shared_memory import Arena, ArenaFull, portable
from cfl.engines.vmapped import VmappedEngine

DEATHS = 3  # a run ends when so many workers have died at the same chunk
SPARE = 1 << 20  # bytes: first size of a worker's arena for chunks; that for results has the broadcast's size on top


class PoolEngine(OuterEngine):
    """Worker processes that compute chunks of clients with an engine `inner`.

    block: clients of a chunk; a vmapped `inner` brings its own blocks, which are then the chunks.
    known: objects that rounds refer to and workers inherit, such as the model and the data.
    grown: bytes by which the largest worker has grown.
    Raises ConfigError on a GPU, or if this process cannot fork.
    """

    inner: LoopEngine

    def __init__(self, inner: LoopEngine, workers: int, block: int, known: Iterable[object]) -> None:
        if not forks():
            raise ConfigError("engine=pool forks processes, which this process cannot; use engine=vmapped or loop")
        if any(leaf.device.type != "cpu" for leaf in inner.model.params.values()):
            raise ConfigError("engine=pool runs on CPU cores only; on a GPU use engine=vmapped")
        self.inner, self.workers, self.block = inner, workers, block
        self.known = list(known)
        self.places = {id(value): place for place, value in enumerate(self.known)}
        self.grown = 0
        self._workers: list[_Worker] = []
        self._broadcasts = Arena(0)
        self._rounds = count()

    def collect(self, total: UploadSum, inputs: RoundInputs, observe: Observe | None) -> Collected:
        chunks = self._chunks(inputs.clients, inputs.states)
        # The number makes each round's header unique, so workers notice a new broadcast in the same memory.
        header = self._broadcast((next(self._rounds), inputs.info, inputs.shared, observe is not None), len(chunks))
        found, due, early = Collected(), 0, dict[int, Any]()
        with contextlib.closing(self._results(header, chunks, inputs)) as results:
            for number, result in results:
                early[number] = result if number == due else _copied(result)  # the worker overwrites a waiting result
                while due in early:  # in the order of the chunks, which decides how sums round
                    done = early.pop(due)
                    self.grown = max(self.grown, done["grown"])
                    parts.merge(done, inputs.states, total, found, self.inner, observe)
                    due += 1
        return found

    def close(self) -> None:
        for worker in self._workers:
            worker.stop()
        self._workers = []

    def _chunks(self, clients: Sequence[Client], states: Mapping[int, Tree]) -> list[list[Client]]:
        if isinstance(self.inner, VmappedEngine):
            return self.inner.blocks(clients, states)
        return [list(clients[begin : begin + self.block]) for begin in range(0, len(clients), self.block)]

    def _broadcast(self, message: Any, chunks: int) -> bytes:
        """Write the message to the shared arena, start missing workers, and return the header that locates it."""
        try:
            header = self._broadcasts.write(message, self.places)
        except ArenaFull as full:
            self.close()
            self._broadcasts = Arena(2 * full.bytes)
            header = self._broadcasts.write(message, self.places)
        while len(self._workers) < min(self.workers, chunks):
            self._workers.append(_Worker(self, self._broadcasts, SPARE, self._broadcasts.bytes + SPARE))
        return header

    def _results(
        self, header: bytes, chunks: list[list[Client]], inputs: RoundInputs
    ) -> Generator[tuple[int, dict[str, Any]]]:
        """Yield the number and the result of each chunk as it is done; the worker's next result overwrites it."""
        waiting, busy, deaths = deque(range(len(chunks))), dict[Connection, tuple[_Worker, int]](), Counter[int]()
        try:
            while waiting or busy:
                free = [worker for worker in self._workers if worker.connection not in busy]
                for worker in free[: len(waiting)]:
                    number = waiting.popleft()
                    states = {client.id: inputs.states[client.id] for client in chunks[number]}
                    worker.send(header, (chunks[number], states))
                    busy[worker.connection] = worker, number
                for ready in wait(list(busy)):
                    assert isinstance(ready, Connection)
                    worker, number = busy.pop(ready)
                    kind, value = worker.receive()
                    if kind == "result":
                        yield number, value
                        continue
                    if kind == "error":
                        raise value
                    waiting.appendleft(number)
                    if kind == "full":
                        worker.start(results=2 * value)
                    else:
                        deaths[number] += 1
                        self._replace(worker, chunks[number], deaths[number], inputs.info)
        finally:
            for worker, _ in busy.values():  # of a round that ends early
                worker.stop()
                self._workers.remove(worker)

    def _replace(self, worker: _Worker, chunk: list[Client], deaths: int, info: RoundInfo) -> None:
        """Restart a dead worker. Raises UpdateError after `DEATHS` deaths at the same chunk."""
        code = worker.stop()
        if deaths == DEATHS:
            self._workers.remove(worker)
            ids = ", ".join(str(client.id) for client in chunk)
            raise UpdateError(
                f"{DEATHS} worker processes died at clients {ids} ({info.place}), the last with exit code {code}; "
                "memory may be short: lower workers or block"
            )
        worker.start()

    def compute(self, round: Any, before: int, clients: list[Client], states: dict[int, Tree]) -> dict[str, Any]:
        """Compute a chunk. round: number, description, broadcast, and True if local models are observed.

        before: peak bytes of the process when it started.
        """
        _, info, shared, observed = round
        result = parts.compute(self.inner, RoundInputs(info, shared, clients, states), observed)
        return {**result, "grown": machine.peak_bytes() - before}


def forks() -> bool:
    """Return True if this process can fork workers."""
    return "fork" in multiprocessing.get_all_start_methods() and not multiprocessing.current_process().daemon


class _Worker:
    """A process with two arenas that it shares with the server. chunks, results: their sizes in bytes."""

    def __init__(self, pool: PoolEngine, broadcasts: Arena, chunks: int, results: int) -> None:
        self.pool, self.broadcasts = pool, broadcasts
        self.chunks, self.results = Arena(chunks), Arena(results)
        self.start()

    def start(self, chunks: int = 0, results: int = 0) -> None:
        """Fork the process, after the end of a previous one. chunks, results: new sizes in bytes of its arenas."""
        if hasattr(self, "process"):
            self.stop()
        self.chunks = Arena(chunks) if chunks else self.chunks
        self.results = Arena(results) if results else self.results
        context = multiprocessing.get_context("fork")
        self.connection, theirs = context.Pipe()
        inherited = [self.connection, *(worker.connection for worker in self.pool._workers if worker is not self)]
        self.process = context.Process(target=self._serve, args=(theirs, inherited), daemon=True)
        machine.await_writers()
        self.process.start()
        theirs.close()

    def send(self, header: bytes, chunk: Any) -> None:
        """Let the process compute a chunk of the round that the header locates."""
        try:
            written = self.chunks.write(chunk, self.pool.places)
        except ArenaFull as full:
            self.start(chunks=2 * full.bytes)
            written = self.chunks.write(chunk, self.pool.places)
        with contextlib.suppress(ConnectionError):  # `receive` reports a dead process
            self.connection.send((header, written))

    def receive(self) -> tuple[str, Any]:
        """Return ("result", result), ("error", exception), ("full", bytes that a result takes) or ("dead", None)."""
        try:
            kind, value = self.connection.recv()
            return kind, self.results.read(value) if kind == "result" else value
        except (EOFError, OSError):  # the process ended, possibly in the middle of an answer
            return "dead", None

    def stop(self) -> int | None:
        """End the process and return its exit code."""
        self.connection.close()
        self.process.kill()  # not SIGTERM: the process has nothing to clean up, and may inherit a handler
        self.process.join()
        return self.process.exitcode

    def _serve(self, connection: Connection, inherited: Sequence[Connection]) -> None:
        """Run in the process: receive chunks and send results until the server closes its end of the connection."""
        signal.signal(signal.SIGINT, signal.SIG_IGN)  # the server handles Ctrl-C and ends its workers
        signal.signal(signal.SIGTERM, signal.SIG_DFL)
        for other in inherited:
            other.close()
        torch.set_num_threads(1)
        machine.keep_memory()
        pool, known = self.pool, self.pool.known
        header, round, before = b"", None, machine.peak_bytes()
        with contextlib.suppress(EOFError, OSError):
            while True:
                sent, chunk = connection.recv()
                if sent != header:
                    header, round = sent, self.broadcasts.read(sent, known)
                answer: tuple[str, Any]
                try:
                    answer = "result", self.results.write(pool.compute(round, before, *self.chunks.read(chunk, known)))
                except ArenaFull as full:
                    answer = "full", full.bytes
                except Exception as error:  # of any kind: the server raises it
                    answer = "error", portable(error)
                connection.send(answer)


def _copied(value: Any) -> Any:
    """Copy plain data and all its tensors."""
    if isinstance(value, Tensor):
        return value.clone()
    if isinstance(value, Mapping):
        return {key: _copied(item) for key, item in value.items()}
    return value.copy() if isinstance(value, np.ndarray | list) else value
