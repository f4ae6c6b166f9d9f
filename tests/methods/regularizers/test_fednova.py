"""FedNova: a_i by hand, FedAvg for equal steps, the paper's formula for unequal steps, and the bias it removes."""

from dataclasses import dataclass

import pytest
import torch
from torch import nn

import cfl
from cfl.contract.losses import masked_mean
from cfl.core.options import build
from cfl.methods.regularizers import FedNova
from cfl.methods.regularizers.fednova import effective_steps
from tests import toy


def run(x, y, model, *overrides, strategy=None, fednova=True):
    """A round of two clients with one class each: the run's result, and the clients' models."""
    small = ("tasks=1", "rounds=1", "cohort=2", "partition.clients=2", "partition.name=classes")
    seen = {}
    result = cfl.run(
        toy.config(*small, *overrides, method="fedavg"),
        stream=cfl.from_tensors([(x, y, x, y)]),
        model=model,
        strategy=strategy,
        regularizers={"fednova": FedNova()} if fednova else {},
        observe=lambda info, client, params: seen.update({client: params}),
    )
    return result, seen


def two_classes(first, second):
    y = torch.arange(first + second) >= first
    return toy.random(len(y), 3) + 2.0 * y[:, None], y.long()


def moved(steps, momentum):
    """Distance of `steps` steps with heavy-ball momentum, for lr = gradient = 1."""
    velocity = place = 0.0
    for _ in range(steps):
        velocity = momentum * velocity + 1
        place += velocity
    return place


def test_effective_steps_by_hand():
    # velocities 1, 1.9, 2.71: sums 1, 2.9, 5.61
    assert [effective_steps(steps, 0.9) for steps in (1, 2, 3)] == pytest.approx([1.0, 2.9, 5.61])
    assert [effective_steps(steps, 0.0) for steps in (1, 2, 30)] == [1, 2, 30]
    assert effective_steps(37, 0.6) == pytest.approx(moved(37, 0.6))


@pytest.mark.parametrize("momentum", [0.0, 0.9])
def test_equal_steps_give_fedavg(momentum):
    x, y = two_classes(12, 12)
    options = ("local.batch_size=5", "local.epochs=2", "local.lr=0.1", f"local.momentum={momentum}")
    nova, plain = (run(x, y, toy.mlp(3, 5, 2), *options, fednova=on)[0] for on in (True, False))
    for name, leaf in plain.params.items():
        assert torch.allclose(nova.params[name], leaf, atol=1e-13, rtol=0)


@pytest.mark.parametrize("weights", ["samples", "uniform"])
@pytest.mark.parametrize(
    ("optimizer", "a"),
    [
        (("local.momentum=0.0",), (4, 14)),
        (("local.momentum=0.9",), (moved(4, 0.9), moved(14, 0.9))),
        (("local.optimizer=adam", "local.momentum=0.9"), (4, 14)),  # Adam ignores the momentum of SGD
    ],
    ids=["sgd", "momentum", "adam"],
)
def test_unequal_steps_give_the_papers_formula(optimizer, a, weights):
    # 4 and 20 samples in batches of 3: 2 and 7 steps an epoch, two epochs
    x, y = two_classes(4, 20)
    model = toy.mlp(3, 5, 2)
    start = {name: leaf.detach().clone() for name, leaf in model.named_parameters()}
    options = ("local.batch_size=3", "local.epochs=2", "local.lr=0.05", f"agg.weights={weights}", *optimizer)
    result, clients = run(x, y, model, *options)
    p = (4 / 24, 20 / 24) if weights == "samples" else (0.5, 0.5)
    tau = p[0] * a[0] + p[1] * a[1]
    for name, leaf in start.items():
        mean = sum(p[i] * (leaf - clients[i][name]) / a[i] for i in (0, 1))
        assert torch.allclose(result.params[name], leaf - tau * mean, atol=1e-13, rtol=0), name
    average = p[0] * clients[0]["2.weight"] + p[1] * clients[1]["2.weight"]
    assert not torch.allclose(result.params["2.weight"], average, atol=1e-3)  # FedAvg gives another model


@dataclass(frozen=True)
class Quadratic(cfl.Strategy):
    """Loss (w - target)^2 / 2 of each output; the targets of the two classes are -1 and 1."""

    def loss(self, logits, ctx):
        target = 2.0 * ctx.batch.y - 1.0
        return masked_mean((logits - target[:, None]).square().sum(dim=1) / 2, ctx.batch.mask)


@pytest.mark.parametrize(("fednova", "expected"), [(True, 0.0), (False, 9 / 11)])
def test_more_local_steps_do_not_pull_the_fixed_point_away(fednova, expected):
    # With lr h = 1e-4, k steps move a client by 1 - (1 - 1e-4)^k, about k 1e-4, of the way to its optimum. The mean of
    # 1 step towards -1 and 10 steps towards 1 vanishes at (10 - 1) / (10 + 1) = 0.818; of the moves per step, at 0.
    x, y = torch.ones(11, 1), (torch.arange(11) > 0).long()  # one and ten samples in batches of one: 1 and 10 steps
    options = ("local.batch_size=1", "local.lr=1e-4", "agg.weights=uniform")
    after = []
    for start in (0.0, 1.0):
        model = toy.net(nn.Linear(1, 2, bias=False))
        nn.init.constant_(model[0].weight, start)
        after.append(run(x, y, model, *options, strategy=Quadratic(), fednova=fednova)[0].params["0.weight"])
    # a round is an affine map, w -> after[0] + slope w, determined by two points
    slope = after[1] - after[0]
    fixed = after[0] / (1 - slope)
    assert torch.allclose(fixed, torch.full_like(fixed, expected), atol=1e-3, rtol=0)


def test_running_statistics_are_averaged_and_not_scaled():
    x, y = two_classes(4, 20)
    model = toy.net(nn.Linear(3, 4), nn.BatchNorm1d(4), nn.ReLU(), nn.Linear(4, 2))
    result, clients = run(x, y, model, "local.batch_size=2", "local.lr=0.1")
    for name in ("1.running_mean@0", "1.running_var@0"):
        mean = 4 / 24 * clients[0][name] + 20 / 24 * clients[1][name]
        assert torch.allclose(result.params[name], mean, atol=1e-13, rtol=0)
    assert result.params["1.num_batches_tracked@0"].item() == 2  # the first client's: two batches of two


def test_a_client_sends_one_more_number():
    plain, nova = (cfl.run(toy.config(method=method), stream=toy.stream()) for method in ("fedavg", "fednova"))
    # three tasks of two rounds with three clients each; a number of float32
    assert nova.metrics["bytes_up"] - plain.metrics["bytes_up"] == 3 * 2 * 3 * 4
    assert nova.metrics["bytes_down"] == plain.metrics["bytes_down"]


def test_it_has_no_options():
    with pytest.raises(cfl.CflError, match="unknown option 'regularizer.fednova.ccvr'"):
        build(FedNova, {"ccvr": True}, "regularizer.fednova")
