"""`auto`: the engine, the block and the threads that compute the first steps of a run the fastest."""

from __future__ import annotations

import contextlib
import math
import statistics
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from functools import partial
from typing import NamedTuple

import torch

from cfl.aggregation.plain import UploadSum
from cfl.contract.data import Client, Share
from cfl.contract.rounds import RoundInfo, TreesByOwner
from cfl.core import machine
from cfl.core.tree import Tree
from cfl.engines.base import Engine
from cfl.engines.pool import forks

STEPS, CLIENTS = 4, 32  # of a trial: steps of a client, clients
WARM, LEAST, MOST = 2, 3, 20  # rounds of a trial before the timed ones; timed ones
SECONDS = 0.4  # that a round of a trial may take, and that its timed ones take unless there are too many
_HOPELESS = 1.5  # times the best time so far: a round that takes longer, once warm, is the last of its trial
_BETTER = 0.95  # the share of the best time so far that a more involved choice has to stay below
_CLOSE, _AGAIN = 1.3, 2  # times the best time: candidates that stay below are timed so many times again
_MEMORY = 0.8  # share of what is free that a block may take


class Choice(NamedTuple):
    """An engine, the clients that are trained, or handed to a worker, at a time, and threads inside an operation."""

    engine: str
    block: int | None
    threads: int


def undecided(engine: str, block: int | None) -> bool:
    """Whether a measurement has to decide something."""
    return engine == "auto" or "vmapped" in engine and block is None


def choose(
    engine: str,
    block: int | None,
    workers: int,
    threads: int,
    device: torch.device,
    build: Callable[[str, int | None], Engine],
    round: tuple[RoundInfo, TreesByOwner, Sequence[Client], Mapping[int, Tree]],
    batch_size: int,
) -> Choice:
    """The fastest of the engines that are asked for, from the first steps of a round; nothing of it is kept.

    Where steps are slow there are only few clients in a trial.
    Blocks double as long as that saves time and memory lasts: so much as the block before took is measured.
    Raises what the round raises where `engine` names one, which then has nothing to fall back to.
    """
    info, shared, clients, states = round
    short = [_shortened(client, batch_size) for client in clients[:CLIENTS]]

    def timed(choice: Choice, some: Sequence[Client], most: float = math.inf) -> tuple[float, int]:
        trial = build(choice.engine, choice.block)
        with contextlib.closing(trial), machine.threads(choice.threads):
            return _seconds(trial, device, partial(_round, trial, info, shared, states, some), most)

    best, found = math.inf, dict[Choice, float]()
    engines = _engines(engine, workers, threads, device)
    if engine == "auto":
        one, _ = timed(Choice(engines[0][0], block, threads), short[:1], 0.0)
        short = short[: max(2 * workers, int(min(SECONDS / one, CLIENTS)))]
    for name, inside in engines:
        last = math.inf
        for candidate in [block] if block or "vmapped" not in name else _blocks(len(short), workers, name):
            choice = Choice(name, candidate, inside)
            try:
                seconds, taken = timed(choice, short, _HOPELESS * best)
            except Exception:  # too much memory, or a method or a model that vmap does not take
                if engine != "auto" and last == math.inf:
                    raise
                break
            best, found[choice] = min(best, seconds), seconds
            if seconds > last * _BETTER:  # small blocks may be slower than none, and large ones faster
                break
            last = seconds
            if 2 * taken * (workers if "pool" in name else 1) > _MEMORY * machine.free_bytes(device):
                break
    close = [choice for choice, seconds in found.items() if seconds <= _CLOSE * best]
    for choice in _AGAIN * close if len(close) > 1 else ():  # on a busy machine once is not enough
        found[choice] = min(found[choice], timed(choice, short)[0])
    chosen, *others = close or [Choice("loop", None, threads)]
    for choice in others:
        if found[choice] < _BETTER * found[chosen]:
            chosen = choice
    return chosen


def _engines(engine: str, workers: int, threads: int, device: torch.device) -> list[tuple[str, int]]:
    """What can be the fastest, with threads: one process for a GPU; for a CPU one a core, or with a thread a core."""
    if engine != "auto":
        return [(engine, threads)]
    if device.type != "cpu" or workers == 1:
        return [("loop", threads), ("vmapped", threads)]
    pools = [("pool", threads), ("pool+vmapped", threads)] if forks() else [("loop", threads)]
    if forks() and torch.cuda.is_available():
        # Autograd on a machine with a GPU starts threads, after which no process can be forked.
        return pools
    return [*pools, *(("vmapped", count) for count in sorted({threads, workers}))]


def _blocks(clients: int, workers: int, name: str) -> Iterator[int]:
    """2, 4, 8, ... up to a worker's share of the clients."""
    most = max(2, -(-clients // (workers if "pool" in name else 1)))
    yield from (2**power for power in range(1, math.ceil(math.log2(most))))
    yield most


def _round(
    engine: Engine, info: RoundInfo, shared: TreesByOwner, states: Mapping[int, Tree], clients: Sequence[Client]
) -> None:
    """A round whose sum is a plain one: keys and masks take the same time with every engine."""
    engine.collect(UploadSum(info, engine.gathers), info, shared, states, clients, None)


def _shortened(client: Client, batch_size: int) -> Client:
    """The client with data for a few steps."""
    kept = {task: Share(share.samples, share.rows[: STEPS * batch_size]) for task, share in client.shares.items()}
    return Client(client.id, kept, client.task, client.now)


def _seconds(engine: Engine, device: torch.device, work: Callable[[], object], most: float) -> tuple[float, int]:
    """The median time that the work takes, once it is warm, and how many bytes it made a process grow.

    most: seconds of the work after which it is not tried again.
    """
    before, times = machine.peak_bytes(device), list[float]()
    while len(times) < WARM + LEAST or sum(times[WARM:]) < SECONDS and len(times) < WARM + MOST:
        if len(times) > WARM and times[-1] > most:
            break
        machine.synchronize(device)
        began = time.perf_counter()
        work()
        machine.synchronize(device)
        times.append(time.perf_counter() - began)
    return statistics.median(times[WARM:]), max(engine.grown, machine.peak_bytes(device) - before)
