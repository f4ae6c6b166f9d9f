"""The parts of `fidelity.py` on GPM and RGO."""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from statistics import fmean
from typing import Any
from unittest.mock import patch

import torch
from fidelity_tables import SEEDS, Table, measured, run
from torch import Tensor

import cfl
from cfl.contract import Batch, Client, RoundInfo, TreesByOwner
from cfl.core import tree
from cfl.methods.strategies.gpm import GPM
from cfl.methods.subspace import basis as bases
from cfl.methods.subspace.layer_inputs import stream
from cfl.methods.subspace.projection import input_vectors
from cfl.methods.subspace.sketch import Energies
from cfl.models import Layer


def gpm(seeds: Sequence[int] = SEEDS, *shorter: str) -> list[Table]:
    j, rows = torch.arange(1, 201, dtype=torch.float64), []
    spectra = {"exp(-j / 10)": torch.exp(-j / 10), "1 / j": 1 / j, "1 / j^2": j**-2}
    spectra["0.96, then flat"] = torch.where(j > 1, 0.04 / 199, 0.96)
    for name, squared in spectra.items():
        shares = [0.0, *(squared.cumsum(0) / squared.sum()).tolist()]
        right = bases.choose_rank(squared, 0.0, 0.95)
        rows.append([name, right, shares[right], right - 1, shares[right - 1]])
    runs = {
        name: [run("permuted-digits", "gpm", seed, f"strategy.first_rank_bug={bug}", *shorter) for seed in seeds]
        for name, bug in (("right", "false"), ("as in GPM's code", "true"))
    }
    columns = {"spectrum": "", "directions": "d", "share": ".3f", "in GPM's code": "d", "share there": ".3f"}
    scores = [[name, *measured(results, "acc", "fgt")] for name, results in runs.items()]
    return [
        Table("First-task rank at threshold 0.95", columns, rows),
        Table("GPM on permuted-digits", {"rank": "", "ACC": "%.1f", "FGT": "%.1f"}, scores),
    ]


def overlap(
    rounds: int = 20, clients: int = 10, benchmarks: Sequence[str] = ("permuted-mnist", "permuted-digits")
) -> list[Table]:
    rows: list[list[Any]] = []
    for benchmark, partition in itertools.product(benchmarks, ("iid", "shards")):
        setting = (f"partition.name={partition}", "tasks=2", f"rounds=[{rounds},1]")
        layers = covered_energy(cfl.resolve(benchmark, method="gpm", overrides=setting), clients)
        first, others = layers[0], [fmean(shares) for shares in zip(*layers[1:], strict=True)]
        rows.append([benchmark, partition, *first, *others])
    heads = ("own, first layer", "another's, first layer", "own, other layers", "another's, other layers")
    columns = {"stream": "", "partition": "", **dict.fromkeys(heads, "%.1f")}
    return [Table("Energy that a client's GPM basis covers", columns, rows)]


def covered_energy(config: cfl.RunConfig, clients: int, tasks: cfl.Stream | None = None) -> list[tuple[float, float]]:
    """By layer, the shares of a client's inputs in its own basis of the first task, and in another one's; means."""
    noted: list[tuple[Client, tree.Tree, RoundInfo, tree.Tree]] = []
    original = GPM.work

    def work(
        self: GPM, params: tree.Tree, client: Client, shared: TreesByOwner, state: tree.Tree, info: RoundInfo
    ) -> Any:
        sent, after = original(self, params, client, shared, state, info)
        noted.append((client, tree.part(after, "basis"), info, params))
        return sent, after

    with patch.object(GPM, "work", work):
        cfl.run(config, stream=tasks)
    noted = noted[:clients]
    layers = noted[0][2].model.layers
    own, others = ({layer.name: [] for layer in layers} for _ in range(2))
    for (holder, basis, *_), (client, _, info, params) in itertools.product(noted, noted):
        sums = {name: Energies(columns.double()) for name, columns in basis.items()}

        def see(layer: Layer, inputs: Tensor, batch: Batch, sums: dict[str, Energies] = sums) -> None:
            into = sums[layer.name]
            into.add(input_vectors(inputs, layer, augment=len(into.basis) > layer.size), batch.ids)

        stream(info.model, params, info.task, client.batches(64), layers, see)
        for name, (full, residual) in ((name, each.energies.tolist()) for name, each in sums.items()):
            (own if holder is client else others)[name].append(1 - residual / full)
    return [(fmean(own[layer.name]), fmean(others[layer.name])) for layer in layers]


def encoding(seeds: Sequence[int] = SEEDS, *shorter: str) -> list[Table]:
    forms = {
        "FedAvg": ("fedavg",),
        "RGO": ("rgo", "strategy.alpha=0.01"),
        "RGO, encoded": ("rgo", "strategy.alpha=0.01", "strategy.encode=true"),
        "FedAvg, encoded": ("rgo", "strategy.alpha=1e12", "strategy.encode=true"),  # P is I but for 1 / alpha
        "FOT": ("fot",),
        "a model for each task": ("single_task",),
    }
    rows = []
    for name, (method, *own) in forms.items():
        scores = []
        for partition in ("iid", "shards"):
            setting = (f"partition.name={partition}", *own, *shorter)
            scores += measured([run("permuted-digits", method, seed, *setting) for seed in seeds], "acc", "fgt")
        rows.append([name, *scores])
    columns = dict.fromkeys(("ACC, IID", "FGT, IID", "ACC, shards", "FGT, shards"), "%.1f")
    return [Table("RGO's feature encoding", {"method": "", **columns}, rows)]
