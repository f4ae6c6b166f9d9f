"""How often `engine=auto` chooses well, beside a process that keeps one core busy half of the time.

    python benchmarks/auto_choice.py [--workload NAME ...] [--tries 10] [--runs 7] [--json FILE]

A try chooses anew. Then rounds of all that was chosen, and of each fixed engine with blocks of 2, 4, 8 and, if these
are at most 16, all clients, take turns, still beside that process. A try is good if the median round of its choice
takes at most 5 percent longer than the fastest.
"""

import argparse
import contextlib
import itertools
import os
import statistics
import subprocess
import sys
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

from host import store
from throughput import Ours, known, timed
from throughput_work import WORKLOADS, Workload

BUSY = """
import os, sys, time
while os.getppid() == int(sys.argv[1]):
    end = time.perf_counter() + 0.01
    while time.perf_counter() < end: pass
    time.sleep(0.01)
"""
GOOD = 1.05


@contextlib.contextmanager
def busy() -> Iterator[subprocess.Popen]:
    """A process that computes for 10 milliseconds and sleeps for 10, by turns, until its parent ends."""
    process = subprocess.Popen([sys.executable, "-c", BUSY, str(os.getpid())])
    try:
        yield process
    finally:
        process.kill()
        process.wait()


def engines(clients: int) -> list[tuple[str, int | None]]:
    """The fixed engines, each with its block, that a choice is compared with."""
    blocks = sorted({2, 4, 8} | ({clients} if clients <= 16 else set()))
    return [("loop", None), ("pool", None), *itertools.product(("vmapped", "pool+vmapped"), blocks)]


def measure(work: Workload, tries: int, runs: int) -> dict[str, Any]:
    """The choices, the median seconds of a round by each choice and fixed engine, and how many tries are good."""
    with known(work), busy(), contextlib.ExitStack() as stack:

        def ours(engine: str, block: int | None) -> Ours:
            made = Ours(work, engine, "cpu", block)
            stack.callback(made.session.close)
            made.round()
            return made

        chosen = [ours("auto", None) for _ in range(tries)]
        labels = [label(one) for one in chosen]
        fixed = {label(one): one for one in (ours(*each) for each in engines(work.clients))}
        rivals = dict(zip(labels, chosen)) | fixed
        seconds: dict[str, list[float]] = {name: [] for name in rivals}
        for _ in range(runs):
            for name, one in rivals.items():
                seconds[name].append(timed(one.round, "cpu")(1 if work.name != "permuted-digits" else 20))
    median = {name: statistics.median(each) for name, each in seconds.items()}
    ratios = [median[name] / min(median.values()) for name in labels]
    return {
        "workload": work.name,
        "choices": labels,
        "best": min(median, key=lambda name: median[name]),
        "ratios": ratios,
        "good": sum(ratio <= GOOD for ratio in ratios),
        "seconds": seconds,
    }


def label(one: Ours) -> str:
    """The choice in a few words, such as "pool+vmapped, block 4, threads 1"."""
    choice = one.choice
    block = f", block {choice['block']}" if choice["block"] else ""
    return f"{choice['engine']}{block}, threads {choice['threads']}"


def main(arguments: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--workload", nargs="+", choices=WORKLOADS, default=list(WORKLOADS), metavar="NAME")
    parser.add_argument("--tries", type=int, default=10, help="choices of each round")
    parser.add_argument("--runs", type=int, default=7, help="alternating runs of each choice")
    parser.add_argument("--json", type=Path, help="where to store the figures")
    options = parser.parse_args(arguments)
    rows = []
    for name in options.workload:
        rows.append(row := measure(WORKLOADS[name], options.tries, options.runs))
        worst = max(row["ratios"])
        print(f"{name:<16} {row['good']} of {options.tries} good, worst {worst:.2f}; best: {row['best']}", flush=True)
        store(options.json, {"workloads": rows}, "torch")


if __name__ == "__main__":
    main()
