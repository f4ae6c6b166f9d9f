"""Accountants against closed forms and against Google's dp_accounting."""

import math
import warnings

import dp_accounting
import numpy as np
import pytest
from dp_accounting.pld import PLDAccountant
from dp_accounting.rdp import RdpAccountant
from scipy.optimize import brentq
from scipy.stats import norm

from cfl.aggregation.accounting import PRV_EPSILON, Releases, epsilon, noise_multiplier, prv_error
from cfl.core import ConfigError

ACCOUNTANTS = ["prv", "rdp"]
DELTA = 1e-5
# Balle and Wang (2018, theorem 8): the standard deviation of one release of sensitivity 1 at DELTA
ANALYTIC = {0.5: 7.0318, 1.0: 3.7306, 2.0: 1.9938, 5.0: 0.8919, 8.0: 0.6002}
TYPICAL = [Releases(0.05, 20)] * 5 + [Releases(1.0, 1)] * 4


def exact_delta(eps: float, mu: float) -> float:
    """Delta of a Gaussian release with sensitivity mu standard deviations (Balle and Wang, 2018, theorem 8)."""
    return norm.cdf(mu / 2 - eps / mu) - math.exp(eps + norm.logcdf(-mu / 2 - eps / mu))


def exact_epsilon(mu: float, delta: float) -> float:
    # at epsilon = mu^2/2 + 8 mu, delta is below Phi(-8) = 6e-16
    return brentq(lambda eps: exact_delta(eps, mu) - delta, 0, mu**2 / 2 + 8 * mu, xtol=1e-9)


def reference(accountant, plan, noise: float, delta: float) -> float:
    sampled = [
        dp_accounting.SelfComposedDpEvent(
            dp_accounting.PoissonSampledDpEvent(rate, dp_accounting.GaussianDpEvent(noise)), count
        )
        for rate, count in plan
    ]
    accountant = accountant(neighboring_relation=dp_accounting.NeighboringRelation.ADD_OR_REMOVE_ONE)
    return accountant.compose(dp_accounting.ComposedDpEvent(sampled)).get_epsilon(delta)


def check_prv(value: float, truth: float, rdp: float, slack: float = 0.0) -> None:
    """It is an upper bound, at most two errors above the truth at 0.999 delta; the slack of 1e-3 covers that delta."""
    assert truth - slack <= value <= truth + 2 * prv_error(rdp) + 1e-3


@pytest.mark.parametrize(("eps", "sigma"), ANALYTIC.items())
def test_one_release_is_the_analytic_gaussian_mechanism(eps, sigma):
    truth = exact_epsilon(1 / sigma, DELTA)
    assert truth == pytest.approx(eps, rel=1e-4)  # the table has 4 decimals
    rdp = epsilon([Releases(1.0, 1)], sigma, DELTA, "rdp")
    assert truth <= rdp <= 1.15 * truth  # the conversion's loss, 6 to 10 % here
    check_prv(epsilon([Releases(1.0, 1)], sigma, DELTA, "prv"), truth, rdp)


@pytest.mark.parametrize(("count", "sigma", "delta"), [(4, 2.0, 1e-3), (50, 5.0, 1e-5), (1000, 60.0, 1e-10)])
def test_unsampled_releases_compose_as_one(count, sigma, delta):
    # count releases at sigma equal one at sigma / sqrt(count): log-likelihood ratios of Gaussians add up
    truth = exact_epsilon(math.sqrt(count) / sigma, delta)
    plan = [Releases(1.0, count)]
    check_prv(epsilon(plan, sigma, delta, "prv"), truth, epsilon(plan, sigma, delta, "rdp"))
    assert truth <= epsilon(plan, sigma, delta, "rdp") <= 1.15 * truth


@pytest.mark.parametrize(
    ("plan", "sigma", "delta"),
    [
        ([Releases(0.01, 1000)], 1.0, 1e-5),
        pytest.param([Releases(0.5, 10)], 2.0, 1e-3, marks=pytest.mark.slow),
        ([Releases(0.999999, 10)], 2.0, 1e-5),
        pytest.param([Releases(0.5, 100), Releases(1.0, 4)], 20.0, 1e-5, marks=pytest.mark.slow),
        pytest.param([Releases(0.3, 20), Releases(0.9, 3), Releases(0.05, 50)], 3.0, 1e-6, marks=pytest.mark.slow),
    ],
)
def test_sampled_releases_against_dp_accounting(plan, sigma, delta):
    rdp = epsilon(plan, sigma, delta, "rdp")
    # the same divergences; dp_accounting has some more high orders and fewer low ones, none of them optimal here
    assert rdp == pytest.approx(reference(RdpAccountant, plan, sigma, delta), rel=1e-3)
    pld = reference(PLDAccountant, plan, sigma, delta)  # an upper bound too: on a grid of 1e-4, rounded up
    check_prv(epsilon(plan, sigma, delta, "prv"), pld, rdp, slack=1e-3 * pld)


@pytest.mark.parametrize("accountant", ACCOUNTANTS)
@pytest.mark.parametrize(
    ("plan", "target"),
    [
        (TYPICAL, 5.0),
        ([Releases(1.0, 20)], 0.1),
        pytest.param([Releases(1.0, 3)], 600.0, marks=pytest.mark.slow),
        pytest.param([Releases(0.01, 300)], 2.0, marks=pytest.mark.slow),
    ],
)
def test_noise_multiplier_inverts_epsilon(accountant, plan, target):
    sigma = noise_multiplier(plan, target, DELTA, accountant)
    assert epsilon(plan, sigma, DELTA, accountant) <= target < epsilon(plan, sigma * 0.999, DELTA, accountant)


@pytest.mark.parametrize("accountant", ACCOUNTANTS)
def test_epsilon_is_monotone(accountant):
    def eps(sigma: float = 3.0, rounds: int = 20, tasks: int = 3, rate: float = 0.02) -> float:
        return epsilon([Releases(rate, rounds), Releases(1.0, 1)] * tasks, sigma, DELTA, accountant)

    for name, values in {
        "sigma": [30, 10, 3, 1, 0.5],
        "rounds": [0, 1, 20, 400],
        "tasks": [1, 2, 3, 10],
        "rate": [0.0, 0.02, 0.2, 0.99, 1.0],
    }.items():
        found = [eps(**{name: value}) for value in values]
        assert (np.diff(found) > 0).all(), (name, found)


@pytest.mark.parametrize("accountant", ACCOUNTANTS)
def test_releases_at_one_rate_are_merged_in_any_order(accountant):
    merged = epsilon([Releases(0.05, 100), Releases(1.0, 4)], 5.0, DELTA, accountant)
    assert epsilon(TYPICAL, 5.0, DELTA, accountant) == epsilon(TYPICAL[::-1], 5.0, DELTA, accountant) == merged


@pytest.mark.parametrize("accountant", ACCOUNTANTS)
def test_nothing_released_and_no_noise(accountant):
    for plan in ([], [Releases(0.5, 0)], [Releases(0.0, 5)]):
        assert epsilon(plan, 1.0, DELTA, accountant) == epsilon(plan, 0.0, DELTA, accountant) == 0.0
        assert noise_multiplier(plan, 1.0, DELTA, accountant) == 0.0
    assert epsilon([Releases(1e-3, 1)], 0.0, DELTA, accountant) == math.inf


def test_prv_falls_back_to_rdp_where_it_is_not_reliable(monkeypatch):
    # each case just past one limit: exact epsilon mu^2/2 + ... > 500; delta; the number of releases
    for plan, sigma, delta in [([Releases(1.0, 1)], 0.03, 1e-5), ([Releases(1.0, 1)], 1.0, 1e-11)]:
        assert epsilon(plan, sigma, delta, "prv") == epsilon(plan, sigma, delta, "rdp")
    assert epsilon([Releases(1.0, 1)], 0.03, 1e-5, "rdp") > PRV_EPSILON
    many = [Releases(1.0, 100_001)]
    assert epsilon(many, 1e3, 1e-5, "prv") == epsilon(many, 1e3, 1e-5, "rdp")
    monkeypatch.setattr("opacus.accountants.PRVAccountant.get_epsilon", lambda *args, **kwargs: math.nan)
    assert epsilon(TYPICAL, 1.0, 1e-5, "prv") == epsilon(TYPICAL, 1.0, 1e-5, "rdp") > 0


def test_the_smaller_bound_is_returned():
    # the truth (mu = 0.001) is about 0; "prv" adds 0.002 to its estimate, and RDP's loss at order 1024 is 0.0035
    assert exact_delta(0.0, 1e-3) > DELTA
    plan = [Releases(1.0, 1)]
    truth = exact_epsilon(1e-3, DELTA)
    assert truth <= epsilon(plan, 1e3, DELTA, "prv") <= epsilon(plan, 1e3, DELTA, "rdp")
    assert epsilon(plan, 1e3, 1e-3, "prv") == 0.0  # delta 1e-3 exceeds 2 Phi(mu / 2) - 1 = 4e-4, so epsilon is 0


@pytest.mark.parametrize("rate", [1e-3, 1.0])
@pytest.mark.parametrize("sigma", [0.3, 100.0])
def test_no_warnings(rate, sigma):
    epsilon([Releases(1.0, 1)], 1.0, DELTA, "prv")  # imports Opacus first, since that may warn
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        assert 0 <= epsilon([Releases(rate, 10), Releases(1.0, 1)], sigma, DELTA, "prv") < math.inf


@pytest.mark.parametrize("target", [-1.0, 0.0, 1e-4, math.inf, math.nan])
def test_a_target_out_of_reach(target):
    with pytest.raises(ConfigError, match=r"dp\.target_epsilon .* dp\.delta 1e-05; set it .* or raise dp\.delta"):
        noise_multiplier(TYPICAL, target, DELTA, "prv")


@pytest.mark.parametrize("delta", [0.0, 1.0, -1e-5, math.nan])
def test_a_delta_that_is_none(delta):
    with pytest.raises(ConfigError, match=r"dp\.delta is .*; set it"):
        epsilon(TYPICAL, 1.0, delta, "rdp")


def test_the_printed_noise_of_fot_is_too_small():
    # FOT's appendix H, summed over the clients: sigma = sqrt(ln(1.25 / delta)) / epsilon
    printed = math.sqrt(math.log(1.25 / DELTA)) / 5
    assert printed == pytest.approx(0.6852, abs=5e-5)
    assert exact_delta(5.0, 1 / printed) == pytest.approx(1.10e-3, rel=5e-3)
    assert epsilon([Releases(1.0, 1)], printed, DELTA, "prv") > 5
    # PRV's error at epsilon 5, 2 * 0.011, is 0.4 %, and so is sigma's: d log(eps) / d log(sigma) is about -1.1
    needed = noise_multiplier([Releases(1.0, 1)], 5.0, DELTA, "prv")
    assert 0.8919 <= needed <= 0.8919 * 1.006
