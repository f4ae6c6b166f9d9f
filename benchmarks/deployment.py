"""Time a round on three nodes of this machine: `cfl-run serve` and three times `cfl-run join`, on loopback.

    python benchmarks/deployment.py [--json FILE]

FOT on permuted-digits, with and without secure aggregation. A round takes one message to each node, and four under
secure aggregation. Beside the seconds of a round stand those of the same round in one process (`engine=loop`), and
those that the slowest node spends with its answers. The rest is Flower's: its polling, and a process for each message.
"""

import argparse
import json
import re
import socket
import statistics
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any

from host import store

COMMAND = Path(sys.executable).with_name("cfl-run")
RUN = ("permuted-digits", "--method", "fot", "--quiet", "--no-plot")
OPTIONS = ("tasks=2", "rounds=3", "partition.clients=6", "cohort=6", "strategy.measure_coverage=false")
NODES = {"a": "0-1", "b": "2-3", "c": "4-5"}
ANSWER = re.compile(r"answered (\w+) in ([\d.]+) s")


def measure(secagg: str, folder: Path) -> dict[str, Any]:
    """A row of the table: medians over the training rounds."""
    options = [part for option in (*OPTIONS, f"secagg={secagg}") for part in ("--set", option)]
    train = [COMMAND, "train", *RUN, *options, "--output", folder / "alone"]
    subprocess.run(train, check=True, stdout=subprocess.DEVNULL)
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        address = f"127.0.0.1:{probe.getsockname()[1]}"
    serve = [COMMAND, "serve", folder / "alone" / "config.yaml", "--output", folder / "nodes", "--address", address]
    logs = {name: folder / f"{name}.log" for name in NODES}
    with (folder / "server.log").open("w") as log:
        server = subprocess.Popen(serve, stdout=log, stderr=log)
    joined = []
    try:
        for name, clients in NODES.items():
            join = [COMMAND, "join", address, "--clients", clients, "--folder", folder / name]
            with logs[name].open("w") as log:
                joined.append(subprocess.Popen(join, stdout=log, stderr=log))
        if server.wait(600):
            raise RuntimeError((folder / "server.log").read_text())
    finally:
        for process in (*joined, server):
            process.terminate()
            process.wait()
    alone, nodes = (training_rounds(folder / name) for name in ("alone", "nodes"))
    answers = [ANSWER.findall(log.read_text()) for log in logs.values()]
    spent = max(sum(float(seconds) for action, seconds in node if action != "join") for node in answers)
    rounds = len((folder / "nodes" / "rounds.jsonl").read_text().splitlines())
    return {
        "secagg": secagg,
        "messages": 4 if secagg == "full" else 1,
        "seconds": statistics.median(nodes),
        "seconds_alone": statistics.median(alone),
        "seconds_of_answers": spent / rounds,
        "all_seconds": nodes,
    }


def training_rounds(folder: Path) -> list[float]:
    """Seconds of the training rounds of a run, but for the first one, in which processes warm up."""
    rows = [json.loads(line) for line in (folder / "rounds.jsonl").read_text().splitlines()]
    return [row["seconds"] for row in rows if row["phase"] == "train"][1:]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--json", type=Path, help="where to store the figures")
    options = parser.parse_args()
    rows = []
    print(f"{'secagg':<8}{'messages':>10}{'s/round':>10}{'alone':>10}{'answers':>10}{'Flower':>10}")
    for secagg in ("none", "full"):
        with tempfile.TemporaryDirectory() as folder:
            row = measure(secagg, Path(folder))
        rows.append(row)
        flower = 1 - row["seconds_of_answers"] / row["seconds"]
        cells = "".join(f"{row[name]:>10.2f}" for name in ("seconds", "seconds_alone", "seconds_of_answers"))
        print(f"{secagg:<8}{row['messages']:>10}{cells}{flower:>10.0%}", flush=True)
    store(options.json, {"rows": rows}, "torch", "flwr")


if __name__ == "__main__":
    main()
