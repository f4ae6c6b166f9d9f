"""Peak memory and seconds a round of a pretrained BERT, with and without adapters, under `engine=pool`.

    python benchmarks/adapters.py [--weights FOLDER] [--method fedavg] [--rounds 3] [--workers 2] [--json FILE]

The network has the shape of MiniLM, 22 million parameters (6 layers of width 384); --weights names a folder with
weights of a BERT, otherwise they are random. Ten clients a round each make two steps on 16 texts of 32 tokens, which
are random: they change neither memory nor seconds. Each case is a process of its own. Memory is the largest sum, over
its processes, of proportional set sizes, in which pages that several processes share count once: Linux only. The first
round also starts the workers, so it counts for memory, not for the seconds: the median of the others.
"""

import argparse
import json
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import psutil
import torch
from host import store

import cfl
from cfl.core import rng

CASES = {
    "all parameters": (),
    "adapters": ("model.adapter=lora",),
    "adapters, query and value": ("model.adapter=lora", "model.adapter_targets=[query,value]"),
}
MINILM = ("model.name=bert_tiny", "model.layers=6", "model.width=384", "model.heads=12", "model.intermediate=1536")
COHORT, SAMPLES, LENGTH = 10, 32, 32
EVERY = 0.05  # seconds between two looks at the memory


def texts() -> cfl.Stream:
    """One task with two classes: the samples of twice the cohort, of random tokens."""
    draws = rng.generator(0)
    ids = torch.randint(1000, 30000, (2 * COHORT * SAMPLES, LENGTH), generator=draws)
    x, y = torch.stack([ids, torch.ones_like(ids)], dim=1), torch.arange(len(ids)) % 2
    return cfl.from_tensors([(x, y, x[:64], y[:64])], name="random texts")


def train(method: str, rounds: int, workers: int, overrides: Sequence[str], output: Path) -> None:
    """Run one case and leave it in the folder `output`."""
    size = (f"partition.clients={2 * COHORT}", f"cohort={COHORT}", "local.batch_size=16", f"rounds={rounds}")
    options = ["engine=pool", f"workers={workers}", *size, "local.optimizer=adam", "local.lr=3e-5", *overrides]
    cfl.run(cfl.resolve("permuted-digits", method=method, overrides=options), stream=texts(), output=output)


def measure(method: str, rounds: int, workers: int, overrides: Sequence[str]) -> dict[str, Any]:
    """Peak memory in bytes, seconds of a round, and bytes that a client sends in a round."""
    with tempfile.TemporaryDirectory() as folder:
        case = {"method": method, "rounds": rounds, "workers": workers, "overrides": overrides, "output": folder}
        child = subprocess.Popen([sys.executable, __file__, "--case", json.dumps(case)])
        peak = largest(child)
        if child.returncode:
            raise SystemExit(f"the run with {overrides} failed with exit code {child.returncode}")
        rows = [json.loads(line) for line in (Path(folder) / "rounds.jsonl").read_text().splitlines()]
        metrics = json.loads((Path(folder) / "metrics.json").read_text())
    seconds = [row["seconds"] for row in rows if row["phase"] == "train"]
    return {
        "peak_bytes": peak,
        "seconds_round": statistics.median(seconds[1:]),
        "upload_bytes": metrics["bytes_up"] / (COHORT * len(rows)),
        "rounds_seconds": seconds,
    }


def largest(child: subprocess.Popen) -> int:
    """The largest memory of a process and its descendants until it ends, in bytes."""
    peak = 0
    while child.poll() is None:
        peak = max(peak, memory(child.pid))
        time.sleep(EVERY)
    return peak


def memory(pid: int) -> int:
    """Sum of the proportional set sizes of a process and its descendants, in bytes; those that have ended count 0."""
    total = 0
    try:
        root = psutil.Process(pid)
        family = [root, *root.children(recursive=True)]
    except psutil.NoSuchProcess:
        return 0
    for process in family:
        try:
            total += process.memory_full_info().pss
        except (psutil.NoSuchProcess, psutil.AccessDenied):  # it ends at this moment
            continue
    return total


def table(rows: Mapping[str, Mapping[str, Any]]) -> Iterator[str]:
    """Lines of the table."""
    yield f"{'trains':<28}{'peak, GB':>10}{'s a round':>11}{'upload, MB':>12}"
    for name, row in rows.items():
        sizes = f"{row['peak_bytes'] / 1e9:>10.2f}{row['seconds_round']:>11.1f}{row['upload_bytes'] / 1e6:>12.2f}"
        yield f"{name:<28}{sizes}"


def main(arguments: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--weights", metavar="FOLDER", help="weights of a BERT; random ones of MiniLM's shape without")
    parser.add_argument("--method", default="fedavg", help="strategy of the runs")
    parser.add_argument("--rounds", type=int, default=3, help="rounds of a run, at least 2")
    parser.add_argument("--workers", type=int, default=2, help="processes of the pool")
    parser.add_argument("--json", type=Path, help="where to store the figures")
    parser.add_argument("--case", help=argparse.SUPPRESS)  # one run, as `measure` starts it
    options = parser.parse_args(arguments)
    if options.case:
        case = json.loads(options.case)
        train(**{**case, "output": Path(case["output"])})
        return
    network = (f"model.weights={options.weights}",) if options.weights else MINILM
    rows = {
        name: measure(options.method, options.rounds, options.workers, [*network, *own]) for name, own in CASES.items()
    }
    print("\n".join(table(rows)))
    store(options.json, {"method": options.method, "workers": options.workers, "cases": rows}, "torch")


if __name__ == "__main__":
    main()
