"""Running sums over a layer's input vectors: energies, Gram matrices and Gaussian sketches (FOT, eq. 8-11).

X (d, n) has one column for each input vector and is never stored as a whole. X* = X - O O^T X is its residual to a
basis O (d, k).
"""

import math
from collections import Counter

import numpy as np
import torch
from torch import Tensor

from cfl.core import rng
from cfl.methods.subspace import basis as bases

BLOCK = 128  # rows of a triangular product that are computed at a time
DRAWS = 2**16  # normal draws that are computed at a time, in the processor's cache
VECTORS = 4096  # vectors whose products are summed in the precision of the products


class Energies:
    """Running energies in float64. basis: O (d, k), orthonormal; its precision is that of the products."""

    def __init__(self, basis: Tensor) -> None:
        self.basis = basis
        self._energies = torch.zeros(2, dtype=torch.float64, device=basis.device)

    @property
    def energies(self) -> Tensor:
        """(|X|^2, |X*|^2), float64."""
        return self._energies

    def add(self, inputs: Tensor, ids: Tensor) -> None:
        """Add the inputs (batch, positions, d) of the samples `ids` (batch,)."""
        rows = inputs.flatten(0, 1).to(self.basis.dtype)
        self.add_energies(_energy(rows), _energy(rows @ self.basis))

    def add_energies(self, whole: Tensor, inside: Tensor) -> None:
        """Add vectors by their energy () and that of their products with the basis: |X*|^2 = |X|^2 - |O^T X|^2."""
        self._energies += torch.stack([whole, (whole - inside).clamp(min=0)])


class Gram(Energies):
    """Running X X^T in d^2 numbers for any number of vectors. The residual's is P X X^T P with P = I - O O^T.

    columns: s of the sketch to release, or None to release the residual's packed Gram matrix. A sketch A = X* G with
    normal G has the distribution of P L Z with L L^T = X X^T and normal Z: all columns are N(0, X* X*^T). L is X itself
    while X has few vectors. Later L is (d, d), and Z has d x s numbers instead of n x s.
    products: precision of the products of up to VECTORS vectors; their sum is float64.
    """

    def __init__(self, basis: Tensor, columns: int | None, key: int, products: torch.dtype = torch.float64) -> None:
        super().__init__(basis)
        self.columns, self.key, self.products = columns, key, products
        d = len(basis)
        self._limit = d if columns and columns > d else 2 * d  # with more vectors, a factor of X X^T costs less than X
        self._few: list[Tensor] | None = [basis.new_zeros(0, d)]  # all vectors, until they reach the limit
        self._sum: Tensor | None = None

    @property
    def few(self) -> Tensor | None:
        """All vectors (n, d), or None once only their Gram matrix is kept."""
        if self._few and len(self._few) > 1:
            self._few = [torch.cat(self._few)]
        return self._few[0] if self._few else None

    def add(self, inputs: Tensor, ids: Tensor) -> None:
        """Add inputs as in `Energies`; vectors are kept up to a limit, then only their Gram matrix."""
        if self._few is not None and sum(map(len, self._few)) + inputs[..., 0].numel() < self._limit:
            self._few.append(inputs.flatten(0, 1).to(self.basis))
            return
        columns = inputs.movedim(-1, 0).flatten(1)  # of unfolded patches, copied faster than their rows
        for part in columns.split(VECTORS, dim=1):
            self.add_gram(bases.outer(part, self.products))

    def add_gram(self, gram: Tensor) -> None:
        """Add vectors by their Gram matrix (d, d)."""
        if self.few is not None and len(self.few):
            gram = gram + bases.outer(self.few.T, self.products)
        self._few, self._sum = None, gram if self._sum is None else self._sum.add_(gram)

    @property
    def energies(self) -> Tensor:
        if self.few is not None:
            whole, rest = _energy(self.few), bases.remove(self.few, self.basis)
            return torch.stack([whole, whole if rest is self.few else _energy(rest)])
        whole, basis = self._gram(), self.basis.double()
        inside = whole @ basis
        known = (2 * basis * inside).sum() - ((basis.T @ basis) * (basis.T @ inside)).sum()
        return torch.stack([whole.trace(), (whole.trace() - known).clamp(min=0)])

    @property
    def matrix(self) -> Tensor:
        """X* X*^T (d, d), float64."""
        return bases.remove(bases.remove(self._gram(), self.basis).T, self.basis)

    def spectrum(self) -> tuple[Tensor, Tensor]:
        """Left singular vectors (d, k) of X* and its squared singular values (k,), largest first.

        k = d. With fewer vectors than dimensions, k is their number n: X*^T X* (n, n) has the same values, and its
        eigenvectors times X* the same directions. Values below the numerical rank are zero.
        """
        if self.few is None or len(self.few) >= len(self.basis):
            vectors, squared, *_ = bases.residual_spectrum(self.matrix, self.basis, gram=True)
            return vectors, squared
        rest = bases.remove(self.few.double(), self.basis)
        vectors, squared = bases.spectrum(rest)
        lengths = torch.where(squared > 0, squared.rsqrt(), 0.0)
        return rest.T @ vectors * lengths, squared

    def release(self) -> Tensor:
        """Packed Gram matrix (d (d + 1) / 2,), or a sketch (d, s)."""
        if self.columns is None:
            return pack(self.matrix)
        root, lower = (self.few.T, False) if self.few is not None else self._root()
        if self.basis.shape[1]:
            root, lower = bases.remove(root.T, self.basis).T, False
        draws = _normal(rng.private_generator(self.key), root.shape[1], self.columns, self.basis)
        if not lower:
            return root.to(draws) @ draws
        for stop in range(len(root), 0, -BLOCK):  # in place, from below: a row needs the unchanged rows above it
            rows = slice(max(stop - BLOCK, 0), stop)
            draws[rows] = root[rows, :stop].to(draws) @ draws[:stop]
        return draws

    def _gram(self) -> Tensor:
        """X X^T (d, d), float64."""
        if self.few is not None:
            return bases.outer(self.few.T, self.products)
        assert self._sum is not None
        return self._sum

    def _root(self) -> tuple[Tensor, bool]:
        """L (d, d) in float64 with L L^T = X X^T up to the precision of a sketch, and whether L is triangular."""
        gram = self._gram()
        noise = len(gram) * torch.finfo(gram.dtype).eps
        shifts = [noise * float(gram.diagonal().max())]  # a float32 sketch cannot represent 1e-13 of an energy
        if self.products != gram.dtype:  # rounding may have made an eigenvalue negative
            noise = torch.finfo(self.products).eps
            shifts.append(noise * float(gram.trace()))
        for shift in shifts if self.basis.dtype != gram.dtype else []:  # a Cholesky factor costs d^3 / 3
            factor = bases.cholesky(gram, shift)
            if factor is not None:
                return factor, True
        values, vectors = torch.linalg.eigh(gram)
        roots = torch.where(values > noise * values[-1], values, 0.0).sqrt()  # noise of 1e-16 has a root of 1e-8
        return vectors * roots, False


class Direct(Energies):
    """Running A = X* G (d, s) with explicit draws of all rows of G (eq. 9).

    key: of 128 bits. by_sample: draw rows by (key, sample), so that the sum over clients is the same for every
    partition of the samples; else from one generator for the client. distribution: "normal" (0, 1), or "uniform" on
    (-1, 1) (FOT's code).
    """

    def __init__(self, basis: Tensor, columns: int, key: int, *, by_sample: bool, distribution: str = "normal") -> None:
        super().__init__(basis)
        self.columns, self._sum = columns, torch.zeros((), dtype=torch.float64, device=basis.device)
        self.key, self.by_sample, self.uniform = key, by_sample, distribution == "uniform"
        self.source = rng.private_generator(key)
        self._calls: Counter[int] = Counter()  # calls by sample: a layer may run several times per pass
        self._waiting: list[Tensor] = []  # multiplied when they are d vectors: one large product is faster

    def add(self, inputs: Tensor, ids: Tensor) -> None:
        if self.by_sample:
            for sample, rows in zip(ids.tolist(), inputs, strict=True):
                calls = (self._calls[sample],) if sample in self._calls else ()
                self._multiply(rows, rng.private_generator(self.key, sample, *calls))
                self._calls[sample] += 1
            return
        self._waiting.append(inputs.flatten(0, 1))
        if sum(map(len, self._waiting)) >= len(self.basis):
            self._multiply_waiting()

    @property
    def energies(self) -> Tensor:
        self._multiply_waiting()
        return self._energies

    def release(self) -> Tensor:
        """Sketch (d, s)."""
        self._multiply_waiting()
        return self._sum if self._sum.dim() else self._sum.new_zeros(len(self.basis), self.columns)

    def _multiply_waiting(self) -> None:
        if self._waiting:
            self._multiply(torch.cat(self._waiting), self.source)
            self._waiting.clear()

    def _multiply(self, rows: Tensor, source: np.random.Generator) -> None:
        rows = rows.to(self.basis.dtype)
        residual, whole = bases.remove(rows, self.basis), _energy(rows)  # eq. 8
        self._energies += torch.stack([whole, whole if residual is rows else _energy(residual)])
        draw = _uniform if self.uniform else _normal
        product = residual.T @ draw(source, len(rows), self.columns, self.basis)
        self._sum = self._sum.add_(product) if self._sum.dim() else product.double()


def _uniform(source: np.random.Generator, rows: int, columns: int, basis: Tensor) -> Tensor:
    """Draws (rows, columns) from (-1, 1), with the precision and device of a basis."""
    dtype = np.float64 if basis.dtype == torch.float64 else np.float32
    return torch.from_numpy(source.random((rows, columns), dtype=dtype)).mul_(2).sub_(1).to(basis)


def _normal(source: np.random.Generator, rows: int, columns: int, basis: Tensor) -> Tensor:
    """Standard normal draws (rows, columns), with the precision and device of a basis.

    float32 by Box and Muller (1958): unlike NumPy's rejection method, it is vectorised. The
    largest draw is sqrt(48 ln 2) = 5.8; a normal number exceeds it in 8 of 10^9 cases.
    """
    if basis.dtype == torch.float64:
        return torch.from_numpy(source.standard_normal((rows, columns))).to(basis)
    draws = torch.empty(rows * columns)
    for part in draws.split(DRAWS):
        half = (len(part) + 1) // 2
        radius, angle = torch.from_numpy(source.random((2, half), dtype=np.float32))
        radius, angle = radius.neg_().log1p_().mul_(-2).sqrt_(), angle.mul_(2 * math.pi)
        torch.mul(radius, angle.cos(), out=part[:half])
        part[half:] = radius.mul_(angle.sin_())[: len(part) - half]
    return draws.view(rows, columns).to(basis)


def _energy(x: Tensor) -> Tensor:
    """Squared Frobenius norm () of (n, d), float64; each row is summed in the precision of x."""
    return x.square().sum(1).sum(dtype=torch.float64)


def pack(gram: Tensor) -> Tensor:
    """Upper triangle of a symmetric (d, d) matrix as a vector (d (d + 1) / 2,)."""
    return torch.cat([row[i:] for i, row in enumerate(gram)])


def packed_size(vector: Tensor) -> int:
    """Size d of the (d, d) matrix that `pack` made d (d + 1) / 2 numbers of."""
    return math.isqrt(2 * len(vector))


def unpack(vector: Tensor) -> Tensor:
    """Inverse of `pack`: the symmetric (d, d) matrix."""
    size = packed_size(vector)
    rows, columns = torch.triu_indices(size, size)
    gram = vector.new_zeros(size, size)
    gram[rows, columns] = vector
    gram[columns, rows] = vector
    return gram
