"""Time a secure sum: seconds and bytes of a client and of the server; the sparse graph against the complete one.

    python benchmarks/secagg.py [--clients 8 64 256] [--parameters 100000 1000000 10000000] [--json FILE]
    python benchmarks/secagg.py --consistency --clients 8 64 --parameters 100000

Every client uploads the same random vector of 8-byte integers and nobody drops out. Seconds of a client are those of
all its stages. Where masking alone would take more than two minutes, only the first clients mask and are timed, and
the seconds of all are scaled from theirs (column "clients_timed"). Bytes are over those of the plain vector.
--consistency times rounds with the consistency check, which has the complete graph, beside that graph without it.
"""

import argparse
import math
import time
from collections import defaultdict
from collections.abc import Callable, Sequence
from functools import wraps
from pathlib import Path
from typing import Any

import numpy as np
import torch
from host import store

from cfl.aggregation import mask_graph, parties, secagg
from cfl.aggregation.secagg_client import Client

COMPARED, COMPARED_PARAMETERS = (8, 16, 32, 64, 128, 256), 100_000
REPEATS = {clients: 3 if clients <= 64 else 1 for clients in COMPARED}
SPARSE = 64  # clients from which on the sparse graph is not the complete one
MOST_SECONDS, TIMED = 120.0, 8
COLUMNS = {  # name -> its format
    "clients": "d",
    "parameters": "d",
    "neighbours": "d",
    "client_seconds": ".4f",
    "client_masking_seconds": ".4f",
    "server_seconds": ".3f",
    "total_seconds": ".2f",
    "up_over_plain": ".4f",
    "down_over_plain": ".4f",
    "clients_timed": "d",
}


class TimedClient(Client):
    """A client that notes the seconds of each stage for all clients of the round."""

    seconds: dict[str, list[float]]
    expected: int

    def mask(self, vector: np.ndarray, told: bytes = b"") -> np.ndarray:
        done = self.seconds["mask"]
        if len(done) >= TIMED and sum(done) / len(done) * self.expected > MOST_SECONDS:
            return vector  # to the server one upload is as good as another
        return timed(Client.mask)(self, vector, told)


def timed(method: Callable) -> Callable:
    @wraps(method)
    def measured(self: TimedClient, *arguments: Any) -> Any:
        began = time.perf_counter()
        answer = method(self, *arguments)
        self.seconds[method.__name__].append(time.perf_counter() - began)
        return answer

    return measured


for stage in ("__init__", "share", "receive", "confirm", "reveal"):  # `advertise` is a copy of the keys
    setattr(TimedClient, stage, timed(getattr(Client, stage)))


def measure(clients: int, parameters: int, neighbours: int | None, consistency: bool = False) -> dict[str, float]:
    """A row of the table; neighbours: None for the sparse graph."""
    TimedClient.seconds, TimedClient.expected = defaultdict(list), clients
    vector = np.random.default_rng(0).integers(0, 2**64, parameters, dtype=np.uint64)
    mask_graph.degree(clients, clients, threshold=0.5, dropped=0.1)  # kept for all rounds of a run
    began = time.perf_counter()
    secure = secagg.SecureSum(
        range(clients),
        population=clients,
        bits=64,
        threshold=0.5,
        neighbours=neighbours,
        dropped={},
        drop_rate=0.1,
        key=0,
        masked=True,
        consistency=consistency,
    )
    secure.setup()
    for client in secure.uploading:
        secure.add(client, vector)
    total = secure.close()
    wall = time.perf_counter() - began
    sums = {stage: sum(seconds) for stage, seconds in TimedClient.seconds.items()}
    masks = TimedClient.seconds["mask"]
    if len(masks) == clients and not np.array_equal(total, vector * np.uint64(clients)):
        raise RuntimeError("the masks do not cancel")
    server = wall - sum(sums.values())
    masking = sums.pop("mask") / len(masks)
    client = sum(sums.values()) / clients + masking
    return {
        "clients": clients,
        "parameters": parameters,
        "neighbours": len(secure.graph[0]),
        "client_seconds": client,
        "client_masking_seconds": masking,
        "server_seconds": server,
        "total_seconds": client * clients + server,
        "up_over_plain": secure.bytes_up / clients / vector.nbytes,
        "down_over_plain": secure.bytes_down / clients / vector.nbytes,
        "clients_timed": len(masks),
    }


def exponent(rows: Sequence[dict[str, float]], column: str) -> float:
    """The slope b of column ~ clients^b."""
    logs = [(math.log(row["clients"]), math.log(row[column])) for row in rows]
    return float(np.polyfit(*zip(*logs), 1)[0])


def show(rows: Sequence[dict[str, float]], columns: dict[str, str]) -> None:
    print("  ".join(columns))
    for row in rows:
        print("  ".join(f"{row[name]:>{len(name)}{form}}" for name, form in columns.items()), flush=True)


def compare() -> dict[str, Any]:
    """The sparse graph beside the complete one of Bonawitz et al., and how the cost of each grows with the clients."""
    sparse, complete = [], []
    for clients in COMPARED:  # in turns; a few clients take so little time that the fastest of three counts
        turns = [
            [measure(clients, COMPARED_PARAMETERS, k) for k in (None, clients - 1)] for _ in range(REPEATS[clients])
        ]
        for rows, of_kind in zip((sparse, complete), zip(*turns)):
            rows.append(min(of_kind, key=lambda row: row["total_seconds"]))
    costs = ("client_seconds", "client_masking_seconds", "server_seconds", "neighbours")
    ratios = [
        {"clients": a["clients"], **{f"{cost}_ratio": b[cost] / a[cost] for cost in costs}}
        for a, b in zip(sparse, complete, strict=True)
    ]
    exponents = {
        name: {cost: exponent([row for row in rows if row["clients"] >= SPARSE], cost) for cost in costs}
        for name, rows in (("sparse", sparse), ("complete", complete))
    }
    print(f"\nThe complete graph, {COMPARED_PARAMETERS} parameters")
    show(complete, COLUMNS)
    print("\nComplete over sparse")
    show(ratios, {"clients": "d", **{f"{cost}_ratio": ".2f" for cost in costs}})
    print(f"\nGrowth from {SPARSE} clients on: the exponent b of clients^b")
    for name, growth in exponents.items():
        print(f"{name:>8}: " + ", ".join(f"{cost} {value:.2f}" for cost, value in growth.items()))
    return {"sparse": sparse, "complete": complete, "complete_over_sparse": ratios, "exponents": exponents}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--clients", type=int, nargs="+", default=[8, 64, 256], help="clients of a round")
    parser.add_argument("--parameters", type=int, nargs="+", default=[10**5, 10**6, 10**7], help="entries of a vector")
    parser.add_argument("--consistency", action="store_true", help="time the consistency check instead")
    parser.add_argument("--json", type=Path, help="where to store the figures")
    options = parser.parse_args()
    torch.set_num_threads(1)
    parties.Client = TimedClient
    measure(8, 1000, None)  # warms up
    if options.consistency:
        found = {}
        for name, checked in (("without", False), ("with", True)):
            found[name] = [measure(n, size, n - 1, checked) for size in options.parameters for n in options.clients]
            print(f"The complete graph, {name} the consistency check")
            show(found[name], COLUMNS)
        store(options.json, found, "cryptography", "pycryptodome", "numpy")
        return
    rows = [measure(clients, size, None) for size in options.parameters for clients in options.clients]
    print("The sparse graph")
    show(rows, COLUMNS)
    found = {
        "torch_threads": torch.get_num_threads(),
        "rows": rows,
        "comparison": compare(),
    }
    store(options.json, found, "cryptography", "pycryptodome", "numpy")


if __name__ == "__main__":
    main()
