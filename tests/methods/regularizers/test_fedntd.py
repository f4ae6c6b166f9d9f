"""FedNTD: by hand, against NumPy with the class deleted, the free true class, and the limit FedAvg."""

import math

import numpy as np
import pytest
import torch

import cfl
from cfl.contract import Batch, Strategy
from cfl.contract.composed import ComposedMethod
from cfl.core import optim, tree
from cfl.engines.step import LocalStep, StepInputs
from cfl.methods.regularizers import FedNTD
from cfl.models import Model
from cfl.models.handle import NO_CLASS
from tests import toy

Y = torch.tensor([0, 3, 2, 1, 1])
BATCH = Batch(toy.random(5, 3), Y, torch.ones(5, dtype=torch.float64), torch.arange(5))
TRUE = torch.nn.functional.one_hot(Y, 4).bool()
MODEL = Model(toy.mlp(3, 6, 4), (3,), [4], multi_head=False)


def make(*local):
    MODEL.module.train()
    members = {"strategy": Strategy(), **{f"rule{i}": rule for i, rule in enumerate(local)}}
    return MODEL, LocalStep(MODEL, 0, frozenset(), ComposedMethod(members), optim.sgd(0.9, 1e-2))


def trajectory(model, step, steps=4):
    local, seen = step.start(model.params), []
    for index in range(steps):
        local, _ = step(local, StepInputs({"params": model.params}, BATCH, lr=0.1, step=index))
        seen.append(tree.clone(local.params))
    return seen


def penalty(rule, teacher, logits, y=Y):
    """The penalty for the logits of the global model, `teacher` (n, classes), and of the client, `logits`."""
    n = len(y)
    batch = Batch(torch.zeros(n, 1), y, torch.ones(n, dtype=torch.float64), torch.arange(n))
    ctx = toy.context({"params": {}}, {}, batch, MODEL, forward=lambda params, batch: teacher)
    return rule.penalty({}, logits, ctx)


def without_the_class(teacher, logits, tau, y=Y):
    """tau^2 KL of the softmax functions over the classes without the true one: the mean over samples."""
    total = 0.0
    for theirs, ours, label in zip(teacher.numpy(), logits.numpy(), y.tolist(), strict=True):
        p, q = (np.exp(np.delete(leaf, label) / tau) for leaf in (theirs, ours))
        p, q = p / p.sum(), q / q.sum()
        total += (p * np.log(p / q)).sum()
    return tau**2 * total / len(y)


def test_penalty_by_hand():
    # without class 2: (.9, .1) and (.5, .5); .9 log(.9 / .5) + .1 log(.1 / .5) = .3681, reverse .5108
    p, q = (torch.tensor([row], dtype=torch.float64).log() for row in ((0.9, 0.1, 7.0), (0.5, 0.5, 0.2)))
    y = torch.tensor([2])
    assert penalty(FedNTD(beta=1.0, tau=1.0), p, q, y).item() == pytest.approx(0.3681, abs=5e-5)
    assert penalty(FedNTD(beta=1.0, tau=1.0), q, p, y).item() == pytest.approx(0.5108, abs=5e-5)
    assert penalty(FedNTD(beta=0.5, tau=1.0), p, q, y).item() == pytest.approx(0.3681 / 2, abs=5e-5)
    # at tau = 2 the odds 9 become 3: .75 log(.75 / .5) + .25 log(.25 / .5) = .13081, and tau^2 = 4
    assert penalty(FedNTD(beta=1.0, tau=2.0), p, q, y).item() == pytest.approx(4 * 0.13081, abs=5e-5)


@pytest.mark.parametrize("tau", [0.5, 1.0, 3.0])
def test_penalty_equals_that_with_the_class_deleted(tau):
    teacher, logits = toy.random(5, 4), toy.random(5, 4, seed=1)
    expected = without_the_class(teacher, logits, tau)
    assert expected > 0.1
    assert penalty(FedNTD(tau=tau), teacher, logits).item() == pytest.approx(expected, rel=1e-12)
    assert penalty(FedNTD(tau=tau, beta=0.3), teacher, logits).item() == pytest.approx(0.3 * expected, rel=1e-12)


@pytest.mark.parametrize("tau", [1.0, 3.0])
def test_gradient_by_the_logits(tau):
    # tau (q - p) / batch over the other classes, 0 for the true class
    teacher, logits = toy.random(5, 4), toy.random(5, 4, seed=1)
    found = torch.func.grad(lambda at: penalty(FedNTD(tau=tau), teacher, at))(logits)
    p, q = ((leaf.masked_fill(TRUE, -math.inf) / tau).softmax(1) for leaf in (teacher, logits))
    assert torch.allclose(found, tau * (q - p) / 5, atol=1e-12)
    assert found[TRUE].abs().max() == 0 < found[~TRUE].abs().min()


def test_logits_of_the_true_class_do_not_matter():
    teacher, logits = toy.random(5, 4), toy.random(5, 4, seed=1)
    found = penalty(FedNTD(), teacher, logits).item()
    noise = 10 * toy.random(5, 4, seed=2) * TRUE
    assert penalty(FedNTD(), teacher, logits + noise).item() == found
    assert penalty(FedNTD(), teacher + noise, logits).item() == found
    assert penalty(FedNTD(), teacher, logits + noise.roll(1, dims=1)).item() != pytest.approx(found, rel=1e-2)


def test_equal_logits_have_no_penalty():
    teacher = toy.random(5, 4)
    assert penalty(FedNTD(tau=2.0), teacher, teacher).item() == 0
    assert penalty(FedNTD(tau=2.0), teacher, teacher + 3 + 5 * TRUE).item() == pytest.approx(0, abs=1e-15)


def test_two_classes_leave_nothing_to_distil():
    y = Y % 2
    value = penalty(FedNTD(), toy.random(5, 2), toy.random(5, 2, seed=1), y)
    assert value.item() == 0


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_classes_that_a_narrow_head_lacks_do_not_count(dtype):
    teacher, logits = toy.random(5, 4).to(dtype), toy.random(5, 4, seed=1).to(dtype)
    lacking = torch.full((5, 2), NO_CLASS, dtype=dtype)

    def wide(at):
        return penalty(FedNTD(tau=3.0), torch.cat([teacher, lacking], dim=1), torch.cat([at, lacking], dim=1))

    gradient, value = torch.func.grad_and_value(wide)(logits)
    assert value.item() == pytest.approx(without_the_class(teacher, logits, 3.0), rel=1e-5)
    narrow = torch.func.grad(lambda at: penalty(FedNTD(tau=3.0), teacher, at))(logits)
    assert torch.allclose(gradient, narrow, atol=1e-6)


def test_penalty_is_zero_at_the_global_model_and_not_after_a_step():
    model, step = make(FedNTD())
    ctx = step.context(StepInputs({"params": model.params}, BATCH))

    def term(params):
        return FedNTD().penalty(params, ctx.forward(params, BATCH), ctx).item()

    assert term(model.params) == 0
    assert term(trajectory(model, step, steps=1)[0]) > 1e-6


def test_a_step_minimises_the_loss_plus_the_penalty():
    model, step = make(FedNTD(beta=0.7, tau=2.0))
    params = {name: leaf + 0.3 * toy.random(*leaf.shape, seed=7) for name, leaf in model.params.items()}
    ctx = step.context(StepInputs({"params": model.params}, BATCH))
    found = torch.func.grad(step.loss, has_aux=True)(params, {}, ctx)[0]

    leaves = {name: leaf.clone().requires_grad_() for name, leaf in params.items()}
    teacher, logits = model.logits(model.params, BATCH.x, 0), model.logits(leaves, BATCH.x, 0)
    p, log_q = (teacher / 2)[~TRUE].view(5, 3).softmax(1), (logits / 2)[~TRUE].view(5, 3).log_softmax(1)
    distillation = 2.0**2 * (p * (p.log() - log_q)).sum(1).mean()
    (torch.nn.functional.cross_entropy(logits, Y) + 0.7 * distillation).backward()
    for name, leaf in leaves.items():
        assert torch.allclose(found[name], leaf.grad, atol=1e-12)


def test_the_teacher_has_no_gradient():
    model, step = make(FedNTD())
    params = {name: leaf + toy.random(*leaf.shape, seed=7) for name, leaf in model.params.items()}

    def term(teacher):
        ctx = step.context(StepInputs({"params": teacher}, BATCH))
        return FedNTD().penalty(params, model.logits(params, BATCH.x, 0), ctx)

    gradient, value = torch.func.grad_and_value(term)(model.params)
    assert value > 1e-3
    assert all(leaf.abs().max() == 0 for leaf in gradient.values())


def test_beta_zero_is_fedavg_to_the_bit():
    (model, plain), (_, distilled) = make(), make(FedNTD(beta=0.0))
    for ours, theirs in zip(trajectory(model, distilled), trajectory(model, plain), strict=True):
        assert all(torch.equal(ours[name], theirs[name]) for name in ours)
    runs = [
        cfl.run(toy.config(*more, method=method), stream=toy.stream())
        for method, more in (("fedntd", ["regularizer.fedntd.beta=0"]), ("fedavg", []))
    ]
    assert all(torch.equal(leaf, runs[1].params[name]) for name, leaf in runs[0].params.items())


def test_it_keeps_the_global_models_predictions_of_the_other_classes():
    (model, plain), (_, distilled) = make(), make(FedNTD(beta=5.0))
    teacher = model.logits(model.params, BATCH.x, 0)
    free, held = (
        without_the_class(teacher, model.logits(trajectory(model, step, steps=6)[-1], BATCH.x, 0), 1.0)
        for step in (plain, distilled)
    )
    assert held < free / 2
