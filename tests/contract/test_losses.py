"""Losses of a minibatch: by hand, against PyTorch and NumPy, and with padding."""

import math

import numpy as np
import pytest
import torch
from torch import Tensor

from cfl.contract import Batch
from cfl.contract.losses import cross_entropy, divergence, masked_mean
from cfl.models.handle import NO_CLASS
from tests.toy import assert_stacked_is_each_alone, random

P = torch.tensor([[0.9, 0.1]], dtype=torch.float64)
Q = torch.tensor([[0.5, 0.5]], dtype=torch.float64)


def batch_of(y: list[int]) -> Batch:
    return Batch(torch.zeros(len(y), 1), torch.tensor(y), torch.ones(len(y)), torch.arange(len(y)))


def softmax(logits: np.ndarray) -> np.ndarray:
    raised = np.exp(logits - logits.max(axis=1, keepdims=True))
    return raised / raised.sum(axis=1, keepdims=True)


def test_cross_entropy_is_minus_the_log_probability_of_the_label():
    # softmax of (log 1, log 3) is (1/4, 3/4)
    logits = torch.tensor([[1.0, 3.0], [1.0, 3.0]], dtype=torch.float64).log()
    assert cross_entropy(logits, batch_of([0, 1])).tolist() == pytest.approx([math.log(4), math.log(4 / 3)])


def test_masked_mean_ignores_masked_values():
    values = torch.tensor([2.0, 100.0, 6.0])
    assert masked_mean(values, torch.tensor([1.0, 0.0, 1.0])).item() == 4  # (2 + 6) / 2
    assert masked_mean(values, torch.ones(3)).item() == 36


def test_masked_mean_of_padding_alone_is_zero_and_so_is_its_gradient():
    values = torch.tensor([2.0, 100.0], requires_grad=True)
    mean = masked_mean(values, torch.zeros(2))
    mean.backward()
    assert mean.item() == 0
    assert values.grad is not None and values.grad.tolist() == [0, 0]


def test_divergence_is_from_the_first_to_the_second():
    # .9 log(.9 / .5) + .1 log(.1 / .5) = .3681, and .5 log(.5 / .9) + .5 log(.5 / .1) = .5108
    assert divergence(P.log(), Q.log(), 1.0).tolist() == pytest.approx([0.3681], abs=5e-5)
    assert divergence(Q.log(), P.log(), 1.0).tolist() == pytest.approx([0.5108], abs=5e-5)


@pytest.mark.parametrize("temperature", [0.5, 1.0, 3.0])
def test_divergence_against_its_definition(temperature):
    targets, logits = random(6, 4), random(6, 4, seed=1)
    p, q = (softmax(leaf.numpy() / temperature) for leaf in (targets, logits))
    expected = (p * np.log(p / q)).sum(axis=1)
    assert expected.min() > 1e-3
    np.testing.assert_allclose(divergence(targets, logits, temperature).numpy(), expected, atol=1e-12)


@pytest.mark.parametrize("temperature", [0.5, 1.0, 3.0])
def test_gradient_of_the_divergence_is_that_of_softmax_regression(temperature):
    # T^2 times the mean: T (softmax(z / T) - p_T) / batch
    targets, logits = random(6, 4), random(6, 4, seed=1)

    def loss(at: Tensor) -> Tensor:
        return temperature**2 * divergence(targets, at, temperature).mean()

    q, p = (softmax(leaf.numpy() / temperature) for leaf in (logits, targets))
    np.testing.assert_allclose(torch.func.grad(loss)(logits).numpy(), temperature * (q - p) / 6, atol=1e-12)


def test_divergence_is_zero_with_no_gradient_where_the_two_agree_up_to_a_shift():
    targets = random(6, 4)
    logits = targets + 5
    value = divergence(targets, logits, 2.0)
    gradient = torch.func.grad(lambda at: divergence(targets, at, 2.0).sum())(logits)
    assert value.abs().max() < 1e-15
    assert gradient.abs().max() < 1e-15


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_a_class_that_both_lack_does_not_count(dtype):
    targets, logits = random(6, 4).to(dtype), random(6, 4, seed=1).to(dtype)
    lacking = torch.full((6, 1), NO_CLASS, dtype=dtype)

    def wide(at: Tensor) -> Tensor:
        return divergence(torch.cat([targets, lacking], dim=1), torch.cat([at, lacking], dim=1), 3.0).sum()

    expected, theirs = torch.func.grad_and_value(lambda at: divergence(targets, at, 3.0).sum())(logits)
    found, ours = torch.func.grad_and_value(wide)(logits)
    tolerance = 1e-6 if dtype == torch.float32 else 1e-12
    assert torch.allclose(ours, theirs, atol=tolerance) and torch.allclose(found, expected, atol=tolerance)


def test_a_class_without_probability_gives_no_nan():
    # KL((1, 0) || (.5, .5)) = log 2
    certain = torch.tensor([[0.0, NO_CLASS]], dtype=torch.float64)
    assert divergence(certain, Q.log(), 1.0).tolist() == pytest.approx([math.log(2)])


def test_divergence_of_stacked_clients_equals_that_of_each():
    assert_stacked_is_each_alone(
        lambda logits, targets: divergence(targets, logits, 3.0).sum(), random(3, 6, 4), random(3, 6, 4, seed=1)
    )
