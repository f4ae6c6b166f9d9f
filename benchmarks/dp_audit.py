"""A lower bound on epsilon, measured: how well an attacker tells two data sets apart by what a run releases.

    python benchmarks/dp_audit.py [--releases 4000] [--level client example sketch] [--json FILE]

The two data sets differ by one unit: a client, or a sample. The attacker knows all else, and the direction in which the
unit moves the sum when there is no noise. It tests each release along that direction. `releases` of each data set go
through the engine and the protection of uploads of a real round; only the round's key differs, and so the noise.

client: the update of a client, which is clipped to dp.clip, in the sum of two clients.
example: the gradient of a sample, which is clipped to dp.clip, in the local step of a client.
sketch: the Gram matrices of a client whose samples are equal, in GPSE.
steps: `client` with four times the variance of the noise, and the sum of four releases.

"bound" is a lower bound on epsilon at dp.delta that holds with 95 % confidence (Clopper and Pearson, 1934, on both
error rates of the best threshold, which half of the releases choose): Jagielski et al. (2020). It grows with the number
of releases, and cannot show much more than its logarithm. "gaussian" assumes that the errors are those of a Gaussian
mechanism, which is what these are, and converts them by its curve: Nasr et al. (2023). Both have to lie below
"accountant", what the run tells its user; "exact" is the analytic Gaussian mechanism (Balle and Wang, 2018).
"""

import argparse
import math
import sys
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
from host import store
from scipy.optimize import brentq
from scipy.stats import beta, norm
from torch import Tensor

from cfl.aggregation import accounting
from cfl.assembly import methods as members
from cfl.contract import Client, RoundInputs, Share
from cfl.core import rng
from cfl.runtime.builder import build_session
from cfl.runtime.session import Session
from cfl.streams import Stream, from_tensors
from cfl.testing.toys import toy_config

CONFIDENCE = 0.95
DELTA = 1e-5
STEPS = 4
LEVELS = ("client", "example", "sketch", "steps")
CANARY = 1  # id of the client that is there or not


def stream() -> Stream:
    """Two tasks of two clients; the samples of the second half, which are the canary's, are equal."""
    draws = rng.generator(rng.key(0, "audit"))
    x, y = torch.randn(32, 8, generator=draws), torch.arange(32) % 2
    x[16:], y[16:] = torch.eye(8)[0], 1
    return from_tensors([(x, y, x, y)] * 2, name="audit")


def session(level: str, multiplier: float) -> Session:
    """A session of two clients whose contributions are longer than the bound."""
    method = "fot" if level == "sketch" else "fedavg"
    options = [
        "rounds=1", "cohort=2", "partition.clients=2", "agg.weights=uniform", "local.batch_size=16", "local.epochs=1",
        "dp.clip=0.001", f"dp.noise_multiplier={multiplier}", f"dp.delta={DELTA}", "sampling=poisson",
        f"dp.level={'example' if level == 'example' else 'client'}",
    ]  # fmt: skip
    if level == "sketch":
        options += ["dp.protect=work", "strategy.sketch=gram", "strategy.project_at=server"]
        options += ["strategy.participants=all", "strategy.model=global"]
    config = toy_config(*options, method=method)
    return build_session(config, stream(), members.build(config))


def worlds(level: str, run: Session) -> tuple[RoundInputs, RoundInputs]:
    """The round to attack, with the canary and without it."""
    places = range(len(run.rounds.schedule))
    inputs = next(each for each in map(run.prepare, places) if level != "sketch" or each.info.phase.work)
    samples = inputs.clients[0].shares[0].samples
    halves = [torch.arange(16), torch.arange(16, 32)]  # of the stream, whatever the partition is
    clients = [
        replace(client, shares={**client.shares, 0: Share(samples, halves[client.id == CANARY])})
        for client in inputs.clients
    ]
    if level == "example":  # the canary is the last sample of a single client
        (whole,) = [client for client in clients if client.id != CANARY]
        rows = torch.cat([halves[0][:15], halves[1][:1]])
        with_it, without = (replace(whole, shares={0: Share(samples, own)}) for own in (rows, rows[:-1]))
        return _only(inputs, [with_it]), _only(inputs, [without])
    return _only(inputs, clients), _only(inputs, [client for client in clients if client.id != CANARY])


def _only(inputs: RoundInputs, clients: Sequence[Client]) -> RoundInputs:
    info = replace(inputs.info, clients=tuple(client.id for client in clients))
    return inputs._replace(info=info, clients=list(clients))


def release(run: Session, inputs: RoundInputs, number: int) -> Tensor:
    """The sum over the clients (n,) that the server learns from a round: release `number` of its key.

    The server knows who takes part, so a mean shows the number of clients, and no more than the sum.
    """
    info = replace(inputs.info, key=rng.key(inputs.info.key, "audit", number))
    mean = run.engine.round(inputs._replace(info=info)).mean
    found, count = (mean["work"], 1) if "work" in mean else (mean["strategy"], len(info.clients))
    return count * torch.cat([leaf.double().flatten() for leaf in found.values()])


def statistics(level: str, multiplier: float, releases: int) -> tuple[Tensor, Tensor]:
    """The attacker's statistic of each release with the canary, and of each without it: both (releases,)."""
    calm, noisy = session(level, 1e-9), session(level, multiplier)
    try:
        first, second = (release(calm, world, 0) for world in worlds(level, calm))
        along = (first - second) / (first - second).square().sum()
        return tuple(
            torch.stack([release(noisy, world, number) @ along for number in range(releases)])
            for world in worlds(level, noisy)
        )
    finally:
        calm.close()
        noisy.close()


def errors(positive: Tensor, negative: Tensor, threshold: float) -> tuple[float, float]:
    """Upper ends (Clopper and Pearson) of the rates of false negatives and false positives, together at CONFIDENCE."""
    level = (1 + CONFIDENCE) / 2

    def upper(wrong: int, count: int) -> float:
        return 1.0 if wrong == count else float(beta.ppf(level, wrong + 1, count - wrong))

    return (
        upper(int((positive <= threshold).sum()), len(positive)),
        upper(int((negative > threshold).sum()), len(negative)),
    )


def epsilon_of(false_negatives: float, false_positives: float, delta: float) -> float:
    """The least epsilon with which such errors are possible: 1 - fn <= exp(epsilon) fp + delta, and the other way."""
    pairs = ((false_negatives, false_positives), (false_positives, false_negatives))
    return max(0.0, *(math.log((1 - delta - a) / b) for a, b in pairs if 1 - delta - a > 0))


def shift_of(false_negatives: float, false_positives: float) -> float:
    """The least distance of two normal distributions, in standard deviations, with which such errors are possible."""
    return max(0.0, float(-norm.ppf(false_negatives) - norm.ppf(false_positives)))


def gaussian_delta(epsilon: float, shift: float) -> float:
    """delta of the Gaussian mechanism (Balle and Wang, 2018, theorem 8). shift: sensitivity over standard deviation."""
    near, far = shift / 2 - epsilon / shift, -shift / 2 - epsilon / shift
    return float(norm.cdf(near) - math.exp(epsilon + norm.logcdf(far)))


def gaussian_epsilon(shift: float, delta: float) -> float:
    """epsilon of the Gaussian mechanism at `delta`."""
    if shift == 0 or gaussian_delta(0.0, shift) <= delta:
        return 0.0
    return float(brentq(lambda epsilon: gaussian_delta(epsilon, shift) - delta, 0.0, shift * shift / 2 + 40 * shift))


def lower_bounds(positive: Tensor, negative: Tensor, delta: float) -> tuple[float, float]:
    """The bound without an assumption, and that of a Gaussian mechanism; each chooses its threshold on half of them."""
    half = len(positive) // 2
    chosen, found = (positive[:half], negative[:half]), (positive[half:], negative[half:])
    candidates = torch.cat(chosen).sort().values.tolist()[:: max(1, half // 200)]
    bounds = []
    for score in (lambda a, b: epsilon_of(a, b, delta), shift_of):
        best = max(candidates, key=lambda threshold: score(*errors(*chosen, threshold)))
        bounds.append(score(*errors(*found, best)))
    return bounds[0], gaussian_epsilon(bounds[1], delta)


def measure(level: str, multiplier: float, releases: int) -> dict[str, Any]:
    """A row of the table."""
    steps = STEPS if level == "steps" else 1
    own = multiplier * math.sqrt(steps)
    found = statistics("client" if level == "steps" else level, own, releases * steps)
    positive, negative = (each.view(releases, steps).mean(1) for each in found)
    bound, gaussian = lower_bounds(positive, negative, DELTA)
    told = accounting.epsilon([accounting.Releases(1.0, steps)], own, DELTA, "prv")
    exact = gaussian_epsilon(1 / multiplier, DELTA)
    return {
        "level": level, "noise_multiplier": own, "steps": steps, "releases": releases, "bound": bound,
        "gaussian": gaussian, "exact": exact, "accountant": told, "holds": max(bound, gaussian) <= told,
    }  # fmt: skip


def main(arguments: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--level", nargs="+", choices=LEVELS, default=list(LEVELS), metavar="LEVEL")
    parser.add_argument("--noise", type=float, nargs="+", default=[1.0, 2.0], help="over dp.clip, of one release")
    parser.add_argument("--releases", type=int, default=4000, help="of each of the two data sets")
    parser.add_argument("--json", type=Path, help="where to store the figures")
    options = parser.parse_args(arguments)
    torch.set_num_threads(1)
    print(f"{'level':<10}{'noise':>8}{'bound':>8}{'gaussian':>10}{'exact':>8}{'accountant':>12}")
    rows = []
    for level in options.level:
        for multiplier in options.noise:
            row = measure(level, multiplier, options.releases)
            rows.append(row)
            cells = f"{row['bound']:>8.2f}{row['gaussian']:>10.2f}{row['exact']:>8.2f}{row['accountant']:>12.2f}"
            print(f"{level:<10}{row['noise_multiplier']:>8g}{cells}{'' if row['holds'] else '  VIOLATED'}", flush=True)
    store(options.json, {"delta": DELTA, "confidence": CONFIDENCE, "rows": rows}, "torch", "opacus")
    return 0 if all(row["holds"] for row in rows) else 1


if __name__ == "__main__":
    sys.exit(main())
