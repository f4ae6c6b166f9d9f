"""Where FOT helps: ACC over its threshold, on streams whose tasks' inputs overlap more or less.

Four streams are made of the same images of Fashion-MNIST: rotated by 90 and by 30 degrees a task, and permuted, each
with one head; and split into tasks of two classes, with a head each. Ten clients, an MLP with 64 hidden units, learning
rate 0.05: nothing is tuned for any stream. Prints and stores for each method and threshold, over the seeds: ACC, FGT,
the accuracy on the last task, and the share of the energy of the first layer's steps that FOT removed in the last task.
The picture shows ACC over the threshold, with FedAvg and ER as lines.

    python benchmarks/orthogonality.py [--seeds 3] [--images 5000] [--rounds 4] [--json FILE] [--output PICTURE]
"""

from __future__ import annotations

import argparse
from collections.abc import Iterator
from pathlib import Path
from statistics import mean, pstdev
from typing import Any

import numpy as np
import torch
from host import store
from scipy.ndimage import rotate
from torch import Tensor

import cfl
from cfl.core import rng
from cfl.streams.datasets import load

OPTIONS = ("partition.clients=10", "cohort=10", "local.lr=0.05", "model.hidden=[64]")
THRESHOLDS = (0.5, 0.7, 0.8, 0.85, 0.9, 0.95, 0.99)
STREAMS = {"rotated by 90 degrees": 90, "rotated by 30 degrees": 30, "permuted": None, "split, a head a task": None}
Samples = tuple[Tensor, Tensor, Tensor, Tensor]


def samples(images: int, seed: int) -> Samples:
    """Training images (n, 1, 28, 28) in [0, 1] and labels, drawn at random, and 2,000 test images and labels."""
    arrays = load("fashion-mnist")
    draws = rng.generator(rng.key(seed, "images"))
    train = torch.randperm(len(arrays.y_train), generator=draws)[:images]
    test = torch.randperm(len(arrays.y_test), generator=draws)[:2000]
    x, x_test = arrays.x_train[train] / 255, arrays.x_test[test] / 255
    return x, arrays.y_train[train], x_test, arrays.y_test[test]


def stream(name: str, images: int, seed: int) -> cfl.Stream:
    """One of the streams: four tasks, or five for the split one."""
    x, y, x_test, y_test = samples(images, seed)
    if name.startswith("split"):
        pairs = [[torch.div(labels, 2, rounding_mode="floor") == task for labels in (y, y_test)] for task in range(5)]
        parts = [(x[own], y[own], x_test[test], y_test[test]) for own, test in pairs]
        return cfl.from_tensors(parts, name=name, multi_head=True)
    return cfl.from_tensors([(a, y, b, y_test) for a, b in _changed(name, x, x_test, seed)], name=name)


def _changed(name: str, x: Tensor, x_test: Tensor, seed: int) -> Iterator[tuple[Tensor, Tensor]]:
    """Training and test images of each of four tasks."""
    for task in range(4):
        if (degrees := STREAMS[name]) is not None:
            yield _rotated(x, task * degrees), _rotated(x_test, task * degrees)
        else:
            order = torch.randperm(28 * 28, generator=rng.generator(rng.key(seed, "pixels", task)))
            yield x.flatten(1)[:, order].view_as(x), x_test.flatten(1)[:, order].view_as(x_test)


def _rotated(x: Tensor, degrees: float) -> Tensor:
    return torch.from_numpy(np.ascontiguousarray(rotate(x.numpy(), degrees, axes=(2, 3), reshape=False, order=1)))


def measured(name: str, images: int, rounds: int, seeds: range) -> Iterator[dict[str, Any]]:
    """A row of figures for each method and threshold; fractions, a value for each seed."""
    streams = {seed: stream(name, images, seed) for seed in seeds}
    fot = [("fot", threshold) for threshold in THRESHOLDS]
    for method, threshold in [("fedavg", None), ("er", None), *fot]:
        own = [f"rounds={rounds}", *([] if threshold is None else [f"strategy.threshold={threshold}"])]
        found = [
            cfl.run(cfl.resolve(name, method=method, seed=seed, overrides=[*OPTIONS, *own]), stream=streams[seed])
            for seed in seeds
        ]
        results = [result.metrics for result in found]
        last = [found["by_task"][-1].get("removed", {}) for found in results]
        yield {
            "stream": name, "method": method, "threshold": threshold,
            "acc": [found["acc"] for found in results], "fgt": [found["fgt"] for found in results],
            "last_task": [found["accuracy_matrix"][-1][-1] for found in results],
            "removed": [next(iter(layers.values()), 0.0) for layers in last],
            "bytes_up": [found["bytes_up"] for found in results],
        }  # fmt: skip


def line(row: dict[str, Any]) -> str:
    """A row as text, percent."""
    who = row["method"] + ("" if row["threshold"] is None else f" {row['threshold']}")
    figures = ("acc", "fgt", "last_task", "removed")
    texts = (f"{key} {100 * mean(row[key]):5.1f} ± {100 * pstdev(row[key]):.1f}" for key in figures)
    return f"{row['stream']:22} {who:10} {'  '.join(texts)}"


def draw(rows: list[dict[str, Any]], path: Path) -> None:
    """Draw a panel for each stream: ACC of FOT over the threshold, with FedAvg and ER as lines."""
    import matplotlib.pyplot as plt

    names = list(dict.fromkeys(row["stream"] for row in rows))
    figure, axes = plt.subplots(1, len(names), figsize=(11, 3), sharey=True, layout="constrained")
    places = range(len(THRESHOLDS))
    for axis, name in zip(np.atleast_1d(axes), names, strict=True):
        own = [row for row in rows if row["stream"] == name]
        fot = [row for row in own if row["method"] == "fot"]
        scores = [[100 * score(row["acc"]) for row in fot] for score in (mean, pstdev)]
        axis.errorbar(places, *scores, color="#1b6ca8", marker="o", capsize=3, label="FOT")
        for method, label, style in (("fedavg", "FedAvg", "--"), ("er", "ER", ":")):
            (row,) = (row for row in own if row["method"] == method)
            axis.axhline(100 * mean(row["acc"]), color="#555555", linestyle=style, label=label)
        axis.set_title(name, fontsize=10)
        axis.set_xticks(places, [f"{value:g}" for value in THRESHOLDS])
        axis.set_xlabel("threshold")
        axis.set_ylim(0, 100)
    np.atleast_1d(axes)[0].set_ylabel("ACC, %")
    np.atleast_1d(axes)[-1].legend(loc="center", fontsize=9)
    path.parent.mkdir(parents=True, exist_ok=True)
    figure.savefig(path, dpi=110)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--seeds", type=int, default=3)
    parser.add_argument("--images", type=int, default=5000, help="training images")
    parser.add_argument("--rounds", type=int, default=4, help="rounds a task")
    parser.add_argument("--json", type=Path, help="where to store the figures")
    parser.add_argument("--output", type=Path, help="where to store the picture")
    given = parser.parse_args()
    rows = []
    for name in STREAMS:
        for row in measured(name, given.images, given.rounds, range(given.seeds)):
            rows.append(row)
            print(line(row), flush=True)
    store(given.json, {"options": OPTIONS, "rounds": given.rounds, "rows": rows}, "torch")
    if given.output:
        draw(rows, given.output)


if __name__ == "__main__":
    main()
