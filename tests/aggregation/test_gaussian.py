"""Gaussian mechanism: bounds of clipping, distribution of the noise, and DP-SGD's mean against an explicit loop."""

import math
from operator import itemgetter

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from scipy.stats import kstest

from cfl.aggregation.gaussian import SampleNoise, clipped, noise
from cfl.core import rng, tree

bounds = st.floats(1e-6, 1e6)


def _random(*shape, seed=0, dtype=torch.float64):
    return torch.randn(*shape, dtype=dtype, generator=rng.generator(seed))


# --- clipped --------------------------------------------------------------------------------------------------------


@given(st.integers(0, 2**32), st.integers(1, 200), st.floats(1e-12, 1e12), bounds)
@settings(max_examples=200, deadline=None)
def test_no_vector_stays_longer_than_the_bound(seed, size, scale, bound):
    vector = scale * _random(size, seed=seed)
    short = clipped(vector, bound)
    assert short.norm() <= bound * (1 + 1e-12) + 1e-9
    if vector.norm() > bound:  # the same direction, and no shorter than it must be
        torch.testing.assert_close(short, vector * (bound / vector.norm()), rtol=1e-12, atol=0)
        assert short.norm() >= bound * (1 - 1e-12)
    else:
        assert torch.equal(short, vector)  # to the bit


def test_clipped_by_hand():
    # (3, 4) has norm 5: at bound 1 it is (0.6, 0.8), at bounds of 5 and above itself.
    vector = torch.tensor([3.0, 4.0], dtype=torch.float64)
    torch.testing.assert_close(clipped(vector, 1.0), torch.tensor([0.6, 0.8], dtype=torch.float64))
    assert torch.equal(clipped(vector, 5.0), vector)
    assert torch.equal(clipped(torch.zeros(3), 1.0), torch.zeros(3))  # no division by its norm


@pytest.mark.parametrize("huge", [1e200, 1e308])  # squares beyond the largest float64
def test_an_absurd_vector_is_bounded_too(huge):
    short = clipped(torch.full((4,), huge, dtype=torch.float64), 2.0)
    assert torch.isfinite(short).all() and short.norm() <= 2 + 1e-9


# --- noise ----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("std", [0.01, 1.0, 30.0])
def test_noise_is_normal_with_that_standard_deviation(std):
    draws = noise(torch.empty(100_000, dtype=torch.float64), std, 5)
    # the standard error over 1e5 draws: std / 316 of the mean, std / 447 of the standard deviation; four of each
    assert abs(draws.mean()) < 4 * std / 316
    assert draws.std() == pytest.approx(std, rel=4 / 447)
    assert kstest((draws / std).numpy(), "norm").pvalue > 0.01


def test_noise_follows_its_key_alone():
    like = torch.empty(20_000, dtype=torch.float64)
    first, again, other = noise(like, 1.0, 1), noise(like + 7, 1.0, 1), noise(like, 1.0, 2)
    assert torch.equal(first, again)
    correlation = float((first * other).mean())
    assert abs(correlation) < 4 / math.sqrt(20_000)
    torch.testing.assert_close(noise(like, 3.0, 1), 3 * first)
    assert torch.equal(noise(like, 0.0, 1), torch.zeros_like(like))


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_noise_has_shape_precision_and_device_of_its_model(dtype):
    like = torch.zeros(3, 4, dtype=dtype)
    made = noise(like, 1.0, 0)
    assert (made.shape, made.dtype, made.device) == (like.shape, dtype, like.device)
    assert noise(like.to("meta"), 1.0, 0).device.type == "meta"
    # the draw does not depend on the precision
    torch.testing.assert_close(made.double(), noise(like.double(), 1.0, 0), rtol=1e-6, atol=1e-7)


@pytest.mark.parametrize("bit", [40, 64, 127])
def test_keys_that_differ_in_one_high_bit_have_unrelated_noise(bit):
    """Generators of torch keep 32 bits of a seed; noise must take all of them."""
    like = torch.empty(20_000, dtype=torch.float64)
    first, other = noise(like, 1.0, 5), noise(like, 1.0, 5 | 1 << bit)
    assert abs(float((first * other).mean())) < 4 / math.sqrt(20_000)
    first, other = noise(like, 1.0, 5, "round", 7), noise(like, 1.0, 5, "round", 7 | 1 << bit)
    assert abs(float((first * other).mean())) < 4 / math.sqrt(20_000)


def test_noise_of_the_systems_entropy_does_not_repeat():
    like = torch.empty(20_000, dtype=torch.float64)
    first, other = noise(like, 2.0, None, "round", 7), noise(like, 2.0, None, "round", 7)
    assert abs(float((first * other).mean())) < 4 * 4 / math.sqrt(20_000)
    assert kstest((first / 2).numpy(), "norm").pvalue > 1e-4  # fails once in 10,000 runs


# --- DP-SGD ---------------------------------------------------------------------------------------------------------


def _by_loop(grads, mask, clip, expected, drawn):
    """Abadi et al. (2016), Algorithm 1: sample by sample, number by number."""
    total = {name: torch.zeros(leaf.shape[1:], dtype=leaf.dtype) for name, leaf in grads.items()}
    for number in range(len(mask)):
        if mask[number] == 0:
            continue
        norm = math.sqrt(sum(float(value) ** 2 for leaf in grads.values() for value in leaf[number].flatten()))
        factor = 1 / max(1.0, norm / clip)
        for name, leaf in grads.items():
            total[name] = total[name] + factor * leaf[number]
    return {name: (leaf + drawn[name]) / expected for name, leaf in total.items()}


def _grads(samples, seed=0, scales=(1.0,), dtype=torch.float64):
    """Gradients of a weight (3, 4) and a bias (3,); those of sample i are scaled by scales[i mod len]."""
    factors = torch.tensor([scales[i % len(scales)] for i in range(samples)], dtype=dtype)
    return {
        "w": _random(samples, 3, 4, seed=seed, dtype=dtype) * factors[:, None, None],
        "b": _random(samples, 3, seed=seed + 1, dtype=dtype) * factors[:, None],
    }


def _mean(mechanism, grads, mask):
    """The noisy mean with the noise of one key; grads may hold no sample."""
    like = {name: torch.empty(leaf.shape[1:], dtype=leaf.dtype) for name, leaf in grads.items()}
    return mechanism(grads, mask, mechanism.draw(like, key=4))


@pytest.mark.parametrize("multiplier", [0.0, 1.5])
def test_the_noisy_mean_is_that_of_the_loop(multiplier):
    grads, mask = _grads(6, scales=(0.01, 1.0, 100.0)), torch.tensor([1.0, 1.0, 1.0, 0.0, 1.0, 0.0])
    mechanism = SampleNoise(0.7, multiplier, 4, seed=3)
    drawn = mechanism.draw(tree.map(itemgetter(0), grads), key=9)
    found = mechanism(grads, mask, drawn)
    expected = _by_loop(grads, mask, 0.7, 4, drawn)
    assert list(found) == ["w", "b"]
    for name, leaf in expected.items():
        torch.testing.assert_close(found[name], leaf, rtol=1e-12, atol=1e-12)


def test_the_bound_is_on_all_leaves_together():
    # leaves of norms 3 and 4 have the joint norm 5: at clip 1 they become 0.6 and 0.8
    grads = {"w": torch.tensor([[3.0, 0.0]]), "b": torch.tensor([[4.0]])}
    found = _mean(SampleNoise(1.0, 0.0, 1, seed=0), grads, torch.ones(1))
    torch.testing.assert_close(found["w"], torch.tensor([0.6, 0.0]))
    torch.testing.assert_close(found["b"], torch.tensor([0.8]))


def test_a_sample_without_gradient_adds_nothing():
    grads = {name: torch.zeros_like(leaf) for name, leaf in _grads(2).items()}
    assert all(not leaf.any() for leaf in _mean(SampleNoise(1.0, 0.0, 2, seed=0), grads, torch.ones(2)).values())


@given(st.integers(0, 2**32), st.integers(1, 8), st.floats(1e-6, 1e6), st.floats(1e-3, 1e3))
@settings(max_examples=100, deadline=None)
def test_adding_a_sample_moves_the_sum_by_no_more_than_the_clip(seed, samples, scale, clip):
    mechanism = SampleNoise(clip, 2.0, 3, seed=0)
    grads = _grads(samples, seed, scales=(scale, 1.0))
    without = {name: leaf[1:] for name, leaf in grads.items()}
    a, b = _mean(mechanism, grads, torch.ones(samples)), _mean(mechanism, without, torch.ones(samples - 1))
    moved = torch.cat([(a[name] - b[name]).flatten() for name in a]).norm() * 3  # of the sum, not the mean
    assert moved <= clip * (1 + 1e-9) + 1e-9


@pytest.mark.parametrize("bad", [math.nan, math.inf, -math.inf, 1e30])
def test_a_gradient_that_is_not_finite_counts_as_zero(bad):
    """0 x inf would be NaN, and the norm of entries of 1e30 overflows float32."""
    grads = _grads(4, dtype=torch.float32)
    mechanism = SampleNoise(0.7, 1.0, 3, seed=0)
    expected = _mean(mechanism, {name: leaf[1:] for name, leaf in grads.items()}, torch.ones(3))
    grads["w"][0, 1, 2] = bad
    found = _mean(mechanism, grads, torch.ones(4))
    for name, leaf in expected.items():
        torch.testing.assert_close(found[name], leaf)


def test_leaves_get_independent_noise_of_one_standard_deviation():
    clip, multiplier, expected = 0.5, 3.0, 10
    zero = {name: torch.zeros(1, 20_000) for name in ("a", "b")}
    found = _mean(SampleNoise(clip, multiplier, expected, seed=0), zero, torch.ones(1))
    for leaf in found.values():
        assert leaf.std() == pytest.approx(clip * multiplier / expected, rel=0.02)  # 4 / sqrt(2 x 20000)
    assert abs(torch.corrcoef(torch.stack(list(found.values())))[0, 1]) < 4 / math.sqrt(20_000)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_the_mean_keeps_the_precision_of_the_gradients(dtype):
    found = _mean(SampleNoise(1.0, 1.0, 4, seed=0), _grads(3, dtype=dtype), torch.ones(3))
    assert {leaf.dtype for leaf in found.values()} == {dtype}
    assert {name: tuple(leaf.shape) for name, leaf in found.items()} == {"w": (3, 4), "b": (3,)}


def test_a_parameter_without_dimensions_counts_for_the_bound():
    grads = {"w": torch.tensor([[3.0, 0.0]]), "scale": torch.tensor([4.0])}
    found = _mean(SampleNoise(1.0, 0.0, 1, seed=0), grads, torch.ones(1))
    torch.testing.assert_close(found["scale"], torch.tensor(0.8))
