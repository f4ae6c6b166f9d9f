"""The parts of `fidelity.py` on FOT."""

from __future__ import annotations

import itertools
import math
import warnings
from collections.abc import Sequence
from pathlib import Path
from statistics import fmean
from typing import Any, NamedTuple

import torch
from dp_audit import gaussian_delta, gaussian_epsilon
from fidelity_tables import SEEDS, Table, measured, run
from scipy import stats
from scipy.optimize import brentq
from torch import nn

import cfl
from cfl import models
from cfl.aggregation import accounting
from cfl.aggregation.accounting import Releases
from cfl.core import rng, tree
from cfl.experiments import reproduce
from cfl.methods.subspace import basis as bases
from cfl.methods.subspace.sketch import Gram, unpack

RUNS = Path(__file__).parent / "results/runs"
RULES = ("energy", "norm_ratio", "eq12")
EPSILON, DELTA, CLIENTS, RELEASES = 5.0, 1e-5, 50, 20 * 19  # FOT, appendix H; Mini-ImageNet: layers x extractions


def coverage(draws: int = 5, size: int = 200, samples: int = 4000, asked: float = 0.94) -> list[Table]:
    forms: dict[str, int | None] = {"s = d": 1, "s = 2 d": 2, "s = 5 d": 5, "s = 20 d": 20, "Gram matrix": None}
    rows = []
    for name, power in (("flat", 0), ("1 / j", 1), ("1 / j^2", 2)):
        values = torch.arange(1, size + 1, dtype=torch.float64) ** -power
        reached: dict[str, list[float]] = {form: [] for form in forms}
        for draw in range(draws):
            source = rng.generator(rng.key(draw, "inputs", name))
            x = values.sqrt() * torch.randn(samples, size, dtype=torch.float64, generator=source)
            moment = x.T @ x
            for form, mult in forms.items():
                sums = Gram(bases.empty(size), mult and mult * size, rng.key(draw, "sketch", form))
                sums.add(x[:, None], torch.arange(samples))
                sent = sums.release() if mult else unpack(sums.release())
                vectors, squared = bases.spectrum(sent, gram=mult is None)
                taken = vectors[:, : bases.choose_rank(squared, 0.0, asked)]
                reached[form].append(float((taken * (moment @ taken)).sum() / moment.trace()))
        rows.append([name, *(fmean(found) for found in reached.values())])
    return [Table(f"Coverage where the rule asks {asked:g}", {"spectrum": "", **dict.fromkeys(forms, ".3f")}, rows)]


def ranks(seeds: Sequence[int] = SEEDS, *shorter: str) -> list[Table]:
    squared, rows = torch.exp(-torch.arange(100, dtype=torch.float64) / 10), []
    own = {rule: (f"strategy.criterion={rule}",) for rule in RULES}
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", message="FOT's eq. 12")
        for share in (0.0, 0.25, 0.5, 0.75, 0.87, 0.9, 0.95, 0.99):
            known = [share, math.sqrt(1 - share), math.sqrt(1 - share)]  # energy covered, or the ratio of norms left
            rows.append(
                [share, *(bases.choose_rank(squared, c, 0.9, rule) for c, rule in zip(known, RULES, strict=True))]
            )
        runs = {
            name: [run("permuted-digits", "fot", seed, *more, *shorter) for seed in seeds] for name, more in own.items()
        }
    runs["fedavg"] = [run("permuted-digits", "fedavg", seed, *shorter) for seed in seeds]
    columns = {"acc": "ACC", "fgt": "FGT", "subspace_use": "subspace used", "coverage": "energy covered"}
    return [
        Table("Directions at threshold 0.9", {"covered before": "g", **dict.fromkeys(RULES, "d")}, rows),
        Table(
            "Rank rules on permuted-digits",
            {"rule": "", **dict.fromkeys(columns.values(), "%.1f")},
            [[name, *measured(results, *columns)] for name, results in runs.items()],
        ),
    ]


def intervals() -> list[Table]:
    """Welch's interval, from three numbers with the paper's mean and standard deviation (of a population)."""
    table, found = reproduce.table("fot-table1"), []
    for part, (row, method) in itertools.product(("IID", "non-IID"), (("FL", "FedAvg"), ("FOT", "FOT"))):
        [(cell, runs)] = table.runs([row, "PMNIST", part], SEEDS, "paper", [], RUNS, [RUNS]).items()
        for name in table.measures:
            ours = [reproduce.scores([name], [run])[name].mean for run in runs]
            paper = cell.paper[name]
            theirs = [paper.mean + paper.std * step for step in (-math.sqrt(1.5), 0.0, math.sqrt(1.5))]
            low, high = stats.ttest_ind(ours, theirs, equal_var=False).confidence_interval(0.95)
            found.append([part, method, name.upper(), fmean(ours) - paper.mean, float(low), float(high)])
    heads = {"partition": "", "method": "", "score": "", "ours less the paper's": "+.2f"}
    return [Table("Permuted MNIST beside the paper", heads | {"95 % interval from": "+.2f", "to": "+.2f"}, found)]


def dp(widths: Sequence[int] = (1152, 2304)) -> list[Table]:
    printed, plan = math.sqrt(math.log(1.25 / DELTA)) / EPSILON, [Releases(1.0, RELEASES)]
    sigmas = {
        "as printed": printed,
        "classical": math.sqrt(2) * printed,
        "analytic": float(brentq(lambda sigma: gaussian_delta(EPSILON, 1 / sigma) - DELTA, 0.1, 10)),
        f"for all {RELEASES} releases": accounting.noise_multiplier(plan, EPSILON, DELTA, "prv"),
    }
    noises = [
        [name, sigma, gaussian_delta(EPSILON, 1 / sigma), gaussian_epsilon(1 / sigma, DELTA)]
        + [gaussian_epsilon(math.sqrt(RELEASES) / sigma, DELTA), accounting.epsilon(plan, sigma, DELTA, "rdp")]
        for name, sigma in sigmas.items()
    ]
    columns = {"noise": "", "sigma": ".4f", "delta at epsilon 5": ".1e", "epsilon, one release": ".2f"}
    columns |= {f"epsilon, {RELEASES} releases": ".1f", "the same by `cfl`'s accountant": ".1f"}
    heads = {"d": "d", "norm of the noise": ".1f", "measured": ".1f", "sum of 50, at most": ".1f", "as drawn": ".1f"}
    heads |= {"cosine^2": ".4f", "directions taken": "d"}
    return [
        Table("Noise for epsilon 5 and delta 1e-5", columns, noises),
        Table("Noise and signal of a sketch", heads, [signal(d, 5 * d, printed) for d in widths]),
    ]


def signal(d: int, s: int, sigma: float) -> list[float]:
    """A row of `dp`. Clients' inputs all lie in one direction u, the strongest signal: they send u g_i^T / |g_i|."""
    source = rng.generator(rng.key(0, "noise", d))
    noise, draws = sigma * torch.randn(d, s, generator=source), torch.randn(CLIENTS, s, generator=source)
    total = (draws / draws.norm(dim=1, keepdim=True)).sum(0)
    largest = float(torch.linalg.eigvalsh(bases.outer(noise, torch.float32))[-1]) ** 0.5
    noise[0] += total  # u = e_1
    vectors, squared = bases.spectrum(noise)
    taken = bases.choose_rank(squared, 1.0, 0.9, "norm_ratio")
    formula, found = sigma * (math.sqrt(d) + math.sqrt(s)), float(vectors[0, 0].square())
    return [d, formula, largest, float(CLIENTS), float(total.norm()), found, taken]


class Network(NamedTuple):
    """One of FOT's. dense, conv: columns over rows of the code's sketches; paper: the paper's."""

    model: str
    shape: tuple[int, ...]
    classes: int
    tasks: int
    options: dict[str, Any]
    dense: int
    conv: int
    paper: int


MINI = {"width": 32, "stem_stride": 2, "norm": True}
NETWORKS = {
    "Permuted MNIST": Network("mlp", (1, 28, 28), 10, 1, {"hidden": [400, 400, 400]}, 1, 1, 1),
    "Split CIFAR-100": Network("alexnet_cl", (3, 32, 32), 10, 10, {}, 5, 1, 5),
    "5-Datasets": Network("resnet18", (3, 32, 32), 10, 5, {"width": 20}, 5, 5, 5),
    "Mini-ImageNet": Network("resnet18", (3, 84, 84), 5, 20, MINI, 5, 5, 5),
}
PRINTED = {"Split CIFAR-100": (1.42, 0.24, 0.048), "Mini-ImageNet": (2.56, 0.64, 0.08)}  # Table 5: model, A, O; MB
ROUNDS = {"Split CIFAR-100": 1000, "Mini-ImageNet": 250}  # a task


def megabytes(net: Network) -> dict[str, float]:
    """Of the model with all its heads, and of what is sent of the layers' inputs, in float32."""
    module = models.build(net.model, net.shape, net.classes, net.options)
    model = cfl.Model(module, net.shape, [net.classes] * net.tasks, multi_head=net.tasks > 1, norm_stats="batch")
    code = [net.dense if isinstance(layer.module, nn.Linear) else net.conv for layer in model.layers]
    sizes = [layer.size for layer in model.layers]
    numbers = {
        "model": sum(leaf.numel() for leaf in model.params.values()),
        "A, code": sum(mult * d**2 for mult, d in zip(code, sizes, strict=True)),
        "A, paper": sum(net.paper * d**2 for d in sizes),
        "Gram matrices": sum(d * (d + 1) // 2 for d in sizes),
        "all of O": sum(d**2 for d in sizes),
    }
    return {name: 4 * number / 1e6 for name, number in numbers.items()}


def cumulative(task: int, rounds: int, model: float, extra: float) -> float:
    """What a client that is in every round sends and gets up to the end of a task (Table 13); task from 1."""
    return task * rounds * 2 * model + (task - 1) * extra


def sizes() -> list[Table]:
    found = {name: megabytes(net) for name, net in NETWORKS.items()}
    rows = []
    for name, (model, sketch, basis) in PRINTED.items():
        real = found[name]
        for form, size, extra in (
            ("as printed", model, sketch + basis),
            ("real; A as in the paper, all of O", real["model"], real["A, paper"] + real["all of O"]),
            ("real; Gram matrices, no O", real["model"], real["Gram matrices"]),
        ):
            whole = [cumulative(NETWORKS[name].tasks, ROUNDS[name], size, more) for more in (0, extra)]
            rows.append([name, form, *whole, whole[1] / whole[0] - 1])
    columns = {"benchmark": "", **dict.fromkeys(found["Permuted MNIST"], ".1f"), "printed: model, A, O": ""}
    printed = {name: ", ".join(f"{size:g}" for size in three) for name, three in PRINTED.items()}
    costs = {"benchmark": "", "sizes": "", "FedAvg": ",.1f", "FOT": ",.1f", "more, percent": "%.2f"}
    return [
        Table("Megabytes", columns, [[name, *own.values(), printed.get(name)] for name, own in found.items()]),
        Table("Megabytes of a whole run", costs, rows),
    ]


def bias(seeds: Sequence[int] = SEEDS, *shorter: str) -> list[Table]:
    rows = []
    for choice in ("augment", "free", "freeze"):
        results = [run("permuted-digits", "fot", seed, f"strategy.bias={choice}", *shorter) for seed in seeds]
        moved = fmean(first_task_moved(seed, f"strategy.bias={choice}") for seed in seeds)
        rows.append([f"`{choice}`", moved, *measured(results, "acc", "fgt")])
    columns = {"`strategy.bias`": "", "change of the logits": ".1e", "ACC": "%.1f", "FGT": "%.1f"}
    return [Table("Biases under FOT", columns, rows)]


def precision(seeds: Sequence[int] = SEEDS, *shorter: str) -> list[Table]:
    rows = []
    for name in ("float32", "bf16"):
        found: list[Any] = [f"`{name}`"]
        for method in ("fedavg", "fot"):
            results = [run("permuted-digits", method, seed, f"precision={name}", *shorter) for seed in seeds]
            found += measured(results, "acc", "fgt")
        own = ["strategy.bias=freeze", f"precision={name}"]
        rows.append([*found, fmean(first_task_moved(seed, *own) for seed in seeds)])
    columns = {"`precision`": "", "FedAvg, ACC": "%.1f", "FGT": "%.1f", "FOT, ACC": "%.1f", "FOT, FGT": "%.1f"}
    return [Table("Products in bfloat16", {**columns, "change of the logits": ".1e"}, rows)]


def first_task_moved(seed: int, *overrides: str) -> float:
    """Change of task 1's logits while task 2 is trained, over their norm; the basis holds all inputs of task 1."""
    draws, tasks = rng.generator(rng.key(seed, "tiny stream")), []
    for _ in range(2):
        x, y = torch.randn(20, 64, generator=draws), torch.arange(20) % 4
        tasks.append((x, y, x, y))
    tiny = ["tasks=2", "partition.clients=1", "cohort=1", "model.hidden=[96,96]"]
    whole = ["strategy.threshold=1.0", "strategy.sketch=gram", *overrides]
    after: dict[int, tree.Tree] = {}  # with one client, its model after the last round of a task is the global one
    result = cfl.run(
        cfl.resolve("permuted-digits", method="fot", seed=seed, overrides=[*tiny, *whole]),
        stream=cfl.from_tensors(tasks, multi_head=True),
        observe=lambda info, client, params: after.update({info.task: params}),
    )
    with torch.no_grad(), result.model.evaluation():
        before, now = (result.model.logits(params, tasks[0][0], 0) for params in (after[0], result.params))
    return float((now - before).norm() / before.norm())
