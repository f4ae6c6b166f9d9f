"""Time the checkpoints of a run with many clients: those of what changed, against those of everything.

    python benchmarks/checkpoints.py [--clients 5000] [--cohorts 10 50] [--methods ewc ewc+scaffold] [--json FILE]

EWC keeps two trees on each client from the end of the first task on; with SCAFFOLD, those of the cohort change in every
round. The second task is timed: rounds without checkpoints ("none"), with one a round ("changed"), and with one a round
that writes all clients' states, as if it were the first ("all"). The seconds of a round are those of some rounds until
the last checkpoint is on disk, divided by their number; `checkpoint_seconds` are spent in the thread that writes.
Inputs are random.
"""

import argparse
import statistics
import tempfile
import time
from collections import defaultdict
from collections.abc import Sequence
from pathlib import Path
from typing import Any, Self
from unittest import mock

import torch
from host import store

from cfl import streams
from cfl.assembly import methods
from cfl.assembly import resolve as configuration
from cfl.core import files, machine, rng, tree
from cfl.runtime import checkpoint
from cfl.runtime.builder import build_session
from cfl.runtime.packs import Packs
from cfl.runtime.run_folder import RunFolder
from cfl.runtime.session import Session
from cfl.streams import Stream

PIXELS, CLASSES, SAMPLES = 64, 10, 32  # numbers of a digit; samples of a client
COLUMNS = ("round_seconds", "share", "checkpoint_seconds", "checkpoint_bytes", "folder_bytes")


class Forgetful(checkpoint.Writer):
    """Writes all states every time, because it forgets what it has written."""

    def save(self, *given: Any) -> None:
        self.packs = Packs()
        super().save(*given)


WRITERS = {"none": None, "changed": checkpoint.Writer, "all": Forgetful}


class Watch:
    """Seconds and bytes of all checkpoints written inside the block."""

    def __init__(self) -> None:
        self.seconds, self.bytes = 0.0, 0

    def __enter__(self) -> Self:
        save, replace = checkpoint.save, files.replace

        def timed(*given: Any) -> Path:
            began = time.perf_counter()
            path = save(*given)
            self.seconds += time.perf_counter() - began
            return path

        def counted(path: Path, content: bytes | bytearray, temporary: Path) -> None:
            self.bytes += len(content)
            replace(path, content, temporary)

        self._patches = mock.patch.object(checkpoint, "save", timed), mock.patch.object(files, "replace", counted)
        for patch in self._patches:
            patch.start()
        return self

    def __exit__(self, *_: object) -> None:
        for patch in self._patches:
            patch.stop()


def measure(method: str, cohort: int, options: argparse.Namespace) -> dict[str, Any]:
    """Seconds and bytes of rounds in each mode, and what a round with a checkpoint takes longer than one without."""
    rounds = {mode: options.rounds if kind in (None, checkpoint.Writer) else 1 for mode, kind in WRITERS.items()}
    config = configuration.load(
        {
            "benchmark": "checkpoints",
            "method": method,
            "engine": options.engine,
            "rounds": sum(count + 1 for count in rounds.values()) * options.repeats + 1,  # the last one evaluates
            "cohort": cohort,
            "checkpoint_every": 10**9,  # this script asks for them
            "partition": {"clients": options.clients},
            "local": {"batch_size": 16, "lr": 0.01},
            "model": {"name": "mlp", "hidden": options.hidden},
        }
    )
    found: dict[str, dict[str, list[float]]] = {mode: defaultdict(list) for mode in WRITERS}
    with tempfile.TemporaryDirectory() as path, machine.threads(1), Watch() as watch:
        folders = {mode: RunFolder(Path(path, mode)) for mode in WRITERS}
        session = build_session(config, data(options.clients), methods.build(config), folder=folders["none"])
        torch.set_num_threads(session.config.threads)
        tasks = [task for task, *_ in session.schedule]
        positions = iter(range(tasks.index(1), len(tasks)))
        session.recorder.writer = checkpoint.Writer(None, print)
        session.round(0)
        session.round(tasks.index(1) - 1)  # where EWC looks at all clients
        writers = {mode: kind(folders[mode].checkpoints, print) for mode, kind in WRITERS.items() if kind}
        for _ in range(options.repeats):
            for mode in WRITERS:
                some_rounds(session, writers.get(mode), positions, 1)  # writes what changed in the other modes
                seconds, size, began = watch.seconds, watch.bytes, time.perf_counter()
                some_rounds(session, writers.get(mode), positions, rounds[mode])
                row = found[mode]
                row["round_seconds"].append((time.perf_counter() - began) / rounds[mode])
                row["checkpoint_seconds"].append((watch.seconds - seconds) / rounds[mode])
                row["checkpoint_bytes"].append((watch.bytes - size) / rounds[mode])
                row["folder_bytes"].append(sum(file.stat().st_size for file in folders[mode].checkpoints.iterdir()))
        session.close()
    modes = {mode: {name: statistics.median(every) for name, every in row.items()} for mode, row in found.items()}
    for row in modes.values():
        row["share"] = 1 - modes["none"]["round_seconds"] / row["round_seconds"]
    return {
        "method": method,
        "clients": options.clients,
        "cohort": cohort,
        **session.config.model_dump(include={"engine", "block"}),
        "state_bytes": sum(map(tree.nbytes, session.state.clients.values())),
        "modes": modes,
        "every": found,
    }


def data(clients: int) -> Stream:
    """Two tasks of random inputs."""
    draws, count = rng.generator(rng.key(0, "checkpoints")), clients * SAMPLES
    x, y = torch.randn(count, PIXELS, generator=draws), torch.arange(count) % CLASSES
    return streams.from_tensors([(x, y, x[:CLASSES], y[:CLASSES])] * 2, name="checkpoints")


def some_rounds(session: Session, writer: checkpoint.Writer | None, positions: Any, count: int) -> None:
    """Run the next rounds, each with a checkpoint by the writer if there is one, until the last is on disk."""
    for _ in range(count):
        session.round(next(positions))
        if writer:
            session.recorder.writer = writer
            session.recorder.save()
    if writer:
        writer.wait()


def main(arguments: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--clients", type=int, default=5000)
    parser.add_argument("--cohorts", type=int, nargs="+", default=[10, 50])
    parser.add_argument("--methods", nargs="+", default=["ewc", "ewc+scaffold"])
    parser.add_argument("--hidden", type=int, nargs="+", default=[128, 128], help="hidden layers of the MLP")
    parser.add_argument("--engine", default="auto", help="engine, as in the configuration")
    parser.add_argument("--rounds", type=int, default=10, help="rounds timed at once; one with all states")
    parser.add_argument("--repeats", type=int, default=3, help="medians of so many times")
    parser.add_argument("--json", type=Path, help="where to store the figures")
    options = parser.parse_args(arguments)
    rows = []
    print("method        cohort  mode    " + "  ".join(f"{name:>18}" for name in COLUMNS))
    for method in options.methods:
        for cohort in options.cohorts:
            rows.append(measure(method, cohort, options))
            for mode, row in rows[-1]["modes"].items():
                cells = "  ".join(f"{row[name]:18,.{0 if name.endswith('bytes') else 4}f}" for name in COLUMNS)
                print(f"{method:12}  {cohort:6}  {mode:7} {cells}", flush=True)
    store(options.json, {"rows": rows}, "torch")


if __name__ == "__main__":
    main()
