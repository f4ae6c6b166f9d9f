"""What do FOT's sketches give away? Attacks that rebuild a client's images from them, or tell who was in.

FOT (Bakman et al., 2024, section 4) lets clients send A_i = X_i G_i, each column of X_i an input of a layer, G_i normal
with s = 5 d columns; the server needs the sum only. Here X_i is what the first layer of `permuted-digits` sees: 70
images a client, 64 pixels and the constant 1, so d = 65 and s = 325. The server is curious, and knows one of these:

    all G   every G_i (its key is no secret). A = X G over all N images; the least-squares solution X G G^+ is exact
            for N <= s, and beyond misses 1 - s/N of the energy. With the mean image (A tells it) and the range of grey
            values it is exact for somewhat more than s images.
    one G   G of the first client alone; A G_1^+ is X_1 and, as noise, the other clients.
    no G    A's law depends on X X^T only (that is why `Gram` may draw L Z): it is the same for X and X Q, Q orthogonal,
            unless n = 1. The span and X X^T do leak, so membership may: x^T (A A^T)^-1 x is small for what is in X.
    noise   all G, but each A_i / sqrt(s) is clipped to norm 1 and the sum gets normal noise for client-level
            (epsilon, delta) of one release. More releases or layers need more noise.

Membership: AUC of members against images that no client has. An attack bounds what leaks from below, never from above.

    python benchmarks/sketch_probe.py [--clients 1 2 4 5 6 8 12 20] [--seeds 5] [--output FOLDER]
"""

from __future__ import annotations

import argparse
import math
import statistics
from pathlib import Path

import torch
import torch.nn.functional as F
from dp_audit import gaussian_delta
from host import store
from scipy.optimize import brentq
from scipy.stats import mannwhitneyu
from torch import Tensor

from cfl.core import rng
from cfl.methods.subspace.basis import empty
from cfl.methods.subspace.sketch import Direct, Gram
from cfl.streams.datasets import digits

IMAGES, MULTIPLE, MEMBERS = 70, 5, 1400  # a client's images, s / d, the images that are dealt: those of the benchmark
EPSILON, DELTA = 5.0, 1e-5  # FOT's appendix H
SHARE = 0.9  # of the energy: what FOT's basis is to hold in this benchmark
SMALL = (1, 10, 35, 64, 70)  # images of a client that is looked at alone
EXAMPLES = 10  # images in the picture
FOLDER = Path("benchmarks/results/sketch-probe")
Figures = dict[str, float]


def sketches(images: list[Tensor], columns: int, keys: list[int]) -> tuple[Tensor, Tensor]:
    """Each client's upload A_i, (C, d, s), rounded to float32 as FOT sends it, and what was drawn for it, G (N, s).

    images: the clients' (n, d). G comes from the same code and key: the sketch of unit vectors is G.
    """

    def taken(rows: Tensor, key: int) -> Tensor:
        sums = Direct(empty(rows.shape[1]), columns, key, by_sample=False)
        sums.add(rows[:, None], torch.arange(len(rows)))
        return sums.release()

    uploads = [taken(own, key).float().double() for own, key in zip(images, keys, strict=True)]
    drawn = [taken(torch.eye(len(own), dtype=torch.float64), key) for own, key in zip(images, keys, strict=True)]
    return torch.stack(uploads), torch.cat(drawn)


def unkeyed(images: Tensor, columns: int, key: int) -> Tensor:
    """A sketch (d, s) of images (n, d) drawn as L Z: even a known key gives L only, that is X X^T."""
    sums = Gram(empty(images.shape[1]), columns, key)
    sums.add(images[:, None], torch.arange(len(images)))
    return sums.release().float().double()


def decoder(g: Tensor, noise: float = 0.0) -> Tensor:
    """H (s, N), such that A H estimates X (d, N) from A = X G + E: G^+, or its ridge form for noise.

    g: (N, s). noise: variance of E's entries; entries of X have a mean square of 1, as standardised images have.
    """
    count, columns = g.shape
    if count <= columns:
        return torch.linalg.solve(g @ g.T + noise * torch.eye(count), g).T
    return torch.linalg.solve(g.T @ g + noise * torch.eye(columns), g.T)


def mean_image(a: Tensor) -> Tensor:
    """The mean of X's columns (d,), for X with a last row of ones: G need not be known.

    E[A A^T] = s X X^T, whose last column is s N times the mean.
    """
    return a @ a[-1] / a[-1].square().sum()


def in_range(a: Tensor, g: Tensor, low: float, high: float, steps: int = 200) -> Tensor:
    """Images (N, d) with entries in [low, high] that fit A = X G, near the mean image: Douglas-Rachford splitting.

    For N > s images; the affine set {X: X G = A} is met by one projection, the range by another.
    """
    q, r = torch.linalg.qr(g)
    known = torch.linalg.solve_triangular(r, a, upper=True, left=False)  # X Q
    start = mean_image(a)[:, None].expand(-1, len(g))
    point = start - (start @ q - known) @ q.T
    for _ in range(steps):
        near = point.clamp(low, high)
        mirrored = 2 * near - point
        point = near - (mirrored @ q - known) @ q.T  # = point + P(mirrored) - near, P the projection on the set
    return point.clamp(low, high).T


def whitened(a: Tensor, images: Tensor) -> Tensor:
    """Images (n, d) in the metric (A A^T)^-1. What A lacks, up to its float32 rounding, is as good as forbidden."""
    moment = a @ a.T
    floor = 1e-10 * moment.diagonal().mean() * torch.eye(len(a))
    return torch.linalg.solve_triangular(torch.linalg.cholesky(moment + floor), images.T, upper=False).T


def matches(a: Tensor, h: Tensor, g: Tensor, candidates: Tensor) -> Tensor:
    """Log-likelihood ratio (m, N), up to scale, that column j of X is candidate i (m, d), and not another image.

    Column j of A H is p x_j + noise of covariance p (1 - p) M, M the images' second moment and p the mean diagonal of
    G H, which is min(1, s/N) without noise. For p = 1 it is the distance, negated. M is taken from A itself.
    """
    p = float((g * h.T).sum()) / len(g)
    found, candidates = whitened(a, (a @ h).T), whitened(a, candidates)
    return 2 * candidates @ found.T - found.square().sum(1) - p * candidates.square().sum(1, keepdim=True)


def auc(members: Tensor, others: Tensor) -> float:
    """Probability that a member's score is above another image's; ties count half."""
    return float(mannwhitneyu(members.numpy(), others.numpy()).statistic) / (len(members) * len(others))


def leverage_auc(a: Tensor, members: Tensor, others: Tensor) -> float:
    """AUC of -x^T (A A^T)^-1 x, which needs no G. For fewer images than d it is the residual of x to their span."""
    return auc(*(-whitened(a, images).square().sum(1) for images in (members, others)))


def noise_multiplier(epsilon: float, delta: float) -> float:
    """Standard deviation over sensitivity of one Gaussian release, exact."""
    return float(brentq(lambda sigma: gaussian_delta(epsilon, 1 / sigma) - delta, 0.01, 1000.0))


def kept(a: Tensor, images: Tensor) -> float:
    """Share of the images' energy in A's leading directions, as many as hold SHARE of it at best: A's use to FOT."""
    best = torch.linalg.svdvals(images).square()
    rank = int((best.cumsum(0) < SHARE * best.sum()).sum()) + 1
    leading = torch.linalg.svd(a, full_matrices=False)[0][:, :rank]
    return float((images @ leading).square().sum() / best.sum())


def missed(found: Tensor, images: Tensor) -> float:
    """Squared error over squared norm, of all images (n, d), without the constant 1."""
    return float((found - images)[:, :-1].square().sum() / images[:, :-1].square().sum())


def recovered(found: Tensor, images: Tensor, radius: Tensor) -> float:
    """Share of images found to within `radius` (n,), half the distance to the nearest other image of the data set.

    Nothing in the data set is then as near to what was found as the image itself.
    """
    return float(((found - images)[:, :-1].norm(dim=1) < radius).double().mean())


def attacked(
    a: Tensor, g: Tensor, noise: float, x: Tensor, others: Tensor, owner: Tensor, radius: Tensor
) -> tuple[Figures, Tensor]:
    """What the least-squares solution of A = X G + E gives away: figures, and the images found (N, d).

    x: the images behind the rows of g, (N, d), of the clients `owner` (N,); others: (m, d), non-members.
    """
    h = decoder(g, noise)
    found = (a @ h).T
    inside, outside = (matches(a, h, g, candidates) for candidates in (x, others))
    return {
        "error": missed(found, x),
        "recovered": recovered(found, x, radius),
        "auc": auc(inside.amax(1), outside.amax(1)),
        "linked": float((owner[inside.argmax(1)] == owner).double().mean()),
        "kept": kept(a, x),
    }, found


def probe(
    x: Tensor, others: Tensor, radius: Tensor, clients: int, sigma: float, key: int
) -> tuple[Figures, dict[str, Tensor]]:
    """Every attack on the sum over the first `clients` clients: figures, and the images found (N, d) by attack.

    x: images with their constant 1 (N', d), client by client; others: (m, d), non-members; radius: (N',) of
    `recovered`; sigma: the noise's deviation over the clipping norm.
    """
    x, radius = x[: clients * IMAGES], radius[: clients * IMAGES]
    owner = torch.arange(len(x)) // IMAGES
    d, columns = x.shape[1], MULTIPLE * x.shape[1]
    images = list(x.split(IMAGES))
    uploads, g = sketches(images, columns, [rng.key(key, "sketch", client) for client in range(clients)])

    a = uploads.sum(0)
    figures, found = attacked(a, g, 0.0, x, others, owner, radius)
    figures["nearest_auc"] = auc(*(-torch.cdist(some, found).amin(1) for some in (x, others)))
    best = in_range(a, g, float(x[:, :-1].min()), float(x[:, :-1].max())) if len(x) > columns else found
    figures |= {"range_error": missed(best, x), "range_recovered": recovered(best, x, radius)}
    figures["mean_error"] = missed(mean_image(a).expand_as(x), x)

    own, only = g[:IMAGES], slice(IMAGES)  # the other clients' images are noise, with a variance of 1 for each of them
    figures["one_error"] = missed((a @ decoder(own)).T, images[0])
    alone, _ = attacked(a, own, len(x) - IMAGES, images[0], others, owner[only], radius[only])
    figures["one_auc"] = alone["auc"]

    keys = [rng.key(key, "blind", client) for client in range(clients)]
    blind = torch.stack([unkeyed(own, columns, key) for own, key in zip(images, keys, strict=True)]).sum(0)
    figures["blind_auc"] = leverage_auc(blind, x, others)

    scale = math.sqrt(columns)
    weights = 1 / (uploads.flatten(1).norm(dim=1) / scale).clamp(min=1.0) / scale  # told to the attacker, too
    clean = (weights[:, None, None] * uploads).sum(0)
    noise = sigma * torch.randn(d, columns, dtype=torch.float64, generator=rng.generator(rng.key(key, "noise")))
    noisy, hidden = attacked(clean + noise, weights[owner, None] * g, sigma**2, x, others, owner, radius)
    figures |= {f"noise_{name}": value for name, value in noisy.items()}
    figures |= {"noise_alone_kept": kept(noise, x), "signal_to_noise": float(clean.norm() / noise.norm())}
    return figures, {"least squares": found, "range": best, "noise": hidden}


def small_clients(x: Tensor, others: Tensor, key: int) -> dict[int, Figures]:
    """One client with few images, G unknown, by the number of images: membership, and the error of its mean image."""
    figures = {}
    for count in SMALL:
        a = unkeyed(x[:count], MULTIPLE * x.shape[1], rng.key(key, "small", count))
        mean = x[:count].mean(0, keepdim=True)
        figures[count] = {
            "auc": leverage_auc(a, x[:count], others),
            "mean_error": missed(mean_image(a)[None], mean),
        }
    return figures


def dealt(seed: int) -> tuple[Tensor, Tensor, Tensor]:
    """Members (1400, 65) and other images (397, 65) of the digits, shuffled, and the members' radii for `recovered`."""
    data = digits()
    pixels = torch.cat([data.x_train, data.x_test]).double()
    order = torch.randperm(len(pixels), generator=rng.generator(rng.key(seed, "probe", "deal")))
    pixels = pixels[order]
    distances = torch.cdist(pixels, pixels).fill_diagonal_(math.inf)
    images = F.pad(pixels, (0, 1), value=1.0)
    return images[:MEMBERS], images[MEMBERS:], distances.amin(1)[:MEMBERS] / 2


def table(title: str, columns: list[tuple[str, str, str]], rows: dict[int, Figures]) -> None:
    """Print one row for each count; columns: (heading, name of the figure, format)."""
    print(f"\n{title}")
    widths = [max(len(heading), 6) for heading, _, _ in columns]
    print("  ".join(heading.rjust(width) for width, (heading, _, _) in zip(widths, columns, strict=True)))
    for count, figures in rows.items():
        cells = [format(figures[name] if name else count, form) for _, name, form in columns]
        print("  ".join(cell.rjust(width) for width, cell in zip(widths, cells, strict=True)))


def tables(sweep: dict[int, Figures], small: dict[int, Figures]) -> None:
    table("Sum of the sketches, all G known (range: the mean image and the range of grey values are used, too)", [
        ("clients", "", "d"), ("images", "images", "d"), ("1-s/N", "expected", ".2f"), ("error", "error", ".2f"),
        ("found", "recovered", ".0%"), ("range: error", "range_error", ".2f"), ("found", "range_recovered", ".0%"),
        ("mean image", "mean_error", ".2f"), ("AUC", "auc", ".3f"), ("nearest", "nearest_auc", ".3f"),
        ("client named", "linked", ".0%"), ("chance", "chance", ".0%"),
    ], sweep)  # fmt: skip
    table("Sum of the sketches, one G or no G known; sum with noise, all G known", [
        ("clients", "", "d"), ("one G: error", "one_error", ".2f"), ("AUC", "one_auc", ".3f"),
        ("no G: AUC", "blind_auc", ".3f"), ("noise: error", "noise_error", ".2f"), ("found", "noise_recovered", ".0%"),
        ("AUC", "noise_auc", ".3f"), ("client named", "noise_linked", ".0%"), ("signal", "signal_to_noise", ".3f"),
        ("basis holds", "noise_kept", ".0%"), ("no noise", "kept", ".0%"), ("noise alone", "noise_alone_kept", ".0%"),
    ], sweep)  # fmt: skip
    columns = [("images", "", "d"), ("AUC", "auc", ".3f"), ("error of the mean image", "mean_error", ".4f")]
    table("One client alone, no G known", columns, small)


def draw(sweep: dict[int, Figures], rows: list[tuple[str, Tensor]], output: Path) -> None:
    """Above, rows of images (k, d) with their labels; below, error, membership and linkage against clients."""
    import matplotlib.pyplot as plt

    figure = plt.figure(figsize=(11, 4.5 + 0.8 * len(rows)), layout="constrained")
    above, below = figure.subfigures(2, 1, squeeze=False, height_ratios=[0.8 * len(rows), 4.2])[:, 0]
    grid = above.subplots(len(rows), 1 + EXAMPLES, width_ratios=[4.5] + [1] * EXAMPLES)
    for (label, images), (title, *axes) in zip(rows, grid, strict=True):
        title.text(1, 0.5, label, ha="right", va="center", fontsize=11)
        for axis, image in zip(axes, images, strict=True):
            axis.imshow(
                image[:-1].reshape(8, 8).numpy(), cmap="gray_r"
            )  # each with its own contrast, to see what there is
        for axis in (title, *axes):
            axis.axis("off")
    panels = {
        "error of the images, all G known": [
            ("expected", "1 - s/N, expected", "k:"), ("mean_error", "guess: the mean image", "k--"),
            ("error", "least squares", "C0o-"), ("range_error", "with the grey range", "C1s-"),
            ("noise_error", "with noise", "C2^-"),
        ],
        "membership, AUC (0.5: guessing)": [
            ("auc", "all G known", "C0o-"), ("one_auc", "one G known", "C3d-"), ("blind_auc", "no G known", "C4v-"),
            ("noise_auc", "all G, with noise", "C2^-"),
        ],
        "share of members whose client is named": [
            ("linked", "all G known", "C0o-"), ("noise_linked", "all G, with noise", "C2^-"), ("chance", "chance", "k:")
        ],
    }  # fmt: skip
    for axis, (title, lines) in zip(below.subplots(1, len(panels), sharex=True), panels.items(), strict=True):
        for name, label, style in lines:
            axis.plot(list(sweep), [figures[name] for figures in sweep.values()], style, label=label, ms=4)
        axis.set_title(title, fontsize=10)
        axis.set_xlabel(f"clients in the sum ({IMAGES} images each)")
        axis.grid(alpha=0.3)
        axis.legend(fontsize=8)
    figure.savefig(output, dpi=110)
    plt.close(figure)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--clients", type=int, nargs="+", default=[1, 2, 4, 5, 6, 8, 12, 20])
    parser.add_argument("--seeds", type=int, default=5)
    parser.add_argument("--output", type=Path, default=FOLDER, help="folder of probe.json and probe.png")
    args = parser.parse_args()
    most = MEMBERS // IMAGES
    if args.seeds < 1 or not all(1 <= count <= most for count in args.clients):
        parser.error(f"--seeds must be at least 1, and --clients from 1 to {most}: there are {MEMBERS} images to deal")
    sigma = noise_multiplier(EPSILON, DELTA)
    found: dict[str, dict[int, dict[str, list[float]]]] = {"sum": {}, "one_client_no_g": {}}
    pictures: dict[int, dict[str, Tensor]] = {}
    for seed in range(args.seeds):
        members, others, radius = dealt(seed)
        sweep = {}
        for clients in sorted({1, *args.clients}):
            sweep[clients], images = probe(members, others, radius, clients, sigma, rng.key(seed, "probe", clients))
            if seed == 0:
                first = members[:EXAMPLES]
                pictures[clients] = {name: each[:EXAMPLES] for name, each in images.items()}
        small = small_clients(members, others, rng.key(seed, "probe"))
        for part, rows in (("sum", sweep), ("one_client_no_g", small)):
            for count, figures in rows.items():
                for name, value in figures.items():
                    found[part].setdefault(count, {}).setdefault(name, []).append(round(value, 6))

    d = members.shape[1]
    means = {
        part: {count: {name: statistics.mean(v) for name, v in row.items()} for count, row in rows.items()}
        for part, rows in found.items()
    }
    for clients, row in means["sum"].items():
        total = clients * IMAGES
        row |= {"images": total, "expected": max(0.0, 1 - MULTIPLE * d / total), "chance": 1 / clients}
    tables(means["sum"], means["one_client_no_g"])

    settings = {"d": d, "s": MULTIPLE * d, "images_per_client": IMAGES, "others": len(others)}
    noise = {"epsilon": EPSILON, "delta": DELTA, "releases": 1, "noise_multiplier": round(sigma, 6)}
    store(args.output / "probe.json", {**settings, "noise": noise, **found}, "torch")
    examples = [("the client's images", first), ("1 client, G known: least squares", pictures[1]["least squares"])]
    beyond = [clients for clients in pictures if clients * IMAGES > MULTIPLE * d]
    for clients in dict.fromkeys(beyond[:1] + beyond[-1:]):
        name = f"sum of {clients} clients, all G known"
        examples += [(f"{name}: least squares", pictures[clients]["least squares"])]
        examples += [(f"{name}: with the grey range", pictures[clients]["range"])]
    for clients in dict.fromkeys((1, max(pictures))):
        name = f"{clients} client{'s' * (clients > 1)}, all G known"
        examples += [(f"{name}: noise of epsilon {EPSILON:g}", pictures[clients]["noise"])]
    draw(means["sum"], examples, args.output / "probe.png")


if __name__ == "__main__":
    main()
