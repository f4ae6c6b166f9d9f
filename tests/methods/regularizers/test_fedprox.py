"""FedProx: gradient by finite differences, the limit FedAvg, and a reference that is a copy of the weights."""

import pytest
import torch
from torch import nn

from cfl.contract import Batch, Strategy
from cfl.contract.composed import ComposedMethod
from cfl.core import ConfigError, optim, rng, tree
from cfl.core.options import build
from cfl.engines.step import LocalStep, StepInputs
from cfl.methods.regularizers import FedProx
from cfl.models import Model
from tests.toy import context

X = torch.randn(5, 3, dtype=torch.float64, generator=rng.generator(1))
BATCH = Batch(X, torch.tensor([0, 1, 0, 1, 1]), torch.ones(5, dtype=torch.float64), torch.arange(5))


def make(*local, lr_decay=0.0):
    with rng.fork(1):
        model = Model(nn.Sequential(nn.Linear(3, 4), nn.Tanh(), nn.Linear(4, 2)).double(), (3,), [2], multi_head=False)
    members = {"strategy": Strategy(), **{f"fedprox{i}": rule for i, rule in enumerate(local)}}
    return model, LocalStep(model, 0, frozenset(), ComposedMethod(members), optim.sgd(0.9, lr_decay))


def trajectory(model, step, steps=6):
    local, seen = step.start(model.params), []
    for index in range(steps):
        local, _ = step(local, StepInputs({"params": model.params}, BATCH, lr=0.1, step=index))
        seen.append(tree.clone(local.params))
    return seen


def test_penalty_by_hand():
    # distances: (3 - 1)^2 + (0 - 4)^2 = 20 and (1 - 0)^2 = 1; mu / 2 * 21 = 10.5 with mu 1
    shared = {"params": {"a": torch.tensor([1.0, 4.0]), "b": torch.tensor(0.0), "other": torch.tensor(9.0)}}
    params = {"a": torch.tensor([3.0, 0.0]), "b": torch.tensor(1.0)}
    assert FedProx(mu=1.0).penalty(params, torch.zeros(1, 2), context(shared, {}, BATCH)).item() == pytest.approx(10.5)
    assert FedProx(mu=0.2).penalty(params, torch.zeros(1, 2), context(shared, {}, BATCH)).item() == pytest.approx(2.1)


def test_gradient_by_finite_differences():
    mu, (model, step) = 0.7, make(FedProx(mu=0.7))
    params = {name: leaf + 0.3 for name, leaf in model.params.items()}  # away from the reference
    ctx = step.context(StepInputs({"params": model.params}, BATCH))
    gradient, (loss, _) = torch.func.grad(step.loss, has_aux=True)(params, {}, ctx)

    def objective(at):
        logits = model.logits(at, X, 0)
        distance = sum((at[name] - model.params[name]).square().sum() for name in at)
        return nn.functional.cross_entropy(logits, BATCH.y) + mu / 2 * distance

    for name, leaf in params.items():
        for i in range(leaf.numel()):
            bump = torch.zeros(leaf.numel(), dtype=leaf.dtype)
            bump[i] = 1e-5
            bump = bump.reshape(leaf.shape)
            slope = (objective({**params, name: leaf + bump}) - objective({**params, name: leaf - bump})) / 2e-5
            assert gradient[name].flatten()[i].item() == pytest.approx(slope.item(), abs=1e-6)
    assert loss.item() == pytest.approx(nn.functional.cross_entropy(model.logits(params, X, 0), BATCH.y).item())


def test_gradient_is_the_plain_one_plus_mu_times_the_distance():
    (model, plain), (_, prox) = make(), make(FedProx(mu=0.7))
    params = {name: leaf + 0.3 for name, leaf in model.params.items()}
    gradients = []
    for step in (plain, prox):
        ctx = step.context(StepInputs({"params": model.params}, BATCH))
        gradients.append(torch.func.grad(step.loss, has_aux=True)(params, {}, ctx)[0])
    for name in params:
        assert torch.allclose(gradients[1][name], gradients[0][name] + 0.7 * 0.3, atol=1e-12)


def test_mu_zero_is_fedavg_to_the_bit():
    (model, plain), (_, prox) = make(lr_decay=1e-2), make(FedProx(mu=0.0), lr_decay=1e-2)
    for ours, theirs in zip(trajectory(model, prox), trajectory(model, plain), strict=True):
        assert all(torch.equal(ours[name], theirs[name]) for name in ours)


def test_the_reference_is_no_alias():
    model, step = make(FedProx(mu=0.5))
    shared = {"params": model.params}
    assert FedProx(mu=0.5).penalty(step.start(model.params).params, X, context(shared, {}, BATCH)).item() == 0
    after = trajectory(model, step, steps=1)[0]
    assert FedProx(mu=0.5).penalty(after, X, context(shared, {}, BATCH)).item() > 0


def test_the_first_step_is_fedavgs_and_later_steps_stay_nearer():
    (model, plain), (_, prox) = make(), make(FedProx(mu=2.0))
    free, held = trajectory(model, plain), trajectory(model, prox)
    assert all(torch.equal(free[0][name], held[0][name]) for name in free[0])

    def distance(params):
        return sum((params[name] - model.params[name]).square().sum().item() for name in params)

    assert distance(held[-1]) < distance(free[-1])


def test_two_proximal_terms_add_up():
    model, twice = make(FedProx(mu=0.2), FedProx(mu=0.3))
    _, once = make(FedProx(mu=0.5))
    for ours, theirs in zip(trajectory(model, twice), trajectory(model, once), strict=True):
        assert all(torch.allclose(ours[name], theirs[name], atol=1e-12) for name in ours)


def test_negative_mu_is_refused():
    with pytest.raises(ConfigError, match=r"regularizer\.fedprox\.mu must be a number in \[0, inf\), not -1\.0"):
        build(FedProx, {"mu": -1.0}, "regularizer.fedprox")
