"""FedProj's pilot study on Iris: what a client's local training does to the classes that it does not hold.

Each of three clients holds one class. For FedAvg, FedDF and FedProj over several seeds: accuracy of the global model
and of the local models after the last local training, on all 150 samples; for the first seed the decision regions.
The preset `iris` says which of the settings are the paper's.

    python benchmarks/pilot_study.py [--seeds 10] [--output docs/images/pilot-study.png] [--json FILE]
"""

from __future__ import annotations

import argparse
import statistics
from pathlib import Path
from typing import Any

import torch
from host import store

import cfl
from cfl.core import Tree
from cfl.models import Model

METHODS = ("fedavg", "feddf", "fedproj")


def study(method: str, seed: int) -> tuple[cfl.Result, dict[int, Tree]]:
    """A run, and the local models after the last local training by client."""
    config = cfl.resolve("iris", method=method, seed=seed)
    models: dict[int, Tree] = {}
    return cfl.run(config, observe=lambda info, client, params: models.update({client: params})), models


def figures(results: list[cfl.Result]) -> dict[str, Any]:
    """Accuracies of one method, fractions: "global" and "local" of each seed, and the "worst" local model."""
    local = [result.metrics["local_accuracy"] for result in results]
    return {
        "global": [result.metrics["acc"] for result in results],
        "local": [statistics.mean(own) for own in local],
        "worst": [min(own) for own in local],
    }


def draw(found: dict[str, tuple[Model, dict[str, Tree]]], output: Path) -> None:
    """A row for each method: the decision regions of each client's model and of the global one."""
    import matplotlib.pyplot as plt
    from matplotlib.colors import ListedColormap

    from cfl.streams.datasets import iris

    samples = iris()
    x, y = samples.x_train, samples.y_train
    u, v = torch.meshgrid(torch.linspace(-4.2, 4.8, 240), torch.linspace(-2.2, 2.2, 160), indexing="xy")
    light, strong = ListedColormap(["#fdd9b5", "#d3d0ea", "#bfe5d5"]), ListedColormap(["#d95f02", "#7570b3", "#1b9e77"])
    figure, grid = plt.subplots(len(found), 4, figsize=(11, 7), sharex=True, sharey=True, layout="constrained")
    for row, (method, (model, models)) in zip(grid, found.items(), strict=True):
        for axis, (title, params) in zip(row, models.items(), strict=True):
            with model.evaluation(), torch.no_grad():
                regions = model.logits(params, torch.stack([u.flatten(), v.flatten()], dim=1), 0).argmax(1)
                right = (model.logits(params, x, 0).argmax(1) == y).float().mean()
            axis.pcolormesh(u, v, regions.reshape(u.shape), cmap=light, vmin=0, vmax=2, rasterized=True)
            axis.scatter(*x.T, c=y, cmap=strong, s=9, linewidths=0)
            axis.set_title(f"{method}, {title}: {right:.0%}", fontsize=10)
    figure.supxlabel("first principal component")
    figure.supylabel("second principal component")
    output.parent.mkdir(parents=True, exist_ok=True)
    figure.savefig(output, dpi=110)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--seeds", type=int, default=10)
    parser.add_argument("--output", type=Path, default=Path("docs/images/pilot-study.png"))
    parser.add_argument("--json", type=Path, help="where to store the figures")
    args = parser.parse_args()
    found, summaries = {}, {}
    for method in METHODS:
        runs = [study(method, seed) for seed in range(args.seeds)]
        result, models = runs[0]
        named = {f"after client {client}": params for client, params in sorted(models.items())}
        found[method] = result.model, {**named, "global": result.params}
        summaries[method] = figures([run for run, _ in runs])
        parts = [
            f"{name} {statistics.mean(values):.1%} ± {statistics.pstdev(values):.1%}"
            for name, values in summaries[method].items()
        ]
        print(f"{method:8s} {', '.join(parts)}")
    draw(found, args.output)
    store(args.json, {"methods": summaries}, "torch")


if __name__ == "__main__":
    main()
