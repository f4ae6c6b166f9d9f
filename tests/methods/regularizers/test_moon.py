"""MOON: the loss by hand, the gradient by brute force, and the choice of the previous model."""

import math

import pytest
import torch
import torch.nn.functional as F
from torch import nn

from cfl.contract import Batch, Strategy
from cfl.contract.composed import ComposedMethod
from cfl.core import ConfigError, optim, rng, tree
from cfl.core.options import build
from cfl.engines.step import LocalStep, StepInputs
from cfl.methods.regularizers import Moon
from cfl.models import Model
from tests import toy

X, Y = toy.random(6, 3), torch.tensor([0, 1, 0, 1, 1, 0])
MASK = torch.tensor([1.0, 1.0, 1.0, 1.0, 0.0, 0.0]).double()
BATCH = Batch(X, Y, MASK, torch.arange(6))


def make(*body, mu=0.7, tau=0.5, members=None):
    """A model whose features have both signs, and its local step with MOON."""
    model = Model(toy.net(nn.Linear(3, 4), nn.Tanh(), *body, nn.Linear(4, 2)), (3,), [2], multi_head=False)
    members = {"moon": Moon(mu=mu, tau=tau)} if members is None else members
    return model, LocalStep(model, 0, frozenset(), ComposedMethod({"strategy": Strategy(), **members}), optim.sgd(0.9))


def away(params, seed):
    return {name: leaf + 0.3 * toy.random(*leaf.shape, seed=seed) for name, leaf in params.items()}


@pytest.mark.parametrize("tau", [0.5, 1.0, 2.0])
def test_loss_by_hand_where_the_previous_features_are_opposite(tau):
    # z = z_g and z_prev = -z: similarities 1 and -1, -log(e^(1/tau) / (e^(1/tau) + e^(-1/tau))) = log(1 + e^(-2/tau))
    model, step = make(mu=2.0, tau=tau)
    opposite = {name: -leaf if name.startswith("0.") else leaf for name, leaf in model.params.items()}  # tanh is odd
    ctx = step.context(StepInputs({"params": model.params}, BATCH, state=opposite))
    ctx = ctx._replace(features=model.features(model.params, X, 0))
    penalty = Moon(mu=2.0, tau=tau).penalty(model.params, torch.zeros(6, 2), ctx)
    assert penalty.item() == pytest.approx(2.0 * math.log(1 + math.exp(-2 / tau)), abs=1e-12)


def test_the_loss_before_the_first_step_is_log_two():
    model, step = make(mu=1.0)
    state = tree.part(step.composed.client_state(None, model.params, model), "moon")  # z = z_g = z_prev
    ctx = step.context(StepInputs({"params": model.params}, BATCH, state=state))
    ctx = ctx._replace(features=model.features(model.params, X, 0))
    assert Moon(mu=1.0).penalty(model.params, torch.zeros(6, 2), ctx).item() == pytest.approx(math.log(2), abs=1e-12)


def test_gradient_equals_that_of_the_explicit_formula():
    mu, tau, (model, step) = 0.7, 0.5, make(mu=0.7, tau=0.5)
    params, previous = away(model.params, 1), away(model.params, 2)
    shared, state = {"params": model.params}, {f"moon/{name}": leaf for name, leaf in previous.items()}
    ctx = step.context(StepInputs(shared, BATCH, state=state))
    gradient, _ = torch.func.grad(step.loss, has_aux=True)(params, {}, ctx)

    def z(at, x):
        return torch.tanh(at["0.weight"] @ x + at["0.bias"])

    def cosine(a, b):
        return (a @ b) / (a.norm() * b.norm())

    leaves = {name: leaf.clone().requires_grad_() for name, leaf in params.items()}
    total = 0.0
    for x, y in zip(X[:4], Y[:4], strict=True):  # the other two are padding
        mine = z(leaves, x)
        near = torch.exp(cosine(mine, z(model.params, x)) / tau)
        far = torch.exp(cosine(mine, z(previous, x)) / tau)
        logits = leaves["2.weight"] @ mine + leaves["2.bias"]
        total = total + F.cross_entropy(logits[None], y[None]) - mu * torch.log(near / (near + far))
    for name, expected in zip(leaves, torch.autograd.grad(total / 4, list(leaves.values())), strict=True):
        assert torch.allclose(gradient[name], expected, atol=1e-12, rtol=0), name


def test_mu_zero_is_fedavg_to_the_bit():
    ends = []
    for members in (None, {}):
        model, step = make(mu=0.0, members=members)
        local = step.start(model.params)
        state = step.composed.client_state(None, model.params, model)
        for index in range(5):
            local, _ = step(local, StepInputs({"params": model.params}, BATCH, state=state, lr=0.1, step=index))
        ends.append(local.params)
    assert all(torch.equal(ends[0][name], leaf) for name, leaf in ends[1].items())


def test_references_are_taken_without_dropout_and_carry_no_gradient():
    model, step = make(nn.Dropout(0.5))
    model.module.train()
    ctx = step.context(StepInputs({"params": model.params}, BATCH, state=away(model.params, 2)))
    features = toy.random(6, 4, seed=3).requires_grad_()
    found = []
    for seed in (1, 2):
        with rng.fork(seed):
            at = {name: leaf.clone().requires_grad_() for name, leaf in model.params.items()}
            shared = ctx._replace(features=features, shared={"params": at})
            penalty = Moon().penalty(model.params, torch.zeros(6, 2), shared)
            found.append(penalty.item())
            assert torch.autograd.grad(penalty, list(at.values()), allow_unused=True) == (None,) * len(at)
    assert found[0] == found[1] and model.module.training


def test_zero_features_give_a_finite_gradient():
    model = Model(toy.mlp(3, 4, 2), (3,), [2], multi_head=False)
    model.params["0.bias"].fill_(-100.0)  # the outputs of ReLU are 0 for every sample
    step = LocalStep(model, 0, frozenset(), ComposedMethod({"strategy": Strategy(), "moon": Moon(mu=1.0)}), optim.sgd())
    state = step.composed.client_state(None, model.params, model)
    ctx = step.context(StepInputs({"params": model.params}, BATCH, state=state))
    gradient, _ = torch.func.grad(step.loss, has_aux=True)(model.params, {}, ctx)
    assert all(leaf.isfinite().all() for leaf in gradient.values()) and not gradient["0.weight"].any()


def test_the_previous_model_has_its_own_statistics():
    model, step = make(nn.BatchNorm1d(4))
    state = tree.part(step.composed.client_state(None, model.params, model), "moon")
    assert set(state) == set(model.params) and set(model.buffers(0)) < set(state)
    moved = {name: leaf + 1 for name, leaf in model.params.items()}
    upload, kept = Moon().finish(moved, step.context(StepInputs({"params": model.params}, state=state, step=1)), 1)
    assert not upload and all(torch.equal(kept[name], leaf) for name, leaf in moved.items())
    # By hand, over the four unmasked samples: the previous model's statistics differ from the global model's.
    ctx = step.context(StepInputs({"params": model.params}, BATCH, state=kept, step=1))
    ctx = ctx._replace(features=toy.random(*ctx.forward(model.params, BATCH, features=True).shape, seed=4))
    with model.evaluation():
        near, far, wrong = (
            F.cosine_similarity(ctx.features, ctx.forward(at, BATCH, features=True), dim=1)
            for at in (model.params, moved, {**moved, **{name: model.params[name] for name in model.buffers(0)}})
        )
    found = Moon(mu=1.0, tau=1.0).penalty(model.params, torch.zeros(6, 2), ctx)
    torch.testing.assert_close(found, -F.log_softmax(torch.stack([near, far], 1), 1)[:4, 0].mean())
    assert (far - wrong).abs().max() > 1e-3


def test_weights_that_did_not_train_are_those_of_the_round():
    """A strategy may pause them for a round, as LoRM does."""
    model, step = make()
    state, shared = away(model.params, 1), away(model.params, 2)
    trained = {name: shared[name] + 1 for name in model.head(0)}
    _, kept = Moon().finish(trained, step.context(StepInputs({"params": shared}, state=state, step=1)), 1)
    assert tree.equal(kept, {**shared, **trained})


@pytest.mark.parametrize("folded", [True, False])
def test_a_last_layer_whose_rows_are_no_samples_is_refused(folded):
    """Rows of its inputs are positions, or samples and positions: they would be compared as samples."""
    model = Model(toy.ManyRows(4, 3, folded=folded), (4,), [3], multi_head=False)
    with pytest.raises(ConfigError, match="'moon' .*; let the inputs of that layer, 'head', have the samples"):
        Moon().init_client(model.params, model)


def test_a_model_without_a_last_layer_and_values_out_of_range_are_refused():
    model = Model(nn.Sequential(nn.Conv2d(1, 3, 4), nn.Flatten()), (1, 4, 4), [3], multi_head=False)
    with pytest.raises(ConfigError, match="'moon' compares the inputs of .*; end the model in nn.Linear"):
        Moon().init_client(model.params, model)
    with pytest.raises(ConfigError, match=r"regularizer\.moon\.tau must be a number in \(0, inf\), not 0"):
        build(Moon, {"tau": 0.0}, "regularizer.moon")
