"""Orthonormal bases of protected subspaces: projection, spectra, rank rules, expansion (FOT, eq. 6, 8, 11-12).

A basis is O (d, k) in float64 with orthonormal columns. The empty basis is (d, 0).
"""

from typing import NamedTuple

import torch
from torch import Tensor

from cfl.core import warn

TAIL = 3.0  # margin in standard deviations; noise exceeds it with a probability below exp(-9 / 2) = 1.1 %
BLOCK = 128  # rows of a symmetric product that are computed at a time


def empty(size: int, device: torch.device | str = "cpu") -> Tensor:
    """Return the basis of the zero subspace: (size, 0)."""
    return torch.zeros(size, 0, dtype=torch.float64, device=device)


def full(basis: Tensor) -> bool:
    """True if the basis spans the whole space."""
    return basis.shape[1] == basis.shape[0]


def remove(x: Tensor, basis: Tensor) -> Tensor:
    """Remove from each *row* of x (n, d) its component in the basis: x - (x O) O^T, in the precision of x (FOT, eq. 6).

    Applied to a weight update (outputs, d), this leaves the layer's output unchanged for inputs in span(O).
    """
    if basis.shape[1] == 0:
        return x
    basis = basis.to(x)
    return torch.addmm(x, x @ basis, basis.T, alpha=-1)


def component(x: Tensor, basis: Tensor) -> Tensor:
    """Component of each row of x (n, d) in the basis: (x O) O^T, in the precision of x."""
    basis = basis.to(x)
    return (x @ basis) @ basis.T


def outer(a: Tensor, dtype: torch.dtype = torch.float64) -> Tensor:
    """A A^T (d, d) in float64 of A (d, s), computed in `dtype` on and below the diagonal and mirrored above it."""
    a, d = a.to(dtype), len(a)
    if d <= BLOCK:
        return (a @ a.T).double()
    result = a.new_empty(d, d, dtype=torch.float64)
    for start in range(0, d, BLOCK):
        rows = slice(start, start + BLOCK)
        result[rows, : rows.stop] = a[rows] @ a[: rows.stop].T
        result[:start, rows] = result[rows, :start].T
    return result


def cholesky(gram: Tensor, shift: float) -> Tensor | None:
    """L (d, d), lower triangular, with L L^T = X X^T + shift I, or None if the sum is not positive definite.

    By blocks of columns, since torch's function spends a third of its time on copies of large matrices.
    """
    factor = gram.clone()
    factor.diagonal().add_(shift)
    for start in range(0, len(gram), BLOCK):
        above, below = slice(start, start + BLOCK), slice(start + BLOCK, None)
        factor[start:, above] -= factor[start:, :start] @ factor[above, :start].T
        factor[above, above], failed = torch.linalg.cholesky_ex(factor[above, above])
        if failed:
            return None
        top = factor[above, above]
        factor[below, above] = torch.linalg.solve_triangular(top, factor[below, above].T, upper=False).T
    return factor.tril_()


def spectrum(a: Tensor, *, gram: bool = False) -> tuple[Tensor, Tensor]:
    """Left singular vectors U (d, d) and squared singular values (d,) of a sketch A (d, s), largest first.

    gram: `a` is X X^T (d, d) instead. Values below the numerical rank in the precision of `a` are returned as zero.
    Raises ValueError if `a` contains a NaN or an infinity.
    """
    found = residual_spectrum(a, empty(a.shape[0], a.device), gram=gram)
    return found.vectors, found.squared


class Residual(NamedTuple):
    """Spectrum and energy of a sketch's residual to a basis.

    vectors: (d, d) left singular vectors; squared: (d,) squared singular values, largest first, 0 below the numerical
    rank; energy: squared Frobenius norm of the residual; share: `energy` as a fraction of the whole sketch's energy.
    """

    vectors: Tensor
    squared: Tensor
    energy: float
    share: float


def residual_spectrum(
    a: Tensor, basis: Tensor, *, gram: bool = False, noise: float = 0.0, terms: float = 1.0
) -> Residual:
    """`spectrum` of the residual of `a` to the basis, and the energy of the residual, both without noise.

    terms: number of matrices that were rounded to the precision of `a` and summed in it; noise: standard deviation of
    the normal noise in each entry of `a` (on and above the diagonal of a Gram matrix).
    Raises ValueError if `a` contains a NaN or an infinity.
    """
    if not bool(torch.isfinite(a).all()):
        raise ValueError("the sketch contains a NaN or an infinity")
    columns, free = None if gram else a.shape[1], a.shape[0] - basis.shape[1]
    whole = a.double() if gram else outer(a)
    rest = remove(remove(whole, basis).T, basis)
    values, vectors = torch.linalg.eigh(rest)  # d^3 operations; an SVD of a sketch takes s d^2
    tolerance = _rounding_error(a, whole, _largest(whole) if basis.shape[1] else values[-1], gram, terms)
    squared = _without_noise(torch.where(values > tolerance, values, torch.zeros_like(values)), noise, free, columns)
    return Residual(vectors.flip(1), squared.flip(0), *_residual_energy(whole, rest, noise, free, columns))


def _rounding_error(a: Tensor, whole: Tensor, largest: Tensor, gram: bool, terms: float) -> Tensor:
    """Largest eigenvalue () of a residual that may be a rounding error of `a`; larger ones make up the numerical rank.

    whole: A A^T, or the Gram matrix itself; largest: its largest eigenvalue. The bound is relative to the whole of `a`,
    because inputs that the basis covers leave a residual of rounding errors of the whole.
    """
    rounding = torch.finfo(a.dtype).eps
    # Rounding a Gram matrix once moves its eigenvalues by half of eps times its norm at most; errors of a sum are of
    # either sign. A sketch's singular values are squared.
    if gram:
        stored = rounding * max(terms, 1.0) ** 0.5 * torch.linalg.matrix_norm(whole)
    else:
        stored = (max(a.shape) * rounding) ** 2 * largest
    return stored.clamp(min=max(a.shape) * torch.finfo(torch.float64).eps * float(largest))


def _without_noise(squared: Tensor, noise: float, free: int, columns: int | None) -> Tensor:
    """Squared singular values (d,) of a residual less the noise; values that do not exceed the noise become zero.

    free: dimensions n outside of the basis; columns: s of a sketch, None for a Gram matrix. A singular value loses
    std (sqrt(n) + sqrt(s) + 3), and an eigenvalue of a Gram matrix loses std (2 sqrt(n) + 3 sqrt(2)). Noise alone
    exceeds them in about one of a hundred draws (Davidson and Szarek, 2001, theorem 2.13).
    """
    if not noise:
        return squared
    if columns is None:
        return (squared - noise * (2 * free**0.5 + TAIL * 2**0.5)).clamp(min=0)
    return (squared.sqrt() - noise * (free**0.5 + columns**0.5 + TAIL)).clamp(min=0).square()


def _residual_energy(whole: Tensor, rest: Tensor, noise: float, free: int, columns: int | None) -> tuple[float, float]:
    """Energy of a residual, and its share in [0, 1] of the whole energy, both less the mean of the noise.

    whole, rest: Gram matrices (d, d) of the sketch and of its residual. The mean of the noise is std^2 s for each
    dimension of a sketch, and 0 for a Gram matrix.
    """
    added = 0.0 if columns is None else noise**2 * columns
    remains, full = float(rest.trace()) - added * free, float(whole.trace()) - added * len(whole)
    hidden = float(noise > 0)  # where noise hides all energy, none of it is known to be covered
    share = remains / full if full > 0 else hidden
    return remains, min(1.0, max(0.0, share))


def choose_rank(squared: Tensor, covered: float, threshold: float, criterion: str = "energy", min_rank: int = 0) -> int:
    """Smallest number r of new directions that meets the threshold, at most the numerical rank.

    squared: (d,) squared singular values of the residual sketch, largest first; threshold: in [0, 1].
    covered: for "energy" the fraction of input energy that the basis covers, c = 1 - |X*|^2 / |X|^2; r then satisfies
    c + (1 - c) f_r >= threshold. For "norm_ratio" (FOT's code) and "eq12" (as FOT prints it) the ratio of norms
    rho = |X*| / |X|; r then satisfies f_r > (rho - (1 - threshold)) / rho, or sqrt(f_r) + rho > threshold.
    Raises ValueError for another criterion.
    """
    rank, total = int((squared > 0).sum()), float(squared.sum())
    if rank == 0:
        return 0
    tolerance = 1e-12
    if threshold >= 1.0 and criterion == "energy" and covered < 1 - tolerance:  # from 1 - tolerance on, only rounding
        return rank
    f = torch.cat([squared.new_zeros(1), squared.cumsum(0) / total]).tolist()
    if criterion == "energy":
        meets = [covered + (1 - covered) * f_r >= threshold - tolerance for f_r in f]
    elif criterion == "norm_ratio":
        wanted = (covered - (1 - threshold)) / covered if covered > 0 else 0.0
        meets = [f_r > wanted for f_r in f]
    elif criterion == "eq12":
        warn("FOT's eq. 12 as printed protects nothing in the first task; see 'energy'")
        meets = [f_r**0.5 + covered > threshold for f_r in f]
    else:
        raise ValueError(f"criterion must be energy, norm_ratio or eq12, not {criterion!r}")
    first = meets.index(True) if True in meets else rank
    return min(max(first, min_rank), rank)


def expand(basis: Tensor, directions: Tensor) -> Tensor:
    """Append the span of unit-length directions (d, r) to a basis; old columns stay bit-identical (FOT, section 4).

    The component in the basis is removed twice ("twice is enough"). Then a Cholesky factor of the directions' Gram
    matrix, or its eigenvectors, make them orthonormal. Directions that keep less than half of their length depend on
    the basis or on each other and are dropped; a QR would replace them by arbitrary ones.
    """
    new = remove(remove(directions.double().T, basis), basis).T
    lengths = new.T @ new
    factor, short = torch.linalg.cholesky_ex(lengths - 0.25 * torch.eye(len(lengths)).to(lengths))
    if not short:  # none is short, as for directions from a spectrum: no eigenvectors needed
        factor = torch.linalg.cholesky(lengths)
        new = torch.linalg.solve_triangular(factor, new.T, upper=False).T
    else:
        values, vectors = torch.linalg.eigh(lengths)
        kept = values > 0.25
        new = new @ vectors[:, kept] / values[kept].sqrt()
    return torch.cat([basis, remove(new.T, basis).T], dim=1)


def _largest(gram: Tensor) -> Tensor:
    """Largest eigenvalue () of a Gram matrix (d, d) by 30 steps of the power method, at most a few percent too low."""
    vector = gram[:, gram.diagonal().argmax()]
    for _ in range(30):
        vector = gram @ (vector / vector.norm().clamp(min=1e-300))
    return vector.norm()
