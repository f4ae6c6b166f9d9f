"""The `pool` engine: worker processes, each with one thread, compute the clients of a round in chunks.

Workers are forked, so they have the model, the method and the data; a round's broadcast lies in memory that all share.
A worker adds up the uploads of a chunk; the server puts the sums together in the order of the chunks, whoever computed
them. So neither the number of workers nor the death of one changes a bit of the result.
"""

from __future__ import annotations

import contextlib
import multiprocessing
import signal
import warnings
from collections import Counter, deque
from collections.abc import Generator, Iterable, Mapping, Sequence
from itertools import count
from multiprocessing.connection import Connection, wait
from typing import Any

import numpy as np
import torch
from torch import Tensor

from cfl.aggregation.plain import UploadSum
from cfl.contract.data import Client
from cfl.contract.regularizer import Gathers
from cfl.contract.rounds import RoundInfo, TreesByOwner
from cfl.core import machine, tree
from cfl.core.errors import ConfigError, UpdateError
from cfl.core.tree import Tree
from cfl.engines.base import Collected, Engine, Observe, Sums
from cfl.engines.loop import LoopEngine
from cfl.engines.shared_memory import Arena, ArenaFull, portable
from cfl.engines.vmapped import VmappedEngine

DEATHS = 3  # of workers at the same chunk, after which a run gives up
_SPARE = 1 << 20  # bytes


class PoolEngine(Engine):
    """Chunks of `block` clients, or of the blocks of `inner`, computed by `workers` processes as `inner` does.

    known: objects that rounds refer to and that workers have from the start, such as the model and the data;
    grown: bytes by which the largest of the workers has grown.
    Raises ConfigError on a GPU, and where processes cannot be forked.
    """

    def __init__(self, inner: LoopEngine, workers: int, block: int, known: Iterable[object]) -> None:
        if not forks():
            raise ConfigError("engine=pool forks processes, which this one cannot; use engine=vmapped or loop")
        if any(leaf.device.type != "cpu" for leaf in inner.model.params.values()):
            raise ConfigError("engine=pool keeps CPU cores busy; on a GPU use engine=vmapped")
        self.inner, self.workers, self.block = inner, workers, block
        self._known = list(known)
        self._keys = {id(value): ("known", number) for number, value in enumerate(self._known)}
        self.grown = 0
        self._workers: list[_Worker] = []
        self._down = Arena(0)
        self._round = count()

    @property
    def gathers(self) -> Mapping[str, Gathers]:
        return self.inner.gathers

    @property
    def sums(self) -> Sums:
        return self.inner.sums

    def collect(
        self,
        total: UploadSum,
        info: RoundInfo,
        shared: TreesByOwner,
        states: Mapping[int, Tree],
        clients: Sequence[Client],
        observe: Observe | None,
    ) -> Collected:
        chunks = self._chunks(clients, states)
        header = self._broadcast((next(self._round), info, shared, observe is not None), len(chunks))
        found, merged, early = Collected(), 0, dict[int, Any]()
        with contextlib.closing(self._results(header, chunks, states, info)) as results:
            for number, result in results:
                early[number] = result if number == merged else _copied(result)
                while merged in early:  # in the order of the chunks, so that sums round alike
                    self._take(early.pop(merged), states, total, found, observe)
                    merged += 1
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
        """What workers need to find the message, with as many workers ready as there is work for."""
        try:
            header = self._down.write(message, self._key)
        except ArenaFull as full:
            self.close()
            self._down = Arena(2 * full.bytes)
            header = self._down.write(message, self._key)
        while len(self._workers) < min(self.workers, chunks):
            self._workers.append(_Worker(self, self._down, _SPARE, self._down.bytes + _SPARE))
        return header

    def _results(
        self, header: bytes, chunks: list[list[Client]], states: Mapping[int, Tree], info: RoundInfo
    ) -> Generator[tuple[int, dict[str, Any]]]:
        """The number of each chunk, as they come, and what a worker has made of it, in memory that is used again."""
        waiting, busy, deaths = deque(range(len(chunks))), dict[Connection, tuple[_Worker, int]](), Counter[int]()
        try:
            while waiting or busy:
                free = [worker for worker in self._workers if worker.connection not in busy]
                for worker in free[: len(waiting)]:
                    number = waiting.popleft()
                    worker.send(header, (chunks[number], {client.id: states[client.id] for client in chunks[number]}))
                    busy[worker.connection] = worker, number
                for ready in wait(list(busy)):
                    assert isinstance(ready, Connection)
                    worker, number = busy.pop(ready)
                    try:
                        kind, value = worker.receive()
                    except (EOFError, OSError):  # gone, or gone in the middle of an answer
                        deaths[number] += 1
                        self._mourn(worker, chunks[number], deaths[number], info)
                        waiting.appendleft(number)
                        continue
                    if kind == "error":
                        raise value
                    if kind == "full":
                        worker.start(results=2 * value)
                        waiting.appendleft(number)
                        continue
                    yield number, value
        finally:
            for worker, _ in busy.values():  # of a round that is given up
                worker.stop()
                self._workers.remove(worker)

    def _mourn(self, worker: _Worker, chunk: list[Client], deaths: int, info: RoundInfo) -> None:
        """Put a new worker in the place of a dead one."""
        code = worker.stop()
        if deaths == DEATHS:
            self._workers.remove(worker)
            ids = ", ".join(str(client.id) for client in chunk)
            raise UpdateError(
                f"{DEATHS} worker processes died at clients {ids} ({info.place}), the last with exit code {code}; "
                "memory may be short: lower workers or block"
            )
        worker.start()

    def _take(
        self,
        result: Mapping[str, Any],
        states: Mapping[int, Tree],
        total: UploadSum,
        found: Collected,
        observe: Observe | None,
    ) -> None:
        total.merge(result["part"])
        for id, state in result["states"].items():
            found.states[id] = {
                name: states[id][name] if leaf is None else leaf.clone() for name, leaf in state.items()
            }
        found.losses.update((id, loss.clone()) for id, loss in result["losses"].items())
        found.excluded += result["excluded"]
        self.grown = max(self.grown, result["grown"])
        for category, text in result["warnings"]:
            warnings.warn(text, category, stacklevel=2)
        if observe is not None:
            with self.inner.model.evaluation():
                for id, params in result["models"].items():
                    observe(id, tree.clone(params))

    def _key(self, value: object) -> Any:
        return self._keys.get(id(value))

    def _serve(self, connection: Connection, others: Sequence[Connection], down: Arena, up: Arena, own: Arena) -> None:
        """A worker's life: chunks in, results out, until the server's end of the connection is gone."""
        signal.signal(signal.SIGINT, signal.SIG_IGN)  # the server ends the round first
        signal.signal(signal.SIGTERM, signal.SIG_DFL)
        for other in others:
            other.close()
        torch.set_num_threads(1)
        machine.keep_memory()
        recall = {"known": self._known.__getitem__}
        header, round, before = b"", None, machine.peak_bytes()
        with contextlib.suppress(EOFError, OSError):
            while True:
                sent, task = connection.recv()
                if sent != header:
                    header, round = sent, down.read(sent, recall)
                answer: tuple[str, Any]
                try:
                    answer = "result", up.write(self._chunk(round, before, *own.read(task, recall)))
                except ArenaFull as full:
                    answer = "full", full.bytes
                except Exception as error:
                    answer = "error", portable(error)
                connection.send(answer)

    def _chunk(self, round: Any, before: int, clients: list[Client], states: dict[int, Tree]) -> dict[str, Any]:
        """The work of a chunk. round: number, info, broadcast, and whether somebody looks at the local models.

        before: the most bytes that the process had when it began.
        """
        _, info, shared, observed = round
        total, models = self.sums(info, self.gathers), dict[int, Tree]()
        keep = (lambda id, params: models.update({id: tree.clone(params)})) if observed else None
        with warnings.catch_warnings(record=True) as said:
            warnings.simplefilter("always")
            found = self.inner.collect(total, info, shared, states, clients, keep)
        changed = {  # None for a leaf that is as it came
            id: {name: None if leaf is states[id].get(name) else leaf for name, leaf in state.items()}
            for id, state in found.states.items()
        }
        return {
            "part": total.part(),
            **vars(found),
            "states": changed,
            "models": models,
            "grown": machine.peak_bytes() - before,
            "warnings": list(dict.fromkeys((each.category, str(each.message)) for each in said)),
        }


def forks() -> bool:
    """Whether this process can fork workers."""
    return "fork" in multiprocessing.get_all_start_methods() and not multiprocessing.current_process().daemon


class _Worker:
    """A process and the memory that it shares with the server. down: where broadcasts are; sizes in bytes."""

    def __init__(self, pool: PoolEngine, down: Arena, tasks: int, results: int) -> None:
        self.pool, self.down = pool, down
        self.own, self.up = Arena(tasks), Arena(results)
        self.start()

    def start(self, tasks: int = 0, results: int = 0) -> None:
        """Fork, in place of the process before, with larger memory where that is asked for."""
        if hasattr(self, "process"):
            self.stop()
        self.own, self.up = Arena(tasks) if tasks else self.own, Arena(results) if results else self.up
        context = multiprocessing.get_context("fork")
        self.connection, theirs = context.Pipe()
        others = [self.connection, *(worker.connection for worker in self.pool._workers if worker is not self)]
        self.process = context.Process(
            target=self.pool._serve, args=(theirs, others, self.down, self.up, self.own), daemon=True
        )
        self.process.start()
        theirs.close()

    def send(self, header: bytes, task: Any) -> None:
        """Have it compute a chunk of the round that the header finds."""
        try:
            written = self.own.write(task, self.pool._key)
        except ArenaFull as full:
            self.start(tasks=2 * full.bytes)
            written = self.own.write(task, self.pool._key)
        with contextlib.suppress(ConnectionError):  # a dead worker is noticed at `receive`
            self.connection.send((header, written))

    def receive(self) -> tuple[str, Any]:
        """Its answer. Raises EOFError where it is dead."""
        kind, value = self.connection.recv()
        return kind, self.up.read(value) if kind == "result" else value

    def stop(self) -> int | None:
        """End the process; its exit code."""
        self.connection.close()
        self.process.kill()  # it has nothing to put in order, and a handler of SIGTERM may be the parent's
        self.process.join()
        return self.process.exitcode


def _copied(value: Any) -> Any:
    """The same plain data with copies of all tensors."""
    if isinstance(value, Tensor):
        return value.clone()
    if isinstance(value, Mapping):
        return {key: _copied(item) for key, item in value.items()}
    return value.copy() if isinstance(value, np.ndarray | list) else value
