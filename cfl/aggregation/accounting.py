"""Privacy accounting: (epsilon, delta) of a run's Gaussian releases, and the noise for a target epsilon.

Neighbouring data sets differ by one unit (a client or a sample) added or removed. The noise multiplier is the standard
deviation of the noise over the L2 sensitivity; all releases share it. Two accountants of Opacus are available:

"rdp"  Renyi DP of the sampled Gaussian (Mironov, Talwar and Zhang, 2019), converted to (epsilon, delta) by Balle et al.
       (2020, theorem 21). Always an upper bound, 5 to 10 % above the exact epsilon, more at low sampling rates.
"prv"  Numerical composition of privacy loss variables (Gopi, Lee and Wutschitz, 2021). An upper bound; by its error
       analysis it exceeds the exact epsilon at 0.998 delta by at most 2 `prv_error`. The result is the smaller of this
       bound and that of "rdp". Outside the limits PRV_EPSILON, PRV_DELTA and PRV_RELEASES it is that of "rdp".
"""

import math
import warnings
from collections import Counter
from collections.abc import Callable, Sequence
from functools import cache, partial
from typing import Literal, NamedTuple

import numpy as np

from cfl.core import ConfigError

Accountant = Literal["prv", "rdp"]

PRV_EPSILON = 500.0  # upper limit: exp(epsilon) must fit float64 in the tails too, and the error stay below 1
PRV_DELTA = 1e-10  # lower limit: rounding errors of the Fourier transforms approach smaller deltas
PRV_RELEASES = 100_000  # upper limit: the grid grows with the square root of the number, to 10 s and 2 GB here
FEW_ORDERS = [2.0, 3.0, 4.0, 6.0, 8.0, 12.0, 16.0, 24.0, 32.0, 64.0, 128.0, 256.0]  # whole ones are the fast ones
MORE_ORDERS = [128, 256, 512, 1024]  # Opacus's 1.1 to 63 alone give no epsilon below 0.1 at delta 1e-5
TOLERANCE = 4e-4  # relative error of the noise multiplier, in either direction


class Releases(NamedTuple):
    """`count` Gaussian releases, each over a Poisson sample of the units at `rate` in [0, 1]; 1.0 takes all units."""

    rate: float
    count: int  # type: ignore[assignment]  # hides tuple.count


Plan = Sequence[Releases]


def prv_error(rdp_epsilon: float) -> float:
    """Return the error that "prv" adds to its estimate of epsilon: 0.2 % of the RDP bound, at least 0.002."""
    return 0.002 * max(1.0, rdp_epsilon)


def epsilon(plan: Plan, noise_multiplier: float, delta: float, accountant: Accountant | Literal["rough"]) -> float:
    """Return an upper bound of epsilon for the composition of all releases of `plan`, in any order.

    "rough" is "rdp" at few orders, which takes a small part of the time: to compare plans.
    Returns 0.0 if nothing is released and infinity without noise. Raises ConfigError for a delta outside (0, 1).
    """
    if not 0 < delta < 1:
        raise ConfigError(f"dp.delta is {delta}; set it between 0 and 1, well below one over the number of units")
    counts: Counter[float] = Counter()
    for rate, count in plan:
        if rate * count > 0:
            counts[rate] += count
    if not counts or noise_multiplier == 0:
        return math.inf if counts else 0.0
    history = [(noise_multiplier, rate, count) for rate, count in sorted(counts.items())]

    from opacus.accountants import PRVAccountant, RDPAccountant  # the import takes 2 s

    rdp, prv = RDPAccountant(), PRVAccountant()
    rdp.history = prv.history = history
    orders = FEW_ORDERS if accountant == "rough" else [*rdp.DEFAULT_ALPHAS, *MORE_ORDERS]
    with warnings.catch_warnings(), np.errstate(divide="ignore"):  # "prv" computes log(1 - rate), also at rate 1
        # The bound holds at every order, also if the best one is the first or last.
        warnings.filterwarnings("ignore", message="Optimal order is the")
        bound = max(0.0, float(rdp.get_epsilon(delta, alphas=orders)))
        reliable = bound <= PRV_EPSILON and delta >= PRV_DELTA and counts.total() <= PRV_RELEASES
        if accountant != "prv" or not reliable:
            return bound
        tight = float(prv.get_epsilon(delta, eps_error=prv_error(bound)))
    return max(0.0, min(bound, tight))  # min(bound, nan) is `bound`


def noise_multiplier(plan: Plan, target_epsilon: float, delta: float, accountant: Accountant) -> float:
    """Return the smallest noise multiplier, to 0.1 % and rounded up, for which `epsilon` is at most `target_epsilon`.

    Returns 0.0 if nothing is released. Raises ConfigError if the accountant cannot show the target for any noise.
    """

    @cache
    def excess(log_noise: float, accountant: Accountant = "rdp") -> float:
        return epsilon(plan, math.exp(log_noise), delta, accountant) - target_epsilon

    if epsilon(plan, 0.0, delta, accountant) == 0:
        return 0.0
    least = epsilon([Releases(1.0, 1)], 1e9, delta, "rdp")  # the limit of RDP's orders for large noise
    if not least < target_epsilon < math.inf:
        raise ConfigError(
            f"dp.target_epsilon {target_epsilon:g} cannot be met at dp.delta {delta:g}; "
            f"set it to a finite number above {least:.2g}, or raise dp.delta"
        )
    high, unsampled = 0.0, [Releases(1.0, count) for _, count in plan]  # faster, and an upper bound
    while epsilon(unsampled, math.exp(high), delta, "rdp") > target_epsilon:
        high += math.log(2)
    if accountant == "rdp":
        return math.exp(_root(excess, high, math.log(2), TOLERANCE))
    near = _root(excess, high, math.log(2), 0.05)  # "prv" is slower and never above "rdp": not positive at `near`
    return math.exp(_root(partial(excess, accountant="prv"), near, 0.1, TOLERANCE))


def _root(excess: Callable[[float], float], high: float, step: float, tolerance: float) -> float:
    """Return a point at most 2 `tolerance` above the root of the decreasing `excess`; `excess` is not positive there.

    high: a point at which `excess` is not positive; step: step of the search below `high` for a positive value.
    """
    from scipy.optimize import brentq

    low = high - step
    while excess(low) <= 0:
        high, low = low, low - step
    root = brentq(excess, low, high, xtol=tolerance) + tolerance
    while excess(root) > 0:
        root += tolerance
    return root
