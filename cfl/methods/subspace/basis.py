"""Orthonormal bases of protected subspaces: projection, spectra, rank rules, expansion (FOT, eq. 6, 8, 11-12).

A basis is O (d, k), float64, with orthonormal columns; the empty basis is (d, 0).
"""

import warnings
from typing import NamedTuple

import torch
from torch import Tensor

TAIL = 3.0  # standard deviations beyond the largest singular value that is expected of noise: exp(-9/2) is 1.1 %
BLOCK = 128  # rows of a symmetric product that are taken at a time


def empty(size: int, device: torch.device | str = "cpu") -> Tensor:
    """The basis of the zero subspace: (size, 0)."""
    return torch.zeros(size, 0, dtype=torch.float64, device=device)


def full(basis: Tensor) -> bool:
    """Whether it spans the whole space."""
    return basis.shape[1] == basis.shape[0]


def remove(x: Tensor, basis: Tensor) -> Tensor:
    """Remove from each *row* of x (n, d) its component in the basis: x - (x O) O^T, in the precision of x (FOT, eq. 6).

    For a weight's update (outputs, d) this leaves the layer's output on inputs in span(O) unchanged.
    """
    return x if basis.shape[1] == 0 else x - component(x, basis)


def component(x: Tensor, basis: Tensor) -> Tensor:
    """The component in the basis of each row of x (n, d): (x O) O^T, in the precision of x."""
    basis = basis.to(x)
    return (x @ basis) @ basis.T


def outer(a: Tensor, dtype: torch.dtype = torch.float64) -> Tensor:
    """A A^T (d, d), float64, of A (d, s), multiplied in `dtype` on and below the diagonal and mirrored."""
    a, d = a.to(dtype), len(a)
    if d <= BLOCK:
        return (a @ a.T).double()
    result = a.new_empty(d, d, dtype=torch.float64)
    for start in range(0, d, BLOCK):
        rows = slice(start, start + BLOCK)
        result[rows, : rows.stop] = a[rows] @ a[: rows.stop].T
        result[:start, rows] = result[rows, :start].T
    return result


def spectrum(a: Tensor, *, gram: bool = False) -> tuple[Tensor, Tensor]:
    """Left singular vectors U (d, d) and squared singular values (d,) of a sketch A (d, s), largest first.

    gram: `a` is X X^T (d, d) instead. Values below the numerical rank, given the precision of `a`, come back as zero.
    Raises ValueError for a NaN or an infinity.
    """
    found = residual_spectrum(a, empty(a.shape[0], a.device), gram=gram)
    return found.vectors, found.squared


class Residual(NamedTuple):
    """What a sketch has beside a basis. energy: of all of it; share: of the whole sketch's energy, in [0, 1].

    vectors: (d, d) left singular vectors; squared: (d,) squares of the singular values, largest first, 0 below the
    numerical rank.
    """

    vectors: Tensor
    squared: Tensor
    energy: float
    share: float


def residual_spectrum(
    a: Tensor, basis: Tensor, *, gram: bool = False, noise: float = 0.0, terms: float = 1.0
) -> Residual:
    """`spectrum` of what remains of `a` beside the basis, and how much that is.

    terms: how many matrices were rounded to the precision of `a`, and added up in it.
    noise: standard deviation of normal noise in each entry of `a` (on and above the diagonal of a Gram matrix). What
    it adds comes off: of a singular value what noise exceeds once in a hundred draws, std (sqrt(d) + sqrt(s) + 3)
    (Davidson and Szarek, 2001, theorem 2.13), or std (2 sqrt(d) + 3 sqrt(2)) of an eigenvalue of a Gram matrix; of
    energies its mean, std^2 d s. Values that do not stand out become zero.

    By the eigen-decomposition of A A^T in float64: d^3 operations where an SVD takes s d^2. The numerical rank is
    measured against the whole of `a`, whose rounding errors are what remains where the basis covers it.
    """
    if not bool(torch.isfinite(a).all()):
        raise ValueError("the sketch holds a NaN or an infinity")
    whole = a.double() if gram else outer(a)
    rest = remove(remove(whole, basis).T, basis)
    values, vectors = torch.linalg.eigh(rest)
    largest, rounding = _largest(whole) if basis.shape[1] else values[-1], torch.finfo(a.dtype).eps
    # Rounding a Gram matrix once moves its eigenvalues by half of eps times its norm at most; errors of a sum are of
    # either sign. A sketch's singular values are squared.
    if gram:
        stored = rounding * max(terms, 1.0) ** 0.5 * torch.linalg.matrix_norm(whole)
    else:
        stored = (max(a.shape) * rounding) ** 2 * largest
    tolerance = stored.clamp(min=max(a.shape) * torch.finfo(torch.float64).eps * float(largest))
    squared = torch.where(values > tolerance, values, torch.zeros_like(values))
    free, added = a.shape[0] - basis.shape[1], 0.0 if gram else noise**2 * a.shape[1]
    if noise and gram:
        squared = (squared - noise * (2 * free**0.5 + TAIL * 2**0.5)).clamp(min=0)
    elif noise:
        squared = (squared.sqrt() - noise * (free**0.5 + a.shape[1] ** 0.5 + TAIL)).clamp(min=0).square()
    remains, full = float(rest.trace()) - added * free, float(whole.trace()) - added * a.shape[0]
    hidden = float(noise > 0)  # where the noise hides all, nothing is known to be covered
    share = remains / full if full > 0 else hidden
    return Residual(vectors.flip(1), squared.flip(0), remains, min(1.0, max(0.0, share)))


def choose_rank(squared: Tensor, covered: float, threshold: float, criterion: str = "energy", min_rank: int = 0) -> int:
    """Smallest number r of new directions that meets the threshold, at most the numerical rank.

    squared: (d,) squared singular values of the residual sketch, largest first; threshold: in [0, 1].
    covered: for "energy" the fraction of input energy already in the basis, c = 1 - |X*|^2 / |X|^2, and r satisfies
    c + (1 - c) f_r >= threshold. For "norm_ratio" (FOT's code) and "eq12" (as FOT prints it) it is the ratio of norms
    rho = |X*| / |X|: f_r > (rho - (1 - threshold)) / rho, and sqrt(f_r) + rho > threshold.
    """
    rank, total = int((squared > 0).sum()), float(squared.sum())
    if rank == 0 or total == 0.0:
        return 0
    tolerance = 1e-12
    if threshold >= 1.0 and criterion == "energy" and covered < 1 - tolerance:  # beyond it, what is left is rounding
        return rank
    f = torch.cat([squared.new_zeros(1), squared.cumsum(0) / total]).tolist()
    if criterion == "energy":
        meets = [covered + (1 - covered) * f_r >= threshold - tolerance for f_r in f]
    elif criterion == "norm_ratio":
        wanted = (covered - (1 - threshold)) / covered if covered > 0 else 0.0
        meets = [f_r > wanted for f_r in f]
    elif criterion == "eq12":
        warnings.warn("FOT's eq. 12 as printed protects nothing in the first task; see 'energy'", stacklevel=2)
        meets = [f_r**0.5 + covered > threshold for f_r in f]
    else:
        raise ValueError(f"criterion must be energy, norm_ratio or eq12, not {criterion!r}")
    first = meets.index(True) if True in meets else rank
    return min(max(first, min_rank), rank)


def expand(basis: Tensor, directions: Tensor) -> Tensor:
    """Append the span of unit-length directions (d, r); the old columns stay as they are, to the bit (FOT, section 4).

    Directions lose their component in the basis twice ("twice is enough"); the eigenvectors of their Gram matrix then
    make them orthonormal. What keeps less than half of its length depends on the rest, and is dropped: a QR would
    replace it by an arbitrary direction.
    """
    new = remove(remove(directions.double().T, basis), basis).T
    lengths, free = new.T @ new, basis.shape[0] - basis.shape[1]
    factor, short = torch.linalg.cholesky_ex(lengths - 0.25 * torch.eye(len(lengths)).to(lengths))
    if new.shape[1] <= free and not short:  # all are long enough, as those from a spectrum are: no eigenvectors needed
        factor = torch.linalg.cholesky(lengths)
        new = torch.linalg.solve_triangular(factor, new.T, upper=False).T
    else:
        values, vectors = torch.linalg.eigh(lengths)
        kept = (values > 0.25) & (torch.arange(len(values), 0, -1, device=values.device) <= free)
        new = new @ vectors[:, kept] / values[kept].sqrt()
    return torch.cat([basis, remove(new.T, basis).T], dim=1)


def _largest(gram: Tensor) -> Tensor:
    """The largest eigenvalue () of a Gram matrix (d, d), by 30 steps of the power method: at most some percent less."""
    vector = gram[:, gram.diagonal().argmax()]
    for _ in range(30):
        vector = gram @ (vector / vector.norm().clamp(min=1e-300))
    return vector.norm()
