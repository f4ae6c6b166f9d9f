"""Hostile clients on permuted-digits: what each attack does to FedAvg and FOT, and how far each rule helps.

All 20 clients take part in each round. Stores for each method, rule, attack and number of hostile clients, by seed:
ACC, FGT, the accuracy on each task right after it was learned, and the share of each layer's directions that FOT
protects after the first task. Most rules see updates only, so the attack on sketches runs without a rule and with the
one that caps sketches.

    python benchmarks/robust.py [--seeds 1] [--hostile 1 2 4] [--sketch 1 2 4] [--set OPTION ...] [--json FILE]
"""

from __future__ import annotations

import argparse
import warnings
from collections.abc import Iterator
from pathlib import Path
from typing import Any, NamedTuple

from host import store

import cfl

OPTIONS = ("partition.clients=20", "cohort=20", "engine=vmapped", "block=20")
RULES = ("", "median", "trimmed_mean", "krum", "bulyan", "rfa", "norm_bound")
TOLD = {"bulyan": ("regularizer.bulyan.hostile=0.2",)}  # as krum is by default
ATTACKS = ("sign_flip", "scale", "label_flip", "alie", "ipm")


class Case(NamedTuple):
    """A run. rule: empty for the weighted mean; hostile: number of hostile clients."""

    method: str
    rule: str
    attack: str
    hostile: int


def cases(hostile: list[int], sketch: list[int]) -> Iterator[Case]:
    """All runs of a seed. hostile: numbers of hostile clients; sketch: the same for the attack on sketches."""
    for method in ("fedavg", "fot"):
        yield from (Case(method, rule, "none", 0) for rule in RULES)
        if method == "fot":
            yield from (Case(method, rule, "sketch", count) for rule in ("", "norm_bound") for count in sketch)
        yield from (Case(method, rule, attack, n) for n in hostile for attack in ATTACKS for rule in RULES)


def measured(case: Case, options: tuple[str, ...], seeds: range) -> dict[str, Any]:
    """A row of figures: fractions, a value for each seed."""
    attack = (f"attack.name={case.attack}", f"attack.clients={case.hostile}") if case.hostile else ()
    method = "+".join(filter(None, (case.method, case.rule)))
    overrides = [*options, *attack, *TOLD.get(case.rule, ())]
    found = [
        cfl.run(cfl.resolve("permuted-digits", method=method, seed=seed, overrides=overrides)).metrics for seed in seeds
    ]
    return {
        **case._asdict(), "acc": [run["acc"] for run in found], "fgt": [run["fgt"] for run in found],
        "learned": [[row[task] for task, row in enumerate(run["accuracy_matrix"])] for run in found],
        "protected": [run["by_task"][0].get("subspace_use", {}) for run in found],
    }  # fmt: skip


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--seeds", type=int, default=1)
    parser.add_argument("--hostile", type=int, nargs="*", default=[1, 2, 4], help="hostile clients, of 20")
    parser.add_argument("--sketch", type=int, nargs="*", default=[1, 2, 4], help="the same, for the attack on sketches")
    parser.add_argument("--set", nargs="*", default=[], help="more options of the runs")
    parser.add_argument("--json", type=Path, help="where to store the figures")
    given = parser.parse_args()
    warnings.simplefilter("ignore")
    options, rows = (*OPTIONS, *given.set), []
    for case in cases(given.hostile, given.sketch):
        rows.append(row := measured(case, options, range(given.seeds)))
        print(*case, *(f"{key} {row[key]}" for key in ("acc", "learned")), flush=True)
        store(given.json, {"options": options, "seeds": given.seeds, "rows": rows}, "torch")


if __name__ == "__main__":
    main()
