"""Direct projection: by hand, the conditions of its quadratic program, steps, and the limit FedAvg."""

import numpy as np
import pytest
import torch
from scipy.optimize import minimize, nnls
from torch import nn

import cfl
from cfl.contract import Batch, Strategy
from cfl.contract.composed import ComposedMethod
from cfl.core import optim, tree
from cfl.engines.step import LocalStep, StepInputs
from cfl.methods.regularizers import ProxProjection
from cfl.methods.regularizers.prox_projection import without_conflict
from cfl.models import Model
from tests import toy

BATCH = Batch(toy.random(6, 3), torch.tensor([0, 1, 2, 1, 1, 0]), torch.ones(6, dtype=torch.float64), torch.arange(6))


def draw(seed):
    """A gradient and a reference of two leaves each."""
    return [
        {"a": toy.random(3, 2, seed=2 * seed + part), "b": toy.random(2, seed=100 + 2 * seed + part)}
        for part in range(2)
    ]


def make(*local, optimizer=None):
    model = Model(toy.mlp(3, 4, 3), (3,), [3], multi_head=False)
    model.module.train()
    members = {"strategy": Strategy(), **{f"rule{i}": rule for i, rule in enumerate(local)}}
    return model, LocalStep(model, 0, frozenset(), ComposedMethod(members), optimizer or optim.sgd())


def elsewhere(model, seed=7):
    """The global model's weights plus random shifts."""
    return {
        name: leaf + 0.5 * toy.random(*leaf.shape, seed=seed + number)
        for number, (name, leaf) in enumerate(model.params.items())
    }


def by_autograd(model, params, loss):
    leaves = {name: leaf.clone().requires_grad_() for name, leaf in params.items()}
    loss(model.logits(leaves, BATCH.x, 0), leaves).backward()
    return torch.cat([leaf.grad.flatten() for leaf in leaves.values()])


def plain(logits, leaves):
    return nn.functional.cross_entropy(logits, BATCH.y)


def proximal(kind, model, temperature):
    """The proximal loss as an explicit formula."""
    p = (model.logits(model.params, BATCH.x, 0) / temperature).softmax(1)

    def loss(logits, leaves):
        if kind == "l2":
            return sum((leaf - model.params[name]).square().sum() for name, leaf in leaves.items()) / 2
        return (p * (p.log() - (logits / temperature).log_softmax(1))).sum(1).mean()

    return loss


# --- the quadratic program -------------------------------------------------------------------------------------------


def test_projection_by_hand():
    # <(3, -4), (0, 2)> = -8, |(0, 2)|^2 = 4: (3, -4) + 2 (0, 2) = (3, 0)
    found = without_conflict({"w": torch.tensor([3.0, -4.0])}, {"w": torch.tensor([0.0, 2.0])}, 1e-6)
    assert found["w"].tolist() == [3.0, 0.0]
    # over all leaves together: <g, r> = 1 - 3 = -2, |r|^2 = 2: g + r
    grads, reference = ({"a": torch.tensor([one]), "b": torch.tensor([other])} for one, other in ((1.0, -3.0), (1, 1)))
    found = without_conflict(grads, reference, 1e-6)
    assert (found["a"].item(), found["b"].item()) == (2.0, -2.0)


def test_projecting_always_also_removes_an_agreeing_component():
    # <(3, 4), (0, 2)> = 8, |(0, 2)|^2 = 4: (3, 4) - 2 (0, 2) = (3, 0); at most 0.5 of (0, 2): (3, 3)
    grads, reference = {"w": torch.tensor([3.0, 4.0])}, {"w": torch.tensor([0.0, 2.0])}
    assert without_conflict(grads, reference, 1e-6, always=True)["w"].tolist() == [3.0, 0.0]
    assert without_conflict(grads, reference, 1e-6, always=True, most=0.5)["w"].tolist() == [3.0, 3.0]
    for short in (0.0, 1e-7):
        assert without_conflict(grads, {"w": torch.tensor([0.0, short])}, 1e-6, always=True)["w"].tolist() == [3.0, 4.0]


def test_a_bounded_coefficient_leaves_a_conflict():
    # the coefficient of (0, 2) is -2, as above; a bound of 1.5 leaves (3, -1), and a bound of 2 changes nothing
    grads, reference = {"w": torch.tensor([3.0, -4.0])}, {"w": torch.tensor([0.0, 2.0])}
    assert without_conflict(grads, reference, 1e-6, most=1.5)["w"].tolist() == [3.0, -1.0]
    assert without_conflict(grads, reference, 1e-6, most=2.0)["w"].tolist() == [3.0, 0.0]


def test_a_gradient_without_conflict_stays_as_it_is_to_the_bit():
    grads, reference = draw(0)
    agreeing = grads if tree.dot(grads, reference) > 0 else tree.scale(grads, -1.0)
    found = without_conflict(agreeing, reference, 1e-6)
    assert all(torch.equal(leaf, agreeing[name]) for name, leaf in found.items())


@pytest.mark.parametrize("seed", range(20))
def test_conditions_of_karush_kuhn_and_tucker(seed):
    grads, reference = draw(seed)
    found = without_conflict(grads, reference, 1e-6)
    step = tree.sub(found, grads)
    multiplier = tree.dot(step, reference) / tree.dot(reference, reference)
    assert multiplier >= 0
    assert all(torch.allclose(leaf, multiplier * reference[name], atol=1e-12) for name, leaf in step.items())
    assert tree.dot(found, reference) >= -1e-10
    assert abs(multiplier * tree.dot(found, reference)) < 1e-10
    assert tree.dot(found, found) <= tree.dot(grads, grads)
    assert (multiplier > 0) == (tree.dot(grads, reference) < 0)


@pytest.mark.parametrize("seed", range(20))
def test_it_equals_the_solutions_of_general_solvers(seed):
    grads, reference = draw(seed)
    g, r = (toy.flat(leaves).numpy() for leaves in (grads, reference))
    found = toy.flat(without_conflict(grads, reference, 1e-6)).numpy()
    # the dual: the multiplier m >= 0 that minimises |g + m r|
    multiplier, _ = nnls(r[:, None], -g)
    np.testing.assert_allclose(found, g + multiplier[0] * r, atol=1e-12)
    primal = minimize(
        lambda x: ((x - g) ** 2).sum() / 2,
        np.zeros_like(g),
        jac=lambda x: x - g,
        constraints={"type": "ineq", "fun": lambda x: x @ r, "jac": lambda x: r},
        method="SLSQP",
        options={"ftol": 1e-14},
    )
    np.testing.assert_allclose(found, primal.x, atol=1e-6)


def test_the_draws_have_both_cases():
    wrong = [bool(tree.dot(*draw(seed)) < 0) for seed in range(20)]
    assert 5 <= sum(wrong) <= 15


def test_projecting_again_or_by_a_longer_reference_changes_nothing():
    grads, reference = draw(0)
    grads = grads if tree.dot(grads, reference) < 0 else tree.scale(grads, -1.0)
    once = without_conflict(grads, reference, 1e-6)
    for again in (without_conflict(once, reference, 1e-6), without_conflict(grads, tree.scale(reference, 50.0), 1e-6)):
        assert all(torch.allclose(leaf, once[name], atol=1e-12) for name, leaf in again.items())


@pytest.mark.parametrize("length, projects", [(0.0, False), (0.9e-6, False), (1.1e-6, True)])
def test_a_reference_shorter_than_the_smallest_is_ignored(length, projects):
    grads = {"w": torch.tensor([3.0, -4.0], dtype=torch.float64)}
    found = without_conflict(grads, {"w": torch.tensor([0.0, length], dtype=torch.float64)}, 1e-6)
    assert found["w"].tolist() == pytest.approx([3.0, 0.0] if projects else [3.0, -4.0])


def test_neither_argument_is_written_to():
    grads, reference = draw(0)
    before = tree.clone(grads), tree.clone(reference)
    without_conflict(grads, tree.scale(reference, -1.0), 1e-6)
    assert all(torch.equal(a[name], b[name]) for a, b in zip(before, (grads, reference), strict=True) for name in a)


# --- steps -----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("kind, temperature", [("l2", 3.0), ("kl", 3.0), ("kl", 1.0)])
def test_the_optimiser_gets_the_projected_gradient(kind, temperature):
    model, step = make(ProxProjection(proximal=kind, temperature=temperature))
    conflicts = 0
    for seed in range(6):
        params = elsewhere(model, seed=10 * seed)
        after, _ = step(step.start(params), StepInputs({"params": model.params}, BATCH, lr=1.0))
        found = toy.flat(tree.sub(params, after.params))
        g = by_autograd(model, params, plain)
        r = by_autograd(model, params, proximal(kind, model, temperature))
        conflict = bool(g @ r < 0)
        conflicts += conflict
        assert torch.allclose(found, g - (g @ r) / (r @ r) * r if conflict else g, atol=1e-10)
        assert found @ r >= -1e-12
    assert 0 < conflicts < 6  # both cases occur


def test_momentum_and_weight_decay_come_after():
    rule, momentum, decay = ProxProjection(proximal="l2"), 0.9, 0.05
    model, step = make(rule, optimizer=optim.sgd(momentum, decay))
    local, velocity, removed = step.start(model.params), 0.0, 0
    for index in range(4):
        before, w = tree.clone(local.params), toy.flat(local.params)
        local, _ = step(local, StepInputs({"params": model.params}, BATCH, lr=0.1, step=index))
        g, r = by_autograd(model, before, plain), w - toy.flat(model.params)
        if g @ r < 0:
            g, removed = g - (g @ r) / (r @ r) * r, removed + 1
        velocity = momentum * velocity + g + decay * w
        assert torch.allclose(toy.flat(local.params), w - 0.1 * velocity, atol=1e-10)
    assert removed == 3  # all steps but the first


@pytest.mark.parametrize("kind", ["kl", "l2"])
def test_the_first_step_is_that_of_fedavg_to_the_bit(kind):
    (model, free), (_, projected) = make(), make(ProxProjection(proximal=kind))
    ours, theirs = (
        step(step.start(model.params), StepInputs({"params": model.params}, BATCH, lr=0.1))[0]
        for step in (projected, free)
    )
    assert all(torch.equal(leaf, theirs.params[name]) for name, leaf in ours.params.items())


def test_a_run_of_one_local_step_per_round_is_fedavg_and_a_longer_one_is_not():
    # 48 samples on 4 clients: 12 each, one batch. In float32 the divergence's gradient at the start is rounding noise.
    for size, same in ((12, True), (4, False)):
        ours, theirs = (
            cfl.run(toy.config(f"local.batch_size={size}", method=method), stream=toy.stream()).params
            for method in ("prox_projection", "fedavg")
        )
        assert all(torch.equal(leaf, theirs[name]) for name, leaf in ours.items()) == same


@pytest.mark.parametrize("delta, length", [(0.1, 0.040), (1.0, 0.045), (5.0, 0.108)])
def test_it_stalls_after_the_first_step(delta, length):
    # Away from 0, the proximal gradient is w, and the projection removes the component away from 0: the client then
    # moves on a circle whose radius is the first step, lr |(2, delta)|, until its gradient is 0.
    module, lr = toy.Point(), 0.02
    model = Model(module, (2,), [2], multi_head=False)
    rule = ProxProjection(proximal="l2")
    step = LocalStep(model, 0, frozenset(), ComposedMethod({"strategy": toy.Bowl(), "rule": rule}), optim.sgd())
    x = torch.tensor([[1.0, delta]], dtype=torch.float64)
    batch = Batch(x, torch.zeros(1, dtype=torch.int64), torch.ones(1), torch.arange(1))
    local, lengths = step.start(model.params), []
    for index in range(300):
        local, _ = step(local, StepInputs({"params": model.params}, batch, lr=lr, step=index))
        lengths.append(local.params["w"].norm().item())
    assert lengths[0] == pytest.approx(lr * (2**2 + delta**2) ** 0.5)
    assert lengths[-1] == pytest.approx(length, abs=5e-4)
    assert lengths[-1] < 0.1 * 5**0.5  # a tenth of the way to the optimum
    gradient = torch.tensor([1.0, delta]) * (local.params["w"] - torch.tensor([2.0, 1.0]))
    across = gradient[0] * local.params["w"][1] - gradient[1] * local.params["w"][0]
    assert lengths[-1] - lengths[-2] < 1e-12 and abs(across) < 1e-6  # the remaining gradient is along w
