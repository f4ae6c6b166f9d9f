"""The graph of clients that share masks under secure aggregation, and the numbers of clients that its safety needs."""

import math
from collections.abc import Iterable, Mapping
from functools import cache

from cfl.config.schema import RunConfig
from cfl.core import rng

CORRUPT = 0.1  # share of the clients with data that may collude with the server
BREACH = 2.0**-40  # largest probability that accomplices of the server learn more than a round's sum
ABORT = 2.0**-20  # largest probability that drop-outs leave a client with too few share holders


def needed(threshold: float, clients: int) -> int:
    """Return the smallest number of `clients` that makes up the fraction `threshold`, at least two."""
    return max(2, math.ceil(threshold * clients - 1e-9))  # 0.55 * 100 is above 55 in floating point


@cache
def accomplices(clients: int, population: int) -> int:
    """Return the largest number of accomplices of the server beside an honest client in a cohort of `clients`.

    A tenth of the `population`, rounded up, may collude with the server. A cohort of the whole population has all of
    these. Any other cohort is a uniform sample; it has more than the returned number with probability 2^-40 at most.
    """
    from scipy.stats import hypergeom  # slow to import

    others = max(0, clients - 1)
    chances = hypergeom.pmf(range(others + 1), population - 1, _colluding(population), others)
    at_least = chances[::-1].cumsum()  # P(all others), P(all but one or more), ..., P(none or more)
    return int((at_least[:-1] > BREACH).sum())


def honest(threshold: float, clients: int, population: int) -> int:
    """Return a lower bound, at least one, of the honest clients among the smallest number that must stay."""
    return max(1, needed(threshold, clients) - accomplices(clients, population))


def unsafe(clients: int, population: int, config: RunConfig) -> str | None:
    """Return why a secure sum over a cohort of `clients` is not safe and what to change; None if it is safe.

    population: see `accomplices`.
    """
    threshold, neighbours, dropped = config.secure.quorum, config.secure.neighbours, config.drop_rate
    quorum, bad = needed(threshold, clients), accomplices(clients, population)
    if quorum <= bad:
        enough = math.ceil(1000 * (bad + 1) / clients) / 1000
        return (
            f"secure.quorum={threshold:g} lets {quorum} of {clients} clients open a sum, and {bad} may collude with "
            f"the server; raise it to {enough:g}{', or raise cohort' * (clients < population)}"
        )
    if config.secure.consistency:  # whose accomplices nodes count among all clients
        return _splits(clients, population, max(bad, accomplices(clients, config.partition.clients)), config)
    k = None if neighbours is None else links(clients, neighbours)
    if k in (None, clients - 1) or _suffices(k, clients, population, threshold, dropped):
        return None
    fewest = degree(clients, population, threshold=threshold, dropped=dropped)
    return (
        f"secure.neighbours={neighbours} is not safe in a cohort of {clients} clients; the smallest number that is: "
        f"{fewest}; set it to null, which chooses this number"
    )


def _splits(clients: int, population: int, bad: int, config: RunConfig) -> str | None:
    """Return why the consistency check does not bind a server with `bad` accomplices and what to change, or None."""
    if config.secure.neighbours is not None:
        return "secure.consistency=true makes all clients neighbours; set secure.neighbours to null"
    if binds(needed(config.secure.quorum, clients), clients, bad):
        return None
    enough = math.ceil(1000 * ((clients + bad) // 2 + 1) / clients) / 1000
    return (
        f"secure.quorum={config.secure.quorum:g} lets a server with {bad} accomplices get two lists of {clients} "
        f"clients signed; raise it to {enough:g}{', or raise cohort' * (clients < population)}"
    )


def binds(signatures: int, clients: int, bad: int) -> bool:
    """Whether two lists cannot both have so many signatures of `clients`, of which `bad` sign both lists."""
    return 2 * signatures > clients + bad


@cache
def degree(clients: int, population: int, *, threshold: float, dropped: float) -> int:
    """Return the smallest number of neighbours that keeps a round safe and alive, or else that of the complete graph.

    population: number of clients of which the cohort is a uniform sample, see `accomplices`; threshold: fraction of the
    share holders of a client, which are its neighbours and itself, that rebuild its secrets; dropped: probability that
    a client drops out, independently of others.
    Safe, up to a probability of 2^-40: no client has enough colluding holders to rebuild its secrets, and the honest
    clients that stay are connected. Alive, up to a probability of 2^-20: each client keeps enough holders.
    Source: Bell et al. (CCS 2020), section 3, with exact tails of the share holders instead of bounds.
    """
    return next(
        (k for k in range(2, clients - 1) if _suffices(k, clients, population, threshold, dropped)), clients - 1
    )


@cache
def _suffices(k: int, clients: int, population: int, threshold: float, dropped: float) -> bool:
    """Whether a graph with k neighbours keeps a round safe and alive, see `degree`."""
    from scipy.stats import binom, hypergeom  # slow to import

    if k * clients % 2:
        return False  # no k-regular graph has so many nodes
    t = needed(threshold, k + 1)
    corrupted = hypergeom.sf(t - 1, population - 1, _colluding(population), k)
    cut = (dropped + CORRUPT) ** (k // 2)  # to cut a Harary graph, k / 2 consecutive clients must be gone
    starved = binom.sf(k + 1 - t, k + 1, dropped)
    return bool(clients * (corrupted + cut) <= BREACH and clients * starved <= ABORT)


def _colluding(population: int) -> int:
    return math.ceil(CORRUPT * population - 1e-9)


def links(clients: int, neighbours: int) -> int:
    """Return the number of neighbours that each of `clients` has in the graph.

    It is `neighbours`, and at least two (in a pair, the server would see the sum of two clients). If both numbers are
    odd, no such graph exists, and it is one more. It is at most the number of other clients.
    """
    k = max(2, neighbours)
    return min(k + k * clients % 2, clients - 1)


def connected(near: Mapping[int, Iterable[int]]) -> bool:
    """Whether links join all clients, directly or through others. near: client to linked clients, in both directions.

    Linked clients that are not in `near` are ignored.
    """
    waiting = list(near)[:1]
    reached = set(waiting)
    while waiting:
        new = {other for other in near[waiting.pop()] if other in near} - reached
        reached |= new
        waiting += new
    return len(reached) == len(near)


def graph(ids: Iterable[int], neighbours: int, key: int) -> dict[int, tuple[int, ...]]:
    """Return each client's neighbours, ascending, in a Harary graph on the clients in an order drawn from `key`.

    neighbours: of each client, see `links`.
    """
    ring = rng.numpy_generator(key).permutation(sorted(ids)).tolist()
    n = len(ring)
    k = links(n, neighbours)
    steps = [*range(1, k // 2 + 1), *range(-(k // 2), 0), *([n // 2] if k % 2 else [])]
    return {ring[a]: tuple(sorted(ring[(a + step) % n] for step in steps)) for a in range(n)}
