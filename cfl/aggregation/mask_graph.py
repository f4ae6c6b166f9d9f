"""The graph of clients that share masks under secure aggregation, and the numbers of clients that its safety needs."""

import math
from collections.abc import Iterable
from functools import cache

from cfl.core import rng

CORRUPT = 0.1  # share of the clients that may collude with the server


def needed(threshold: float, clients: int) -> int:
    """Return the smallest number of `clients` that makes up the fraction `threshold`, at least two."""
    return max(2, math.ceil(threshold * clients - 1e-9))  # 0.55 * 100 is above 55 in floating point


def accomplices(clients: int) -> int:
    """Return the largest number of `clients` that may collude with the server."""
    return math.ceil(CORRUPT * clients - 1e-9)


def honest(threshold: float, clients: int) -> int:
    """Return a lower bound, at least one, of the honest clients among the smallest number that must stay."""
    return max(1, needed(threshold, clients) - accomplices(clients))


@cache
def degree(clients: int, *, threshold: float, dropped: float = 0.1, corrupt: float = CORRUPT) -> int:
    """Return the smallest number of neighbours that keeps a round safe and alive, or else that of the complete graph.

    dropped, corrupt: fractions of the clients. The share holders of a client are its neighbours and itself; t of them
    rebuild its secrets.
    Safe, up to a probability of 2^-40: no client has t corrupt holders, and the honest clients that stay are connected.
    Alive, up to a probability of 2^-20: each client keeps t holders.
    Source: Bell et al. (CCS 2020), section 3, with exact hypergeometric tails instead of bounds.
    """
    from scipy.stats import hypergeom  # slow to import

    n, lost, bad = clients, math.ceil(dropped * clients - 1e-9), math.ceil(corrupt * clients - 1e-9)
    for k in range(2, n - 1):
        if k * n % 2:
            continue  # no k-regular graph has n nodes
        t = needed(threshold, k + 1)
        corrupted = hypergeom.sf(t - 1, n - 1, bad, k)
        cut = (dropped + corrupt) ** (k // 2)  # to cut a Harary graph, k / 2 consecutive clients must be gone
        # If the client itself dropped out, it is no holder, and one other client fewer dropped out.
        starved = max(hypergeom.sf(k + 1 - t, n - 1, lost, k), hypergeom.sf(k - t, n - 1, max(0, lost - 1), k))
        if n * (corrupted + cut) <= 2**-40 and n * starved <= 2**-20:
            return k
    return n - 1


def graph(ids: Iterable[int], neighbours: int, key: int) -> dict[int, tuple[int, ...]]:
    """Return each client's neighbours, ascending, in a Harary graph on the clients in an order drawn from `key`.

    Each client has `neighbours` neighbours and at least two (in a pair, the server would see the sum of two clients).
    It has one more if no such graph exists (both numbers odd), and all other clients if these are fewer.
    """
    ring = rng.numpy_generator(key).permutation(sorted(ids)).tolist()
    n = len(ring)
    k = max(2, neighbours)
    k = min(k + k * n % 2, n - 1)
    steps = [*range(1, k // 2 + 1), *range(-(k // 2), 0), *([n // 2] if k % 2 else [])]
    return {ring[a]: tuple(sorted(ring[(a + step) % n] for step in steps)) for a in range(n)}
