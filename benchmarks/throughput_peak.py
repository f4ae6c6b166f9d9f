"""The best rate of float32 square matrix products of this machine: one process with all threads, and one a core.

As a script, one of those processes: `throughput_peak.py DEVICE` multiplies as a line "SIZE SECONDS THREADS" asks.
"""

import os
import statistics
import sys
import time
from typing import Any

import torch
from throughput_peer import Line, Peer

SIZES = (512, 1024, 2048)


def peak(device: str = "cpu", sizes: tuple[int, ...] = SIZES, bursts: int = 5, seconds: float = 0.3) -> dict[str, Any]:
    """gflops: the largest median of `bursts` bursts over sizes and ways; "rates" has all, in flop/s.

    Ways: (processes, threads of each); on a GPU there is only one process.
    """
    cores = os.cpu_count() or 1
    ways = ((1, cores), (cores, 1)) if device == "cpu" and cores > 1 else ((1, 1),)
    rates: list[dict[str, Any]] = []
    workers = [Peer(sys.executable, "throughput_peak.py", [device]) for _ in range(max(ways)[0])]
    for processes, threads in ways:
        for size in sizes if device == "cpu" else (*sizes, 4096, 8192):
            found = []
            for _ in range(bursts):
                for worker in workers[:processes]:
                    worker.tell(f"{size} {seconds} {threads}")
                found.append(sum(worker.hear()["rate"] for worker in workers[:processes]))
            rates.append({"processes": processes, "threads": threads, "size": size, "rates": found})
    for worker in workers:
        worker.close()
    best = max(rates, key=lambda row: statistics.median(row["rates"]))
    return {
        "gflops": statistics.median(best["rates"]) / 1e9,
        **{name: best[name] for name in ("processes", "threads", "size")},
        "samples": rates,
    }


def rate(size: int, seconds: float, device: str) -> float:
    """Operations a second of products of two size x size matrices, for about that many seconds."""
    a, b = (torch.randn(size, size, device=device) for _ in range(2))
    out = a @ b
    if device != "cpu":
        torch.cuda.synchronize(device)
    at_a_time = max(1, (10**7 if device == "cpu" else 10**11) // size**3)  # waiting for a GPU must not count
    began, count = time.perf_counter(), 0
    while (spent := time.perf_counter() - began) < seconds or not count:
        for _ in range(at_a_time):
            torch.mm(a, b, out=out)
            count += 1
        if device != "cpu":
            torch.cuda.synchronize(device)
    return 2 * size**3 * count / spent


def main() -> None:
    line, device = Line(), sys.argv[1]
    line.say(ready=True)
    for ask in line.asks():
        size, seconds, threads = ask.split()
        torch.set_num_threads(int(threads))
        line.say(rate=rate(int(size), float(seconds), device))


if __name__ == "__main__":
    main()
