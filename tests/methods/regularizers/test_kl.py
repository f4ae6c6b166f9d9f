"""KL to the global model: value and gradient by hand, the limit FedAvg, and a teacher without noise or gradient."""

import copy

import pytest
import torch
from torch import nn

import cfl
from cfl.contract import Batch, Strategy
from cfl.contract.composed import ComposedMethod
from cfl.core import optim, rng, tree
from cfl.engines.step import LocalStep, StepInputs
from cfl.methods.regularizers import KL
from cfl.methods.regularizers.kl import global_logits
from cfl.models import Model
from tests import toy

BATCH = Batch(toy.random(5, 3), torch.tensor([0, 1, 2, 1, 1]), torch.ones(5, dtype=torch.float64), torch.arange(5))
P, Q = (torch.tensor([pair], dtype=torch.float64) for pair in ((0.9, 0.1), (0.5, 0.5)))


class Fixed:
    """A stand-in for the model, for tests that set the teacher's logits."""

    def evaluation(self):
        return torch.no_grad()


def penalty(rule, teacher, logits, mask=None):
    """The penalty for a teacher's and a client's logits."""
    size = len(logits)
    mask = torch.ones(size, dtype=torch.float64) if mask is None else mask
    batch = Batch(torch.zeros(size, 1), torch.zeros(size, dtype=torch.int64), mask, torch.arange(size))
    ctx = toy.context({"params": {}}, {}, batch, Fixed(), forward=lambda params, batch: teacher)
    return rule.penalty({}, logits, ctx)


def make(*local, module=None):
    module = toy.mlp(3, 4, 3) if module is None else module
    model = Model(module, (3,), [3], multi_head=False, norm_stats="running")
    model.module.train()
    members = {"strategy": Strategy(), **{f"rule{i}": rule for i, rule in enumerate(local)}}
    return model, LocalStep(model, 0, frozenset(), ComposedMethod(members), optim.sgd(0.9, 1e-2))


def trajectory(model, step, steps=4):
    local, seen = step.start(model.params), []
    for index in range(steps):
        local, _ = step(local, StepInputs({"params": model.params}, BATCH, lr=0.1, step=index))
        seen.append(local._replace(params=tree.clone(local.params)))
    return seen


def noisy():
    """A network with dropout and batch normalisation, which differ between training and evaluation."""
    return toy.net(nn.Linear(3, 6), nn.BatchNorm1d(6), nn.ReLU(), nn.Dropout(0.5), nn.Linear(6, 3))


def test_penalty_by_hand():
    # the client's model is the second argument: .9 log(.9 / .5) + .1 log(.1 / .5) = .3681, the reverse is .5108
    assert penalty(KL(beta=1.0, temperature=1.0), P.log(), Q.log()).item() == pytest.approx(0.3681, abs=5e-5)
    assert penalty(KL(beta=1.0, temperature=1.0), Q.log(), P.log()).item() == pytest.approx(0.5108, abs=5e-5)
    assert penalty(KL(beta=0.5, temperature=1.0), P.log(), Q.log()).item() == pytest.approx(0.3681 / 2, abs=5e-5)
    # at T = 2 the odds 9 become 3: .75 log(.75 / .5) + .25 log(.25 / .5) = .1308
    assert penalty(KL(beta=1.0, temperature=2.0), P.log(), Q.log()).item() == pytest.approx(0.1308, abs=5e-5)


def test_penalty_is_the_mean_over_unmasked_samples():
    rule, teacher, logits = KL(temperature=1.0), P.log().repeat(3, 1), torch.cat([Q, P, Q]).log()
    assert penalty(rule, teacher, logits).item() == pytest.approx(2 / 3 * 0.3681, abs=5e-5)
    live = torch.tensor([1.0, 1.0, 0.0], dtype=torch.float64)
    assert penalty(rule, teacher, logits, live).item() == pytest.approx(0.3681 / 2, abs=5e-5)


@pytest.mark.parametrize("temperature", [1.0, 3.0])
def test_gradient_by_the_logits(temperature):
    # (softmax(z / T) - p_T) / T / batch, without a factor T^2
    teacher, logits = toy.random(5, 3), toy.random(5, 3, seed=1)
    found = torch.func.grad(lambda at: penalty(KL(beta=0.7, temperature=temperature), teacher, at))(logits)
    p, q = ((leaf / temperature).softmax(1) for leaf in (teacher, logits))
    assert torch.allclose(found, 0.7 * (q - p) / temperature / 5, atol=1e-12)


def test_gradient_of_a_step_against_autograd():
    model, step = make(KL(beta=0.7, temperature=2.0))
    params = {name: leaf + 0.3 * toy.random(*leaf.shape, seed=7) for name, leaf in model.params.items()}
    ctx = step.context(StepInputs({"params": model.params}, BATCH))
    found = torch.func.grad(step.loss, has_aux=True)(params, {}, ctx)[0]

    teacher, student = copy.deepcopy(model.module), copy.deepcopy(model.module)
    teacher.load_state_dict(model.params)
    student.load_state_dict(params)
    with torch.no_grad():
        p = (teacher(BATCH.x) / 2.0).softmax(1)
    logits = student(BATCH.x)
    kl = (p * (p.log() - (logits / 2.0).log_softmax(1))).sum(1).mean()
    (nn.functional.cross_entropy(logits, BATCH.y) + 0.7 * kl).backward()
    for name, leaf in student.named_parameters():
        assert torch.allclose(found[name], leaf.grad, atol=1e-12)


def test_penalty_is_zero_at_the_global_model_and_not_after_a_step():
    model, step = make(KL())
    ctx = step.context(StepInputs({"params": model.params}, BATCH))

    def term(params):
        return KL().penalty(params, ctx.forward(params, BATCH), ctx).item()

    assert term(model.params) == pytest.approx(0.0, abs=1e-15)
    assert term(trajectory(model, step, steps=1)[0].params) > 1e-6


def test_beta_zero_is_fedavg_to_the_bit():
    (model, plain), (_, distilled) = make(), make(KL(beta=0.0))
    for ours, theirs in zip(trajectory(model, distilled), trajectory(model, plain), strict=True):
        assert all(torch.equal(ours.params[name], theirs.params[name]) for name in model.params)
    runs = [
        cfl.run(toy.config(*more, method=method), stream=toy.stream())
        for method, more in (("kl", ["regularizer.kl.beta=0"]), ("fedavg", []))
    ]
    assert all(torch.equal(leaf, runs[1].params[name]) for name, leaf in runs[0].params.items())


def test_it_keeps_the_client_near_the_global_models_predictions():
    (model, plain), (_, distilled) = make(), make(KL(beta=5.0, temperature=1.0))
    ctx = plain.context(StepInputs({"params": model.params}, BATCH))
    apart = [
        KL(temperature=1.0).penalty({}, ctx.forward(trajectory(model, step, steps=6)[-1].params, BATCH), ctx).item()
        for step in (plain, distilled)
    ]
    assert apart[1] < apart[0] / 2


def test_the_teacher_is_in_evaluation_mode_with_the_global_models_statistics():
    model, step = make(module=noisy())
    shared = {name: leaf.clone() for name, leaf in model.params.items()}
    shared["1.running_mean"] += 0.5
    shared["1.running_var"] *= 3
    own = {name: leaf for name, leaf in model.params.items() if name in model.buffers(0)}  # the client's: 0 and 1
    ctx = step.context(StepInputs({"params": shared}, BATCH), own)
    reference = copy.deepcopy(model.module)
    reference.load_state_dict(shared)
    with torch.no_grad():
        expected, training = reference.eval()(BATCH.x), reference.train()(BATCH.x)
    assert not torch.allclose(expected, training, atol=1e-2)
    before = {name: leaf.clone() for name, leaf in shared.items()}
    assert torch.allclose(global_logits(ctx), expected, atol=1e-12)
    assert all(torch.equal(leaf, shared[name]) for name, leaf in before.items())  # statistics as before
    assert all(layer.training for layer in model.module.modules())  # the client's own passes stay in training mode


def test_the_teacher_has_no_gradient():
    model, step = make(KL())
    params = {name: leaf + toy.random(*leaf.shape, seed=7) for name, leaf in model.params.items()}

    def term(teacher):
        ctx = step.context(StepInputs({"params": teacher}, BATCH))
        return KL().penalty(params, model.logits(params, BATCH.x, 0), ctx)

    gradient, value = torch.func.grad_and_value(term)(model.params)
    assert value > 1e-3
    assert all(leaf.abs().max() == 0 for leaf in gradient.values())


def test_the_clients_running_statistics_come_from_its_own_passes():
    (model, plain), (_, distilled) = make(module=noisy()), make(KL(), module=noisy())
    with rng.fork(1):  # of dropout
        theirs, ours = (trajectory(model, step, steps=1)[0].buffers for step in (plain, distilled))
    assert ours["1.num_batches_tracked"] == 1
    assert all(torch.equal(leaf, theirs[name]) for name, leaf in ours.items())
