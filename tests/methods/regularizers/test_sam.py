"""FedSAM and FedASAM: steps on a quadratic by hand, the points of evaluation, and the limit FedAvg."""

from dataclasses import dataclass, field

import numpy as np
import pytest
import torch
from torch import nn

import cfl
from cfl.contract import Batch, Strategy
from cfl.contract.composed import ComposedMethod
from cfl.core import optim, tree
from cfl.engines.step import LocalStep, StepInputs
from cfl.methods.regularizers import FedASAM, FedProx, FedSAM
from cfl.models import Model
from tests import toy

BATCH = Batch(toy.random(6, 3), torch.tensor([0, 1, 2, 1, 1, 0]), torch.ones(6, dtype=torch.float64), torch.arange(6))
H = torch.tensor([[3.0, 1.0], [1.0, 2.0]], dtype=torch.float64)
RULES = {"fedsam": FedSAM, "fedasam": FedASAM}


class Point(nn.Module):
    """Two weights that are the outputs, for every input."""

    def __init__(self, *w):
        super().__init__()
        self.w = nn.Parameter(torch.tensor(w, dtype=torch.float64))

    def forward(self, x):
        return self.w.expand(len(x), 2)


@dataclass(frozen=True)
class Quadratic(Strategy):
    """The loss w' H w / 2."""

    def loss(self, logits, ctx):
        return logits[0] @ H @ logits[0] / 2


@dataclass(frozen=True)
class Watched(Strategy):
    """Cross-entropy that records the samples, outputs and value of each evaluation as plain numbers."""

    seen: list = field(default_factory=list)

    def loss(self, logits, ctx):
        value = super().loss(logits, ctx)
        self.seen.append((ctx.batch.x.tolist(), logits.tolist(), value.item()))
        return value


def make(*local, strategy=None, module=None, optimizer=None, shape=(3,), classes=3):
    module = toy.mlp(3, 4, 3) if module is None else module
    model = Model(module, shape, [classes], multi_head=False, norm_stats="running")
    model.module.train()
    members = {"strategy": strategy or Strategy(), **{f"rule{i}": rule for i, rule in enumerate(local)}}
    return model, LocalStep(model, 0, frozenset(), ComposedMethod(members), optimizer or optim.sgd())


def one(model, step, batch=BATCH, lr=0.1):
    return step(step.start(model.params), StepInputs({"params": model.params}, batch, lr=lr))


def quadratic_step(rule, *w):
    """The gradient that the optimiser got on w' H w / 2."""
    model, step = make(rule, strategy=Quadratic(), module=Point(*w), shape=(2,), classes=2)
    after, _ = one(model, step, BATCH._replace(x=torch.zeros(6, 2)), lr=1.0)
    return model.params["w"] - after.params["w"]


def test_sam_on_a_quadratic():
    # e = rho H w / |H w|, gradient H (w + e). w = (1, -1): H w = (2, -1), e = .5 (2, -1) / sqrt 5
    w, e = torch.tensor([1.0, -1.0], dtype=torch.float64), torch.tensor([1.0, -0.5], dtype=torch.float64) / 5**0.5
    assert torch.allclose(quadratic_step(FedSAM(rho=0.5), 1.0, -1.0), H @ (w + e), atol=1e-12)


def test_asam_on_a_quadratic():
    # H w = (5, 0) at (2, -1): |w| g = (10, 0), e = .5 w^2 g / 10 = (1, 0)
    assert torch.allclose(quadratic_step(FedASAM(rho=0.5), 2.0, -1.0), H @ torch.tensor([3.0, -1.0]).double())


def test_perturbations_by_hand():
    params = {"a": torch.tensor([3.0, -0.5]), "b": torch.tensor(2.0)}
    grads = {"a": torch.tensor([1.0, -4.0]), "b": torch.tensor(-1.0)}
    # SAM: |g| = sqrt(1 + 16 + 1), over all leaves together
    sam = FedSAM(rho=2.0).perturbation(params, grads)
    assert sam["a"].tolist() == pytest.approx([2 / 18**0.5, -8 / 18**0.5])
    assert sam["b"].item() == pytest.approx(-2 / 18**0.5)
    # ASAM: |w| g = (3, -2, -2), of length sqrt 17; w^2 g = (9, -1, -4)
    asam = FedASAM(rho=2.0).perturbation(params, grads)
    assert asam["a"].tolist() == pytest.approx([18 / 17**0.5, -2 / 17**0.5])
    assert asam["b"].item() == pytest.approx(-8 / 17**0.5)


def test_length_of_the_perturbations():
    params, grads = ({"a": toy.random(4, 3, seed=s), "b": toy.random(4, seed=s + 1)} for s in (1, 3))
    e = FedSAM(rho=0.7).perturbation(params, grads)
    assert tree.dot(e, e).sqrt().item() == pytest.approx(0.7, abs=1e-9)
    e = FedASAM(rho=0.7).perturbation(params, grads)
    relative = tree.map(lambda leaf, param: leaf / param, e, params)  # ASAM bounds |e / w|
    assert tree.dot(relative, relative).sqrt().item() == pytest.approx(0.7, abs=1e-9)
    scaled = FedASAM(rho=0.7).perturbation(tree.scale(params, 10.0), tree.scale(grads, 0.1))
    assert all(torch.allclose(leaf, 10 * e[name]) for name, leaf in scaled.items())  # the same net in other units


@pytest.mark.parametrize("rule", [FedSAM(), FedASAM()])
def test_no_gradient_means_no_perturbation(rule):
    params = {"a": torch.tensor([3.0, 0.0])}
    assert rule.perturbation(params, {"a": torch.zeros(2)})["a"].tolist() == [0, 0]
    if isinstance(rule, FedASAM):  # weights of 0 have scale 0
        assert rule.perturbation({"a": torch.zeros(2)}, {"a": torch.ones(2)})["a"].tolist() == [0, 0]


@pytest.mark.parametrize("kind", RULES)
def test_a_step_starts_at_the_weights_with_the_gradient_of_the_perturbed_point(kind):
    rule, lr, momentum, decay = RULES[kind](rho=0.5), 0.1, 0.9, 0.05
    model, step = make(rule, optimizer=optim.sgd(momentum, decay))

    def gradient(at):
        leaves = {name: leaf.clone().requires_grad_() for name, leaf in at.items()}
        nn.functional.cross_entropy(model.logits(leaves, BATCH.x, 0), BATCH.y).backward()
        return {name: leaf.grad for name, leaf in leaves.items()}

    local, velocity = step.start(model.params), tree.map(torch.zeros_like, model.params)
    for index in range(4):
        before = tree.clone(local.params)
        local, _ = step(local, StepInputs({"params": model.params}, BATCH, lr=lr, step=index))
        g = gradient(before)
        weight = tree.map(torch.abs, before) if kind == "fedasam" else tree.map(torch.ones_like, before)
        length = sum((weight[name] * leaf).square().sum() for name, leaf in g.items()).sqrt()
        beside = {name: leaf + 0.5 * weight[name] ** 2 * g[name] / length for name, leaf in before.items()}
        steepest = gradient(beside)
        velocity = {name: momentum * v + steepest[name] + decay * before[name] for name, v in velocity.items()}
        assert any((steepest[name] - g[name]).abs().max() > 1e-3 for name in g)
        for name, leaf in local.params.items():
            assert torch.allclose(leaf, before[name] - lr * velocity[name], atol=1e-9)


@pytest.mark.parametrize("kind", RULES)
def test_both_points_are_evaluated_once_on_the_same_minibatch(kind):
    rule, strategy = RULES[kind](rho=0.5), Watched()
    model, step = make(rule, strategy=strategy)
    _, loss = one(model, step)
    (batch, here, low), (same, beside, high) = strategy.seen
    assert batch == same == BATCH.x.tolist()
    np.testing.assert_allclose(here, model.logits(model.params, BATCH.x, 0), atol=1e-12)
    assert np.abs(np.subtract(beside, here)).max() > 1e-3
    assert high > low  # the perturbation goes uphill
    assert loss.item() == low  # the reported loss is that of the unperturbed weights


def test_other_penalties_are_part_of_the_sharpness():
    # loss w' H w / 2 + mu |w - w_global|^2 / 2 with w_global = 0: SAM on the quadratic H + mu
    model, step = make(
        FedSAM(rho=0.5), FedProx(mu=2.0), strategy=Quadratic(), module=Point(1, -1), shape=(2,), classes=2
    )
    shared = {"params": {"w": torch.zeros(2, dtype=torch.float64)}}
    batch = BATCH._replace(x=torch.zeros(6, 2))
    after, _ = step(step.start(model.params), StepInputs(shared, batch, lr=1.0))
    w, both = model.params["w"], H + 2 * torch.eye(2)
    e = 0.5 * both @ w / (both @ w).norm()
    assert torch.allclose(w - after.params["w"], both @ (w + e), atol=1e-12)


@pytest.mark.parametrize("kind", RULES)
def test_running_statistics_come_from_the_unperturbed_weights(kind):
    net = toy.net(nn.Linear(3, 6), nn.BatchNorm1d(6), nn.ReLU(), nn.Linear(6, 3))
    (model, plain), (_, sharp) = make(module=net), make(RULES[kind](rho=5.0), module=net)
    (theirs, _), (ours, _) = one(model, plain), one(model, sharp)
    assert any(not torch.allclose(ours.params[name], leaf) for name, leaf in theirs.params.items())
    assert ours.buffers["1.num_batches_tracked"] == 1
    assert all(torch.equal(ours.buffers[name], leaf) for name, leaf in theirs.buffers.items())


@pytest.mark.parametrize("kind", RULES)
def test_rho_zero_is_fedavg_to_the_bit(kind):
    (model, plain), (_, sharp) = make(), make(RULES[kind](rho=0.0))
    for ours, theirs in zip(one(model, sharp)[0], one(model, plain)[0], strict=True):
        assert all(torch.equal(ours[name], theirs[name]) for name in ours)
    runs = [
        cfl.run(toy.config(*more, method=method), stream=toy.stream())
        for method, more in ((kind, [f"regularizer.{kind}.rho=0"]), ("fedavg", []))
    ]
    assert all(torch.equal(leaf, runs[1].params[name]) for name, leaf in runs[0].params.items())
