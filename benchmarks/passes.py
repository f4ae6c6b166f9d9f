"""Time predictions of each model in forward passes of 1,024 samples and of fewer: the reason for `cfl.models.passes`.

    python benchmarks/passes.py [--repeats 5] [--json FILE]

A prediction is of 1,024 random samples (3 x 32 x 32, for `mlp` 1 x 28 x 28, for `bert_tiny` 64 tokens), on one thread,
with weights at their start. The sizes take turns; seconds are the median. The ratio is that of 1,024 over the size's.
"""

import argparse
import statistics
import time
from pathlib import Path
from typing import Any

import torch
from host import store
from torch import Tensor

from cfl.core import machine, plugins, rng

SHAPES = {
    "mlp": (1, 28, 28),
    "alexnet_cl": (3, 32, 32),
    "resnet18": (3, 32, 32),
    "cnn": (3, 32, 32),
    "vit_small": (3, 32, 32),
    "bert_tiny": (2, 64),
}
SAMPLES, SIZES = 1024, (1024, 512, 256, 128, 64, 32)


def inputs(name: str) -> Tensor:
    source = rng.generator(0)
    if name != "bert_tiny":
        return torch.randn(SAMPLES, *SHAPES[name], generator=source)
    ids = torch.randint(5, 30_000, (SAMPLES, SHAPES[name][1]), generator=source)
    return torch.stack([ids, torch.ones_like(ids)], dim=1)


def measure(name: str, repeats: int) -> dict[str, Any]:
    """Seconds of a prediction by size of the pass, one number a repeat, and their ratios."""
    x, net = inputs(name), plugins.models.get(name)(SHAPES[name], 10).eval()
    seconds: dict[int, list[float]] = {size: [] for size in SIZES}
    with torch.no_grad():
        net(x)  # warms up
        for _ in range(repeats):
            for size, found in seconds.items():
                began = time.perf_counter()
                for part in x.split(size):
                    net(part)
                found.append(time.perf_counter() - began)
    medians = {size: statistics.median(found) for size, found in seconds.items()}
    return {"ratios": {size: medians[SAMPLES] / own for size, own in medians.items()}, "seconds": seconds}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--repeats", type=int, default=5)
    parser.add_argument("--json", type=Path)
    args = parser.parse_args()
    torch.set_num_threads(1)
    machine.keep_memory()  # as cfl-run does
    found = {}
    for name in SHAPES:
        found[name] = measure(name, args.repeats)
        print(f"{name:12}", "  ".join(f"{size}: {ratio:.2f}" for size, ratio in found[name]["ratios"].items()))
    store(args.json, {"models": found}, "torch")


if __name__ == "__main__":
    main()
