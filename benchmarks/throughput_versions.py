"""Time the rounds of `throughput.py` with two checkouts of the package, in turns, and print the ratio of their seconds.

    python benchmarks/throughput_versions.py /path/to/other/checkout

The engines are fixed, with one thread: `auto` could choose differently for the two. A process for each checkout stays
alive and times rounds on request, so that noise of the machine meets both alike; the ratio is the median over pairs.
"""

import argparse
import os
import statistics
import subprocess
import sys
import time
from pathlib import Path

# workload, engine, rounds of a sample, pairs of samples
ROUNDS = (
    ("permuted-digits", "vmapped", 40, 14),
    ("permuted-digits", "loop", 15, 14),
    ("pmnist-round", "vmapped", 1, 12),
    ("cifar100-round", "loop", 1, 5),
    ("resnet-round", "loop", 1, 9),
)


def serve(name: str, engine: str) -> None:
    """Time rounds with the checkout in the working directory: as many as each line of standard input says."""
    sys.path[:0] = [os.getcwd(), str(Path("benchmarks").resolve())]
    import throughput

    load = throughput.configuration.load
    throughput.configuration.load = lambda data: load({**data, "block": 10})  # ignored by `loop`
    ours = throughput.Ours(throughput.WORKLOADS[name], engine, "cpu")
    ours.round()
    print("ready", flush=True)
    for line in sys.stdin:
        start = time.perf_counter()
        for _ in range(int(line)):
            ours.round()
        print((time.perf_counter() - start) / int(line), flush=True)


def seconds(process: subprocess.Popen, rounds: int) -> float:
    """Seconds of a round, the mean over some."""
    assert process.stdin and process.stdout
    process.stdin.write(f"{rounds}\n")
    process.stdin.flush()
    return float(process.stdout.readline())


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("other", type=Path, help="checkout to compare this one with")
    parser.add_argument("--serve", nargs=2, help=argparse.SUPPRESS)
    args = parser.parse_args()
    if args.serve:
        return serve(*args.serve)
    here = Path(__file__).resolve().parents[1]
    env = {**os.environ, "OMP_NUM_THREADS": "1"}
    for name, engine, rounds, pairs in ROUNDS:
        command = [sys.executable, __file__, ".", "--serve", name, engine]
        pipes = dict(stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True, env=env)
        processes = [subprocess.Popen(command, cwd=folder, **pipes) for folder in (args.other, here)]
        for process in processes:
            assert process.stdout and process.stdout.readline().strip() == "ready"
        found: list[list[float]] = [[], []]
        for pair in range(pairs):
            for which in (0, 1) if pair % 2 == 0 else (1, 0):
                found[which].append(seconds(processes[which], rounds))
        for process in processes:
            process.communicate()
        ratio = statistics.median(new / old for old, new in zip(*found, strict=True))
        other, this = (1000 * statistics.median(own) for own in found)
        print(f"{name:16} {engine:8} {other:9.1f} ms  {this:9.1f} ms  this/other {ratio:.3f}", flush=True)


if __name__ == "__main__":
    main()
