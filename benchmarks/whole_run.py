"""Where the seconds of a whole run go: local training, and everything beside it.

    python benchmarks/whole_run.py [--benchmark NAME ...] [--engine auto] [--set KEY=VALUE ...] [--json FILE]

Each run is a `cfl-run train BENCHMARK --method fot --scale small` in a process of its own, with real images (CFL_DATA).
`timing.json` splits its seconds. With strategy.model=local GPSE is part of the last training round; its seconds beyond
those of the mean training round count as GPSE. "start" is what timing.json does not contain: Python, imports, data,
and the trials of engine=auto.
"""

import argparse
import json
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from host import store

BENCHMARKS = ("permuted-mnist", "split-cifar100")
CODE = "from cfl.cli import main; main()"


def measure(benchmark: str, engine: str, overrides: Sequence[str]) -> dict[str, Any]:
    """Seconds of a run by part."""
    options = ["--method", "fot", "--scale", "small", "--engine", engine, "--quiet"]
    sets = [word for override in overrides for word in ("--set", override)]
    with tempfile.TemporaryDirectory() as folder:
        began = time.perf_counter()
        command = [sys.executable, "-c", CODE, "train", benchmark, *options, *sets, "--output", folder]
        subprocess.run(command, check=True, stdout=subprocess.DEVNULL)
        wall = time.perf_counter() - began
        timing = json.loads((Path(folder) / "timing.json").read_text())
        rows = [json.loads(line) for line in (Path(folder) / "rounds.jsonl").read_text().splitlines()]
    return {"benchmark": benchmark, "engine": engine, "wall": wall, **split(timing, rows, wall)}


def split(timing: Mapping[str, Mapping[str, float]], rows: Sequence[Mapping[str, Any]], wall: float) -> dict[str, Any]:
    """Seconds by part, and the share of all that is not local training in the seconds that timing.json has.

    timing: of a run's timing.json; rows: of its rounds.jsonl; wall: seconds of the process.
    """
    clients, rounds = timing["clients"], [row["phase"] for row in rows]
    mean = clients["train"] / rounds.count("train")
    both = rounds.count("train+gpse")
    parts = {
        "training": clients["train"] + both * mean,
        "GPSE": clients.get("gpse", 0.0) + clients.get("train+gpse", 0.0) - both * mean,
        "server": sum(timing["server"].values()),
        **timing["measurement"],
    }
    total = sum(parts.values())
    return {"seconds": parts, "start": wall - total, "beside_training": 1 - parts["training"] / total}


def table(rows: Sequence[Mapping[str, Any]]) -> Iterator[str]:
    """Lines of the table."""
    parts = list(dict.fromkeys(part for row in rows for part in row["seconds"]))
    yield "".join([f"{'benchmark':<16}", *(f"{title:>12}" for title in ("wall, s", "start", *parts, "beside"))])
    for row in rows:
        cells = [row["wall"], row["start"], *(row["seconds"].get(part, 0.0) for part in parts)]
        yield "".join([f"{row['benchmark']:<16}", *(f"{cell:>12.1f}" for cell in cells)]) + (
            f"{row['beside_training']:>12.1%}"
        )


def main(arguments: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--benchmark", nargs="+", choices=BENCHMARKS, default=list(BENCHMARKS), metavar="NAME")
    parser.add_argument("--engine", default="auto", help="engine, as in the configuration")
    parser.add_argument("--set", action="append", default=[], metavar="KEY=VALUE", help="set an option; repeatable")
    parser.add_argument("--json", type=Path, help="where to store the figures")
    options = parser.parse_args(arguments)
    rows = [measure(benchmark, options.engine, options.set) for benchmark in options.benchmark]
    print("\n".join(table(rows)))
    store(options.json, {"runs": rows}, "torch")


if __name__ == "__main__":
    main()
