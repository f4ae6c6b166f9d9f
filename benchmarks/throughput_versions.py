"""Time the rounds of `throughput.py` with two checkouts of the package, in turns, and print the ratio of their seconds.

    python benchmarks/throughput_versions.py /path/to/other/checkout

The engines are fixed, with one thread: `auto` could choose differently for the two. A process for each checkout stays
alive and times rounds on request, so that noise of the machine meets both alike; the ratio is the median over pairs.
"""

import argparse
import statistics
import sys
from pathlib import Path

from throughput_peer import Line, Peer

BLOCK = 10  # clients; without effect on `loop`
# workload, engine, rounds of a sample, pairs of samples
ROUNDS = (
    ("permuted-digits", "vmapped", 40, 14),
    ("permuted-digits", "loop", 15, 14),
    ("pmnist-round", "vmapped", 1, 12),
    ("cifar100-round", "loop", 1, 5),
    ("resnet-round", "loop", 1, 9),
)


def serve(checkout: Path, name: str, engine: str) -> None:
    """Time rounds with a checkout: as many as each line asks for."""
    sys.path[:0] = [str(checkout), str(checkout / "benchmarks")]
    import throughput

    line, work = Line(), throughput.WORKLOADS[name]
    with throughput.known(work):
        run = throughput.timed(throughput.Ours(work, engine, "cpu", BLOCK).round, "cpu")
        run(1)
        line.say(ready=True)
        for ask in line.asks():
            line.say(seconds=run(int(ask)))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("other", type=Path, help="checkout to compare this one with")
    parser.add_argument("--serve", nargs=2, help=argparse.SUPPRESS)
    args = parser.parse_args()
    if args.serve:
        return serve(args.other, *args.serve)
    checkouts = args.other.resolve(), Path(__file__).resolve().parents[1]
    for name, engine, rounds, pairs in ROUNDS:
        peers = [
            Peer(sys.executable, "throughput_versions.py", [str(checkout), "--serve", name, engine])
            for checkout in checkouts
        ]
        found: list[list[float]] = [[], []]
        for pair in range(pairs):
            for which in (0, 1) if pair % 2 == 0 else (1, 0):
                found[which].append(peers[which].ask(str(rounds))["seconds"])
        for peer in peers:
            peer.close()
        ratio = statistics.median(new / old for old, new in zip(*found, strict=True))
        other, this = (1000 * statistics.median(own) for own in found)
        print(f"{name:16} {engine:8} {other:9.1f} ms  {this:9.1f} ms  this/other {ratio:.3f}", flush=True)


if __name__ == "__main__":
    main()
