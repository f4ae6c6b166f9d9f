"""FedRCL against two loops over pairs, also in batches that lack one kind of pair."""

import math

import pytest
import torch
import torch.nn.functional as F
from torch import nn

from cfl.contract import Batch, Strategy
from cfl.contract.composed import ComposedMethod
from cfl.core import ConfigError, optim
from cfl.core.options import build
from cfl.engines.step import LocalStep, StepInputs
from cfl.methods.regularizers import FedRCL
from cfl.models import Model
from tests import toy


def pairs(z, y, mask, rule):
    """The loss of the module's docstring, pair by pair."""
    live = [i for i in range(len(z)) if mask[i]]
    total = z.sum() * 0
    for i in live:
        own, other = [], []
        for j in live:
            similarity = (z[i] @ z[j]) / (z[i].norm() * z[j].norm())
            if j != i:
                (own if y[i] == y[j] else other).append(similarity)
        itself = torch.ones((), dtype=z.dtype)
        p = min([*own, itself])
        negatives = sum(torch.exp(n / rule.tau) for n in sorted(other, reverse=True)[:2])
        total = total - torch.log(torch.exp(p / rule.tau) / (torch.exp(p / rule.tau) + negatives))
        q = min(own) if own and min(own) > rule.threshold else -itself
        total = total + torch.log(1 + torch.exp((q - 1) / rule.tau))
    return rule.weight * total / max(len(live), 1)


def penalty(rule, z, y, mask):
    batch = Batch(torch.zeros(len(y), 1), y, mask.double(), torch.arange(len(y)))
    return rule.penalty({}, torch.zeros(len(y), 2), toy.context({"params": {}}, {}, batch, features=z))


ALL = [1] * 8
CASES = {
    "three classes": ([0, 1, 2, 0, 1, 2, 0, 1], ALL),
    "padding": ([0, 1, 2, 0, 1, 2, 0, 1], [1, 1, 1, 0, 1, 1, 0, 0]),
    "padding between": ([0, 0, 1, 1, 0, 0, 1, 1], [0, 1, 0, 1, 1, 0, 1, 1]),
    "one of its class alone": ([0, 0, 0, 1, 0, 0, 0, 0], ALL),
    "each of its class alone": ([0, 1, 2, 3, 4, 5, 6, 7], ALL),
    "alone but for padding": ([0, 1, 1, 1, 0, 0, 1, 1], [1, 1, 1, 1, 0, 0, 1, 1]),
    "one class": ([0] * 8, ALL),
    "one class and a negative": ([0, 0, 1, 0, 0, 0, 0, 0], ALL),
    "two samples of two classes": ([0, 1], [1, 1]),
    "two samples of a class": ([0, 0], [1, 1]),
    "one sample": ([1], [1]),
    "one sample among padding": ([0, 0, 1, 1], [0, 0, 1, 0]),
    "padding alone": ([0, 1], [0, 0]),
}


@pytest.mark.parametrize("threshold", [-1.0, 0.3, 0.7, 1.0])
@pytest.mark.parametrize("case", CASES)
def test_value_and_gradient_equal_those_of_loops_over_pairs(case, threshold):
    labels, mask = CASES[case]
    y, mask = torch.tensor(labels), torch.tensor(mask)
    centre = 3.0 * F.one_hot(y % 3, 5)  # similarities within a class lie on both sides of the thresholds
    rule = FedRCL(weight=1.5, tau=0.5, threshold=threshold)
    for spread in (0.5, 3.0):
        found = []
        for loss in (pairs, penalty):
            z = (centre + spread * toy.random(len(y), 5)).requires_grad_()
            value = loss(z, y, mask, rule) if loss is pairs else loss(rule, z, y, mask)
            found.append((value, *torch.autograd.grad(value, z)))
        for expected, ours in zip(*found, strict=True):
            assert ours.isfinite().all()
            assert torch.allclose(ours, expected, atol=1e-12, rtol=1e-12)
        assert not found[1][1][mask == 0].any()  # padding has no gradient


def test_loss_of_two_samples_by_hand():
    # same class, at 60 degrees, tau 0.5: p = 1/2 and no negative, so the contrast is 0; q = 1/2 > 0.4, softplus(-1)
    z, mask = torch.tensor([[1.0, 0.0], [0.5, 3**0.5 / 2]], dtype=torch.float64), torch.ones(2)
    rule = FedRCL(tau=0.5, threshold=0.4)
    same = penalty(rule, z, torch.tensor([0, 0]), mask)
    assert same.item() == pytest.approx(math.log(1 + math.exp(-1)), abs=1e-12)
    # at or below the threshold the relaxation is off: softplus((-1 - 1) / 0.5)
    below = penalty(FedRCL(tau=0.5, threshold=0.6), z, torch.tensor([0, 0]), mask)
    assert below.item() == pytest.approx(math.log(1 + math.exp(-4)), abs=1e-12)
    # two classes: p = 1 (itself), n = 1/2: log(1 + e^(-1)); and softplus(-4), without another sample of the class
    apart = penalty(rule, z, torch.tensor([0, 1]), mask)
    assert apart.item() == pytest.approx(math.log(1 + math.exp(-1)) + math.log(1 + math.exp(-4)), abs=1e-12)


def test_padding_does_not_matter():
    z, y = toy.random(7, 4), torch.tensor([0, 1, 0, 1, 1, 0, 1])
    rule, mask = FedRCL(), torch.tensor([1, 1, 1, 1, 1, 0, 0])
    expected = penalty(rule, z[:5], y[:5], mask[:5])
    for seed in (1, 2):
        other = torch.cat([z[:5], 100 * toy.random(2, 4, seed=seed)])
        assert penalty(rule, other, y, mask).item() == pytest.approx(expected.item(), abs=1e-12)
    assert penalty(rule, z, y, torch.ones(7)).item() != pytest.approx(expected.item(), abs=1e-3)


def make(weight, *widths):
    model = Model(toy.mlp(*widths), (widths[0],), [widths[-1]], multi_head=False)
    composed = ComposedMethod({"strategy": Strategy(), **({} if weight is None else {"fedrcl": FedRCL(weight=weight)})})
    return model, LocalStep(model, 0, frozenset(), composed, optim.sgd(0.9))


BATCH = Batch(toy.random(6, 3), torch.tensor([0, 1, 0, 1, 1, 0]), torch.ones(6).double(), torch.arange(6))


def test_features_are_the_inputs_of_the_last_layer():
    model, step = make(1.0, 3, 4, 2)
    _, plain = make(None, 3, 4, 2)
    gradients = []
    for one in (step, plain):
        ctx = one.context(StepInputs({"params": model.params}, BATCH))
        gradients.append(torch.func.grad(one.loss, has_aux=True)(model.params, {}, ctx)[0])
    leaves = {name: model.params[name].clone().requires_grad_() for name in ("0.weight", "0.bias")}
    z = F.relu(F.linear(BATCH.x, leaves["0.weight"], leaves["0.bias"]))
    expected = torch.autograd.grad(pairs(z, BATCH.y, BATCH.mask, FedRCL()), list(leaves.values()))
    for name, leaf in zip(leaves, expected, strict=True):
        assert leaf.abs().max() > 1e-3
        assert torch.allclose(gradients[0][name] - gradients[1][name], leaf, atol=1e-10, rtol=1e-10)
    for name in ("2.weight", "2.bias"):  # the last layer does not enter the penalty
        assert torch.equal(gradients[0][name], gradients[1][name])


def test_weight_zero_is_fedavg_to_the_bit():
    ends = []
    for weight in (0.0, None):
        model, step = make(weight, 3, 4, 2)
        local = step.start(model.params)
        for index in range(5):
            local, _ = step(local, StepInputs({"params": model.params}, BATCH, lr=0.1, step=index))
        ends.append(local.params)
    assert all(torch.equal(ends[0][name], leaf) for name, leaf in ends[1].items())


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_a_dead_layer_gives_a_finite_gradient(dtype):
    model, step = make(1.0, 3, 4, 2)
    params = {name: leaf.to(dtype) for name, leaf in model.params.items()}
    params["0.bias"].fill_(-100.0)  # the outputs of ReLU are 0 for every sample
    batch = BATCH._replace(x=BATCH.x.to(dtype), mask=BATCH.mask.to(dtype))
    ctx = step.context(StepInputs({"params": params}, batch))
    gradient, _ = torch.func.grad(step.loss, has_aux=True)(params, {}, ctx)
    assert all(leaf.isfinite().all() for leaf in gradient.values()) and not gradient["0.weight"].any()


@pytest.mark.parametrize("folded", [True, False])
def test_a_last_layer_whose_rows_are_no_samples_is_refused(folded):
    """Rows of its inputs are positions, or samples and positions: they would be compared as samples."""
    model = Model(toy.ManyRows(4, 3, folded=folded), (4,), [3], multi_head=False)
    with pytest.raises(ConfigError, match="'fedrcl' .*; let the inputs of that layer, 'head', have the samples"):
        FedRCL().init_client(model.params, model)


def test_a_model_without_a_last_layer_and_values_out_of_range_are_refused():
    model = Model(nn.Sequential(nn.Conv2d(1, 3, 4), nn.Flatten()), (1, 4, 4), [3], multi_head=False)
    with pytest.raises(ConfigError, match="'fedrcl' compares the inputs of .*; end the model in nn.Linear"):
        FedRCL().init_client(model.params, model)
    with pytest.raises(ConfigError, match=r"regularizer\.fedrcl\.tau must be a number in \(0, inf\), not 0"):
        build(FedRCL, {"tau": 0.0}, "regularizer.fedrcl")


@pytest.mark.parametrize("multi_head", [True, False])
def test_classes_of_different_heads_are_different(multi_head):
    model = Model(toy.mlp(3, 4, 2), (3,), [2, 2], multi_head=multi_head)
    z, y, task = toy.random(6, 4), torch.tensor([0, 1, 0, 1, 0, 1]), torch.tensor([0, 0, 0, 1, 1, 1])
    batch = Batch(toy.random(6, 3), y, torch.ones(6).double(), torch.arange(6), task)
    ctx = toy.context({"params": model.params}, {}, batch, model, features=z)
    classes = 2 * task + y if multi_head else y
    expected = pairs(z, classes, batch.mask, FedRCL())
    assert FedRCL().penalty({}, torch.zeros(6, 2), ctx).item() == pytest.approx(float(expected), abs=1e-10)
