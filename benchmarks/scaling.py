"""How the cost of a round grows: with the cohort, with the population, and with the number of tasks under FOT.

    python benchmarks/scaling.py [--engine auto] [--json FILE] [--plot FOLDER]

Every point of the first two curves is a process of its own, so that its peak memory is. A round is all that a run does
from one to the next: cohort, broadcast, local training, sum, the server's step. Inputs are random, but for the third
curve, which runs FOT over permuted digits: seconds of a round's projection on the server, and of the sketches (GPSE)
after each task, clients and server apart.
"""

import argparse
import json
import resource
import statistics
import subprocess
import sys
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from host import store

COHORTS = (8, 16, 32, 64, 128, 256)
POPULATIONS = (100, 1_000, 10_000, 100_000, 1_000_000)
SAMPLED = 64
TASKS = 50


def point(
    engine: str, *, clients: int, cohort: int, samples: int, width: int, hidden: Sequence[int], rounds: int
) -> dict[str, Any]:
    """Seconds of a round of `cohort` out of `clients`, of setting up, and peak memory in bytes.

    samples: of each client, at most 16 a batch; width: entries of a sample; hidden: of the MLP; rounds: timed.
    workers_bytes: peak of the largest worker process; imported_bytes: of this process before any data were made.
    """
    import torch

    from cfl import streams
    from cfl.assembly import methods as members
    from cfl.assembly import resolve as configuration
    from cfl.core import machine, rng
    from cfl.runtime.builder import build_session

    torch.set_num_threads(1)
    imported, began = machine.peak_bytes(), time.perf_counter()
    count, draws = clients * samples, rng.generator(rng.key(0, "scaling"))
    config = configuration.load(
        {
            "benchmark": "scaling",
            "engine": engine,
            "rounds": rounds + 2,  # the first one warms up, the last one evaluates
            "cohort": cohort,
            "partition": {"clients": clients},
            "local": {"batch_size": min(16, samples)},
            "model": {"name": "mlp", "hidden": list(hidden)},
        }
    )
    x, y = torch.randn(count, width, generator=draws), torch.arange(count) % 10
    stream = streams.from_tensors([(x, y, x[:10], y[:10])], name="scaling")
    machine.keep_memory()  # as cfl-run does
    session = build_session(config, stream, members.build(config))
    setup = time.perf_counter() - began
    seconds = []
    with machine.threads(session.config.threads):
        for position in range(rounds + 1):
            began = time.perf_counter()
            session.round(position)
            seconds.append(time.perf_counter() - began)
    session.close()
    return {
        "clients": clients,
        "cohort": cohort,
        **session.config.model_dump(include={"engine", "block", "workers"}),
        "seconds": seconds[1:],
        "setup_seconds": setup,
        "first_round_seconds": seconds[0],
        "peak_bytes": machine.peak_bytes(),
        "workers_bytes": workers_bytes(),
        "imported_bytes": imported,
    }


def workers_bytes() -> int:
    """Most memory held at a time by the largest of this process's children that have ended."""
    return resource.getrusage(resource.RUSAGE_CHILDREN).ru_maxrss * (1 if sys.platform == "darwin" else 1024)


def apart(engine: str, **sizes: Any) -> dict[str, Any]:
    """`point` in a process of its own."""
    command = [sys.executable, __file__, "--point", json.dumps({"engine": engine, **sizes})]
    done = subprocess.run(command, capture_output=True, text=True)
    if done.returncode:
        raise RuntimeError(f"{sizes} failed:\n{done.stderr[-2000:]}")
    return json.loads(done.stdout.splitlines()[-1])


def tasks(engine: str, count: int, rounds: int) -> list[dict[str, Any]]:
    """FOT over `count` permuted digits tasks: a row a task.

    server_seconds: of a round of training, the mean over the task; gpse_client_seconds, gpse_server_seconds: of the
    sketches after it, None after the last task; rank: directions protected in all layers as the task ends.
    """
    import torch

    import cfl
    from cfl import streams
    from cfl.assembly import methods as members
    from cfl.core import machine
    from cfl.runtime.builder import build_session

    torch.set_num_threads(1)
    quiet = ["strategy.measure_coverage=false"]  # a measurement of the simulator, no part of FOT
    overrides = [f"tasks={count}", f"rounds={rounds}", *quiet]
    config = cfl.resolve("permuted-digits", method="fot", engine=engine, overrides=overrides)
    stream = streams.build("permuted-digits", tasks=count)
    machine.keep_memory()  # as cfl-run does
    session = build_session(config, stream, members.build(config))
    rows = []
    with machine.threads(session.config.threads):
        for task in range(count):
            before = {kind: dict(spent) for kind, spent in session.state.seconds.items()}
            for position, (own, _, _) in enumerate(session.schedule):
                if own == task:
                    session.round(position)

            def spent(kind: str, phase: str, before: dict = before) -> float:
                return session.state.seconds[kind].get(phase, 0.0) - before[kind].get(phase, 0.0)

            last = task + 1 == count
            rows.append(
                {
                    "task": task,
                    "server_seconds": spent("server", "train") / rounds,
                    "gpse_client_seconds": None if last else spent("clients", "gpse"),
                    "gpse_server_seconds": None if last else spent("server", "gpse"),
                    "rank": sum(basis.shape[1] for basis in session.state.server.get("basis", {}).values()),
                }
            )
    session.close()
    return rows


def curves(engine: str, cohorts: Sequence[int], populations: Sequence[int], count: int, rounds: int) -> dict[str, Any]:
    """All three; the points of a curve are told as they come."""
    found: dict[str, Any] = {"cohort": [], "population": []}
    for cohort in cohorts:
        sizes = dict(clients=cohort, cohort=cohort, samples=70, width=64, hidden=[128, 128])
        found["cohort"].append(told(apart(engine, **sizes, rounds=rounds)))
    for clients in populations:
        sizes = dict(clients=clients, cohort=min(SAMPLED, clients), samples=4, width=8, hidden=[16])
        found["population"].append(told(apart(engine, **sizes, rounds=rounds)))
    found["tasks"] = tasks(engine, count, rounds)
    for row in found["tasks"][:: max(1, count // 10)]:
        print("  ".join(f"{name} {value:.4g}" for name, value in row.items() if value is not None), flush=True)
    return found


def told(row: dict[str, Any]) -> dict[str, Any]:
    print(
        f"{row['cohort']} of {row['clients']} clients: {statistics.median(row['seconds']):.4f} s a round, set-up "
        f"{row['setup_seconds']:.1f} s, {row['peak_bytes'] / 2**20:.0f} MiB ({row['imported_bytes'] / 2**20:.0f} "
        f"before any data), the largest worker {row['workers_bytes'] / 2**20:.0f} MiB",
        flush=True,
    )
    return row


def draw(found: dict[str, Any], folder: Path) -> None:
    """cohort.png, population.png and tasks.png."""
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot as plt

    folder.mkdir(parents=True, exist_ok=True)
    for name, across, label in (
        ("cohort", "cohort", "clients a round"),
        ("population", "clients", f"clients in all, {SAMPLED} a round"),
    ):
        rows = found[name]
        x = [row[across] for row in rows]
        figure, (left, right) = plt.subplots(1, 2, figsize=(10, 4), layout="constrained")
        left.plot(x, [statistics.median(row["seconds"]) for row in rows], marker="o", label="a round")
        right.plot(x, [row["peak_bytes"] / 2**20 for row in rows], marker="o", label="peak of the main process")
        if any(row["workers_bytes"] for row in rows):
            right.plot(x, [row["workers_bytes"] / 2**20 for row in rows], marker="s", label="peak of a worker")
        right.plot(x, [row["imported_bytes"] / 2**20 for row in rows], ls="--", color="grey", label="before any data")
        if name == "population":
            left.plot(x, [row["setup_seconds"] for row in rows], marker="s", ls="--", label="set-up, once")
        left.set(xscale="log", yscale="log", xlabel=label, ylabel="seconds")
        right.set(xscale="log", ylim=(0, None), xlabel=label, ylabel="MiB")
        for axes in (left, right):
            axes.grid(alpha=0.3)
            axes.legend(frameon=False)
        figure.savefig(folder / f"{name}.png", dpi=150)
        plt.close(figure)
    figure, (left, right) = plt.subplots(1, 2, figsize=(10, 4), layout="constrained")
    rows = found["tasks"]
    left.plot([row["task"] for row in rows], [1000 * row["server_seconds"] for row in rows], marker=".")
    left.set(ylim=(0, None), xlabel="task", ylabel="ms", title="FOT: the server's part of a round")
    sketched = [row for row in rows if row["gpse_client_seconds"] is not None]
    for who in ("client", "server"):
        seconds = [row[f"gpse_{who}_seconds"] for row in sketched]
        right.plot([row["task"] for row in sketched], seconds, marker=".", label="clients" if who == "client" else who)
    right.set(ylim=(0, None), xlabel="after task", ylabel="seconds", title="GPSE")
    right.legend(frameon=False)
    for axes in (left, right):
        axes.grid(alpha=0.3)
    figure.savefig(folder / "tasks.png", dpi=150)
    plt.close(figure)


def main(arguments: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--engine", default="auto", help="engine, as in the configuration")
    parser.add_argument("--cohorts", type=int, nargs="+", default=COHORTS)
    parser.add_argument("--populations", type=int, nargs="+", default=POPULATIONS)
    parser.add_argument("--tasks", type=int, default=TASKS, help="tasks under FOT")
    parser.add_argument("--rounds", type=int, default=5, help="timed rounds of a point, and rounds of a task")
    parser.add_argument("--json", type=Path, help="where to store the figures")
    parser.add_argument("--plot", type=Path, help="folder for the pictures")
    parser.add_argument("--point", help=argparse.SUPPRESS)
    options = parser.parse_args(arguments)
    if options.point:
        print(json.dumps(point(**json.loads(options.point))))
        return
    found = curves(options.engine, options.cohorts, options.populations, options.tasks, options.rounds)
    store(options.json, found, "torch")
    if options.plot:
        draw(found, options.plot)


if __name__ == "__main__":
    main()
