"""`benchmarks/dp_audit.py`: its bounds, against formulas and simulated mechanisms."""

import math

import pytest
import torch
from scipy.stats import norm

from cfl.aggregation import accounting


@pytest.fixture(scope="module")
def audit(script):
    return script("dp_audit")


def test_errors_that_a_mechanism_just_allows_give_its_epsilon(audit):
    # With delta 0, an attacker who is right with probability e^1 / (1 + e^1) on both sides shows epsilon 1.
    wrong = 1 / (1 + math.e)
    assert audit.epsilon_of(wrong, wrong, 0.0) == pytest.approx(1.0)
    assert audit.epsilon_of(0.5, 0.5, 0.0) == pytest.approx(0.0)
    # 1 - fn <= exp(epsilon) fp + delta, with fn = 0.2, fp = 0.05, delta = 0.1: log(0.7 / 0.05).
    assert audit.epsilon_of(0.2, 0.05, 0.1) == pytest.approx(math.log(14))


def test_the_threshold_between_two_normal_distributions_shows_their_distance(audit):
    wrong = norm.cdf(-0.65)  # both errors of the threshold in the middle, at a distance of 1.3
    assert audit.shift_of(wrong, wrong) == pytest.approx(1.3)


@pytest.mark.parametrize(("multiplier", "delta"), [(1.0, 1e-5), (2.0, 1e-5), (0.7, 1e-3)])
def test_epsilon_of_the_gaussian_mechanism_is_that_of_the_accountant(multiplier, delta, audit):
    exact = audit.gaussian_epsilon(1 / multiplier, delta)
    assert audit.gaussian_delta(exact, 1 / multiplier) == pytest.approx(delta)
    told = accounting.epsilon([accounting.Releases(1.0, 1)], multiplier, delta, "prv")
    assert exact <= told <= exact + 0.03  # "prv" adds at most twice 0.2 % of the RDP bound, which is below 7 here


def test_confidence_limits_of_counted_errors(audit):
    # No error in n trials: the upper limit p at level 0.975 solves (1 - p)^n = 0.025.
    fn, fp = audit.errors(torch.ones(50), torch.zeros(40), 0.5)
    assert (1 - fn) ** 50 == pytest.approx(0.025)
    assert (1 - fp) ** 40 == pytest.approx(0.025)
    assert audit.errors(torch.zeros(3), torch.ones(3), 0.5) == (1.0, 1.0)


def test_bounds_of_a_simulated_mechanism_lie_below_epsilon(audit):
    draws = torch.Generator().manual_seed(0)
    positive, negative = torch.randn(2, 4000, generator=draws) * 1.0
    bound, gaussian = audit.lower_bounds(positive + 1, negative, 1e-5)
    exact = audit.gaussian_epsilon(1.0, 1e-5)
    assert 0.5 < bound < exact  # log((1 - fn) / fp) is 0.8 at the threshold in the middle, fn = fp = 0.31
    # With 2,000 trials each limit takes 0.06 from the distance 1: a rate of 0.31 is known to 0.02, at a density of
    # 0.35. Sampling takes as much again, and the threshold is not always the one in the middle.
    assert audit.gaussian_epsilon(0.7, 1e-5) < gaussian < exact


@pytest.mark.parametrize("level", ["client", "example", "sketch"])
def test_one_unit_moves_a_release_by_the_bound(level, audit):
    run = audit.session(level, 1e-9)
    first, second = (audit.release(run, world, 0) for world in audit.worlds(level, run))
    run.close()
    moved = float((first - second).norm())
    # dp.clip = 0.001. The step of "example" is lr (0.05) times the mean over a batch of 16. A packed Gram matrix has
    # the entries off the diagonal once, so a sketch moves by less.
    bound = {"client": 1e-3, "example": 1e-3 * 0.05 / 16, "sketch": 1e-3}[level]
    assert 0.8 * bound < moved <= bound * 1.001
