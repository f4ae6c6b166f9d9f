"""A package outside of cfl: it adds a method, a local regularizer, a benchmark and a model by entry points alone."""

from dataclasses import dataclass
from typing import ClassVar

import torch
from torch import nn

import cfl
from cfl.core import rng, tree
from cfl.streams import Benchmark


@dataclass(frozen=True)
class Slowdown(cfl.Strategy):
    """FedAvg whose clients learn slower with every round in which they took part."""

    source: ClassVar[str] = "an example, no paper"

    rate: float = cfl.option(0.1, "after n rounds a client divides its gradients by 1 + rate n", at_least=0.0)

    def init_client(self, params, model):
        return {"rounds": next(iter(params.values())).new_zeros(())}

    def adjust(self, grads, params, ctx):
        return tree.scale(grads, 1 / (1 + self.rate * ctx.state["rounds"]))

    def finish(self, params, ctx, steps):
        upload, state = super().finish(params, ctx, steps)
        return upload, {**state, "rounds": state["rounds"] + 1}


@dataclass(frozen=True)
class SparseSteps(cfl.LocalRegularizer):
    """Proximal term in the 1-norm: mu |w - w_global|, which leaves most weights where they were."""

    source: ClassVar[str] = "an example, no paper"

    mu: float = cfl.option(0.001, "weight of the term", at_least=0.0)

    def penalty(self, params, logits, ctx):
        return self.mu * sum((leaf - ctx.shared["params"][name]).abs().sum() for name, leaf in params.items())


def points(angle, key, n):
    """Points around (1, 0) and (-1, 0), turned by an angle in degrees: x (n, 2), y (n,)."""
    y = torch.arange(n) % 2
    x = 0.3 * torch.randn(n, 2, generator=rng.generator(key))
    x[:, 0] += 1.0 - 2.0 * y
    turn = torch.deg2rad(torch.tensor(float(angle)))
    return x @ torch.stack([turn.cos(), turn.sin(), -turn.sin(), turn.cos()]).reshape(2, 2), y


def build_turning_points(tasks, seed, data_root, download, class_order):
    """An Avalanche benchmark of tensors, as a stream; each task is turned by 30 degrees more."""
    from avalanche.benchmarks import tensors_benchmark  # takes seconds to import: not at the top of the module

    from cfl.streams.avalanche import from_benchmark

    count = tasks or 4
    train, test = (
        [points(30 * task, rng.key(seed, "turning-points", part, task), n) for task in range(count)]
        for part, n in (("train", 96), ("test", 40))
    )
    benchmark = tensors_benchmark(train_tensors=train, test_tensors=test, task_labels=[0] * count)
    return from_benchmark(benchmark, name="turning-points")


turning_points = Benchmark(build_turning_points, "two clouds in the plane, turned", "an example, no paper")


def tanh_net(input_shape, outputs, width: int = 16):
    """One hidden layer with tanh."""
    (inputs,) = input_shape
    return nn.Sequential(nn.Linear(inputs, width), nn.Tanh(), nn.Linear(width, outputs))
