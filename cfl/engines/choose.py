"""`engine=auto`: choose the fastest engine, block and number of threads by timing the first steps of a run."""

import contextlib
import math
import statistics
import time
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass, field
from typing import NamedTuple

import torch

from cfl.aggregation.plain import UploadSum
from cfl.config.schema import RunConfig
from cfl.contract import Client, RoundInputs, Share
from cfl.core import ConfigError, UpdateError, machine
from cfl.engines.base import Engine
from cfl.engines.compiled import obstacle
from cfl.engines.pool import forks

STEPS, CLIENTS = 4, 32  # a trial has at most so many steps of a client, and clients
WARM, LEAST, MOST = 2, 3, 50  # rounds of a trial: untimed rounds first, fewest timed rounds, most timed rounds
SECONDS = 0.4  # target time of a round, which limits the clients of a trial; its timed rounds stop at this sum
HOPELESS = 1.5  # a trial stops at a timed round that takes longer than this times the best time so far
# A later, more involved engine must take less than this fraction of the best time. Of an engine's blocks the largest is
# chosen whose time is within it: a trial has fewer clients than a round, which small blocks divide more evenly.
BETTER = 0.98
CLOSE, AGAIN = 1.3, 2  # choices within CLOSE times the best time are timed AGAIN more times
LONG = 200.0  # seconds: shorter runs do not try compiled steps, whose compiler takes some seconds a trial
MEMORY = 0.8  # fraction of the free memory that a block may take
# Errors of one engine that another engine may avoid: memory is short (the first three), or vmap does not support a hook
# or the model, and code that meets its tensors raises any of the others.
FAILURES = (
    RuntimeError, MemoryError, OSError, ValueError, TypeError, AttributeError, LookupError, AssertionError, UpdateError,
)  # fmt: skip


class Choice(NamedTuple):
    """An engine, the clients trained or handed to a worker at a time (block), and threads inside an operation.

    compile: whether the steps of blocks are compiled; None: not decided, which means no.
    """

    engine: str
    block: int | None
    threads: int
    compile: bool | None = None


def undecided(engine: str, block: int | None) -> bool:
    """Return True if the engine or its block remains to be chosen."""
    return engine == "auto" or "vmapped" in engine and block is None


def choose(
    config: RunConfig,
    device: torch.device,
    build: Callable[[str, int | None, bool], Engine],
    inputs: RoundInputs,
    rounds: int,
) -> Choice:
    """Return the fastest choice for `config.engine`, timed on the first steps of a round; their results are discarded.

    config: of the run; a given block is kept.
    build: makes the engine of a name and a block, with compiled steps or without; inputs: of the round;
    rounds: number of such rounds in the run, which decides whether compiled steps pay.
    With engine=auto, choices that fail are left out, and with compile=True those whose steps are never compiled. With a
    named engine, an error of its smallest block is raised.
    """
    engine, block, threads, compile = config.engine, config.block, config.threads, config.compile
    workers, batch_size = config.workers or machine.cores(), config.local.batch_size
    short = [_shortened(client, batch_size) for client in inputs.clients[:CLIENTS]]
    trials = _Trials(build, device, workers, inputs._replace(clients=short))
    engines = _engines(workers, threads, device) if engine == "auto" else [(engine, threads)]
    if engine == "auto":  # slow steps are timed with fewer clients
        engines = [each for each in engines if "vmapped" in each[0] or not compile]
        smallest = {name: block or (2 if "vmapped" in name else None) for name, _ in engines}
        one = trials.first((Choice(name, smallest[name], inside) for name, inside in engines), short[:1])
        processes = workers if any("pool" in name for name, _ in engines) else 1
        # Each process gets 2^k clients, for equal blocks: a smaller last one would be traced while it is timed.
        most = processes * 2 ** max(1, round(math.log2(min(SECONDS / one, CLIENTS) / processes)))
        trials.inputs = inputs._replace(clients=short[:most])
    for name, inside in engines:
        sizes = [block] if block or "vmapped" not in name else _blocks(len(trials.inputs.clients), workers, name)
        trials.grow_blocks((Choice(name, size, inside) for size in sizes), required=engine != "auto")
    if not trials.seconds:
        return Choice("loop", None, threads, False if compile else None)
    chosen = trials.best()
    if compile is None and engine == "auto":
        steps, trial = (sum(one.steps(batch_size) for one in each) for each in (inputs.clients, trials.inputs.clients))
        return trials.compiled(chosen, rounds * steps / trial)
    return chosen._replace(compile=compile)


def _engines(workers: int, threads: int, device: torch.device) -> list[tuple[str, int]]:
    """Candidate engines with their threads: on a GPU one process, on a CPU one process or one thread per worker."""
    if device.type != "cpu" or workers == 1:
        return [("loop", threads), ("vmapped", threads)]
    pools = [("pool", threads), ("pool+vmapped", threads)] if forks() else [("loop", threads)]
    if forks() and torch.cuda.is_available():
        # On a machine with a GPU, autograd starts threads in this process, which can then no longer fork.
        return pools
    return [*pools, *(("vmapped", count) for count in sorted({threads, workers}))]


def _blocks(clients: int, workers: int, name: str) -> Iterator[int]:
    """Yield 2, 4, 8, ... up to the share of the clients of one process."""
    most = max(2, -(-clients // (workers if "pool" in name else 1)))
    yield from (2**power for power in range(1, math.ceil(math.log2(most))))
    yield most


def _shortened(client: Client, batch_size: int) -> Client:
    """Return the client with data for at most `STEPS` steps per task."""
    kept = {task: Share(share.samples, share.rows[: STEPS * batch_size]) for task, share in client.shares.items()}
    return Client(client.id, kept, client.task, client.now)


@dataclass
class _Trials:
    """Timings of choices. seconds: median of a trial's round by each choice."""

    build: Callable[[str, int | None, bool], Engine]
    device: torch.device
    workers: int
    inputs: RoundInputs
    seconds: dict[Choice, float] = field(default_factory=dict)

    def first(self, choices: Iterable[Choice], clients: list[Client]) -> float:
        """Return the seconds of a round of these clients by the first choice that does not fail."""
        failed: Exception | None = None
        for choice in choices:
            try:
                return self.measure(choice, self.inputs._replace(clients=clients), limit=0.0)[0]
            except FAILURES as error:
                failed = failed or error
        assert failed is not None
        raise failed

    def grow_blocks(self, choices: Iterable[Choice], required: bool) -> None:
        """Time choices of growing blocks until one fails or is not faster, or the next may not fit in memory.

        required: raise an error of the first choice.
        """
        before = math.inf
        for choice in choices:
            limit = HOPELESS * min(self.seconds.values(), default=math.inf)
            try:
                seconds, grown = self.measure(choice, self.inputs, limit)
            except FAILURES:
                if required and before == math.inf:
                    raise
                return
            self.seconds[choice] = seconds
            doubled = 2 * grown * (self.workers if "pool" in choice.engine else 1)
            if seconds > BETTER * before or doubled > MEMORY * machine.free_bytes(self.device):
                return
            before = seconds

    def best(self) -> Choice:
        """Return the largest block, within the noise, of the fastest engine."""
        close, time = self._timed_again(), self.seconds.__getitem__
        places = dict.fromkeys((choice.engine, choice.threads) for choice in close)
        engines = [[choice for choice in close if (choice.engine, choice.threads) == place] for place in places]
        chosen, *others = engines
        for blocks in others:
            if min(map(time, blocks)) < BETTER * min(map(time, chosen)):
                chosen = blocks
        limit = min(map(time, chosen)) / BETTER
        return max((choice for choice in chosen if time(choice) <= limit), key=lambda choice: choice.block or 0)

    def _timed_again(self) -> list[Choice]:
        """Time the choices close to the best again, set `seconds` to the median of their timings, and return them.

        On a busy machine one is not enough, and the least time favours a choice that other processes slow down.
        """
        best = min(self.seconds.values(), default=math.inf)
        close = [choice for choice, seconds in self.seconds.items() if seconds <= CLOSE * best]
        times, failed = {choice: [self.seconds[choice]] for choice in close}, set[Choice]()
        for choice in close * AGAIN if len(close) > 1 else ():
            try:
                times[choice].append(self.measure(choice, self.inputs)[0])
            except FAILURES:
                failed.add(choice)
        self.seconds |= {choice: statistics.median(own) for choice, own in times.items()}
        return [choice for choice in close if choice not in failed] or close

    def compiled(self, chosen: Choice, rounds: float) -> Choice:
        """Return the fastest compiled choice, if it saves more than compiling takes; else `chosen`.

        The chosen or fastest blocks are tried, and blocks of one client if an engine without blocks is faster.
        rounds: of trials, as long as the run.
        """
        best = self.seconds.get(chosen, 0.0)
        rest = rounds * best
        if rest < LONG or obstacle(self.device):
            return chosen
        blocks = [
            choice for choice, own in self.seconds.items() if "vmapped" in choice.engine and own < HOPELESS * best
        ]
        tried = sorted(blocks, key=lambda choice: (choice != chosen, self.seconds[choice]))[:1]
        if "vmapped" not in chosen.engine and chosen.block is None:
            alone = "pool+vmapped" if chosen.engine == "pool" else "vmapped"
            tried.append(chosen._replace(engine=alone, block=1))
        for choice in tried:
            began = time.perf_counter()
            try:
                seconds, _ = self.measure(choice._replace(compile=True), self.inputs)
            except (ConfigError, *FAILURES):
                continue
            spent = time.perf_counter() - began
            if rest - rounds * seconds > spent:
                chosen, rest = choice._replace(compile=True), rounds * seconds
        return chosen

    def measure(self, choice: Choice, inputs: RoundInputs, limit: float = math.inf) -> tuple[float, int]:
        """Return the median seconds of a round once it is warm, and the bytes by which a process grew.

        limit: seconds; the first timed round that takes longer is the last.
        """
        engine, times = self.build(choice.engine, choice.block, bool(choice.compile)), list[float]()
        with contextlib.closing(engine), machine.threads(choice.threads):
            before = machine.peak_bytes(self.device)
            for number in range(-WARM, MOST):
                machine.synchronize(self.device)
                began = time.perf_counter()
                # A plain sum is enough: keys and masks take the same time with every engine.
                engine.collect(UploadSum(inputs.info, engine.gathers), inputs, None)
                machine.synchronize(self.device)
                if number >= 0:  # after the first WARM rounds
                    times.append(time.perf_counter() - began)
                    if times[-1] > limit or len(times) >= LEAST and sum(times) >= SECONDS:
                        break
            return statistics.median(times), max(engine.grown, machine.peak_bytes(self.device) - before)
