"""Does an average of LoRA factors keep what each client's projection protects? GPM's bases against FOT's.

With `gpm`, each client makes the step of its adapters orthogonal to the inputs that it had in earlier tasks. The server
averages the factors A and B of all clients, and this mean is orthogonal to no client's inputs unless they all had the
same. With `fot`, the server projects the mean off one basis of all clients' inputs. So the same data are split among
1 and 10 clients here: with one client, both methods promise the same.

Digits in three tasks of two classes with a head each, an MLP with random weights and adapters of rank 32 beside both
hidden layers; all clients train in each round. Two partitions: iid, and shards, where a client has one or two classes.
Prints and stores, for each method and number of clients, means over seeds and over the tasks after the first:
overlap: share of the energy of the task's step of the adapters that lies in the span of earlier tasks' inputs (the
    directions with 95 % of their energy), on test samples and before the task;
moved: change of the logits of earlier tasks' test samples over the task, relative to their size;
acc, fgt: of the run.

    python benchmarks/lora_orthogonality.py [--seeds 3] [--rounds 5] [--json FILE] [--output PICTURE]
"""

from __future__ import annotations

import argparse
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from statistics import mean, pstdev
from typing import Any

import torch
from host import store
from torch import Tensor

import cfl
from cfl.core import Tree
from cfl.methods.subspace import basis as bases
from cfl.methods.subspace.layer_inputs import watch
from cfl.models import Model

TASKS, ENERGY = 3, 0.95
OPTIONS = (
    f"tasks={TASKS}", "model.hidden=[64,64]", "model.adapter=lora", "model.adapter_rank=32", "local.lr=0.1",
    "local.epochs=2", "engine=vmapped",
)  # fmt: skip
METHODS = {"fedavg": (), "gpm": ("strategy.threshold=0.99",), "fot": ("strategy.threshold=0.99",)}
NAMES = {"fedavg": "FedAvg", "gpm": "GPM, a basis for each client", "fot": "FOT, one basis"}
PARTITIONS = {"iid": ("partition.name=iid",), "shards": ("partition.name=shards", "partition.shards=1")}
CLIENTS = (1, 10)


class Ends(cfl.callbacks.Callback):
    """Keeps the parameters and the test inputs at the end of each task."""

    def __init__(self) -> None:
        self.params: list[Tree] = []
        self.inputs: list[Tensor] = []

    def on_task(self, view: Any) -> None:
        self.params.append(view.params)
        self.inputs.append(view.samples(view.task)[0])


def measured(method: str, partition: str, clients: int, rounds: int, seed: int) -> dict[str, float]:
    """The figures of one run, fractions."""
    size = (f"partition.clients={clients}", f"cohort={clients}", f"rounds={rounds}")
    overrides = [*OPTIONS, *size, *PARTITIONS[partition], *METHODS[method]]
    ends = Ends()
    result = cfl.run(cfl.resolve("split-digits", method=method, overrides=overrides, seed=seed), callbacks=[ends])
    overlaps, moved = [], []
    for task in range(1, TASKS):
        before, after = ends.params[task - 1 : task + 1]
        overlaps.append(overlap(result.model, before, after, ends.inputs[:task]))
        moved.append(change(result.model, before, after, ends.inputs[:task]))
    return {"overlap": mean(overlaps), "moved": mean(moved), **{key: result.metrics[key] for key in ("acc", "fgt")}}


def overlap(model: Model, before: Tree, after: Tree, old: Sequence[Tensor]) -> float:
    """Share of the energy of the adapters' step in the span of their inputs for old samples, before the step."""
    layers = [layer for layer in model.layers if layer.path.rpartition(".")[2] in ("a", "b")]
    seen: dict[str, list[Tensor]] = {layer.weight: [] for layer in layers}
    with torch.no_grad(), watch(model, layers, lambda layer, inputs: seen[layer.weight].append(inputs.flatten(0, 1))):
        for task, x in enumerate(old):
            model.logits(before, x, task)
    within = total = 0.0
    for name, inputs in seen.items():
        left, sizes, _ = torch.linalg.svd(torch.cat(inputs).T.double(), full_matrices=False)
        rank = bases.choose_rank(sizes.square(), 0.0, ENERGY)
        step = (after[name] - before[name]).double()
        within += float(bases.component(step, left[:, :rank]).square().sum())
        total += float(step.square().sum())
    return within / total if total else 0.0


def change(model: Model, before: Tree, after: Tree, old: Sequence[Tensor]) -> float:
    """|f(x) - f_before(x)| / |f_before(x)| of the logits of old samples, each by the head of its task."""
    with torch.no_grad():
        logits = [[model.logits(params, x, task) for task, x in enumerate(old)] for params in (before, after)]
    first, last = (torch.cat(each) for each in logits)
    return float((last - first).norm() / first.norm())


def rows(seeds: range, rounds: int) -> Iterator[dict[str, Any]]:
    """A row for each partition, method and number of clients: each figure with a value for each seed."""
    for partition in PARTITIONS:
        for method in METHODS:
            for clients in CLIENTS:
                found = [measured(method, partition, clients, rounds, seed) for seed in seeds]
                figures = {key: [run[key] for run in found] for key in found[0]}
                yield {"partition": partition, "method": method, "clients": clients, **figures}


def line(row: Mapping[str, Any]) -> str:
    """A row as text, percent."""
    texts = (
        f"{key} {100 * mean(row[key]):5.1f} ± {100 * pstdev(row[key]):.1f}"
        for key in ("overlap", "moved", "acc", "fgt")
    )
    return f"{row['partition']:7} {row['method']:7} {row['clients']:3} clients  {'  '.join(texts)}"


def draw(found: Sequence[Mapping[str, Any]], path: Path) -> None:
    """Draw overlap and change of old logits over the number of clients, a column for each partition."""
    import matplotlib.pyplot as plt

    figure, axes = plt.subplots(2, 2, figsize=(8, 5), sharex=True, sharey="row", layout="constrained")
    titles = {"overlap": "step within earlier inputs, %", "moved": "change of earlier logits, %"}
    looks = {"fedavg": ("#555555", "^"), "gpm": ("#c2571a", "s"), "fot": ("#1b6ca8", "o")}
    for column, partition in enumerate(PARTITIONS):
        axes[0, column].set_title(partition, fontsize=10)
        axes[1, column].set_xlabel("clients that share the data")
        axes[1, column].set_xticks(range(len(CLIENTS)), [str(number) for number in CLIENTS])
        for line_of, (key, title) in enumerate(titles.items()):
            axis = axes[line_of, column]
            axes[line_of, 0].set_ylabel(title)
            for method, (colour, marker) in looks.items():
                own = [row for row in found if (row["partition"], row["method"]) == (partition, method)]
                scores = [[100 * score(row[key]) for row in own] for score in (mean, pstdev)]
                axis.errorbar(range(len(own)), *scores, color=colour, marker=marker, capsize=3, label=NAMES[method])
            axis.set_yscale("log")
    axes[0, 0].legend(fontsize=8)
    path.parent.mkdir(parents=True, exist_ok=True)
    figure.savefig(path, dpi=110)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--seeds", type=int, default=3)
    parser.add_argument("--rounds", type=int, default=5, help="rounds a task")
    parser.add_argument("--json", type=Path, help="where to store the figures")
    parser.add_argument("--output", type=Path, help="where to store the picture")
    given = parser.parse_args()
    found = []
    for row in rows(range(given.seeds), given.rounds):
        found.append(row)
        print(line(row), flush=True)
    store(given.json, {"options": OPTIONS, "methods": METHODS, "rounds": given.rounds, "rows": found}, "torch")
    if given.output:
        draw(found, given.output)


if __name__ == "__main__":
    main()
