"""Sums over a layer's input vectors, taken batch by batch: energies, Gram matrices, Gaussian sketches (FOT, eq. 8-11).

X (d, n) has one column for each input vector and is never stored; X* = X - O O^T X is its residual to a basis O (d, k).
"""

from collections import Counter

import torch
from torch import Tensor

from cfl.core import rng
from cfl.methods.subspace import basis as bases

BLOCK = 256  # rows of a triangular product that are taken at a time
VECTORS = 4096  # vectors whose products are summed in the precision asked for


class Energies:
    """Running energies. basis: O (d, k), in whose precision residuals are taken; sums are kept in float64."""

    def __init__(self, basis: Tensor) -> None:
        self.basis = basis
        self._energies = torch.zeros(2, dtype=torch.float64, device=basis.device)

    @property
    def energies(self) -> Tensor:
        """(|X|^2, |X*|^2), float64."""
        return self._energies

    def add(self, inputs: Tensor, ids: Tensor) -> None:
        """Take in inputs (batch, positions, d) of the samples `ids` (batch,)."""
        self._residual(inputs.flatten(0, 1))

    def _residual(self, rows: Tensor) -> Tensor:
        rows = rows.to(self.basis.dtype)
        residual = bases.remove(rows, self.basis)  # eq. 8
        self._energies += torch.stack([part.square().sum(dtype=torch.float64) for part in (rows, residual)])
        return residual


class Gram(Energies):
    """Running X X^T: memory d^2 however many vectors there are; the residual's is P X X^T P with P = I - O O^T.

    columns: None to release the residual's Gram matrix itself, packed; else the sketch's s. A sketch A = X* G with
    normal G has the law of P L Z, where L L^T = X X^T and Z is normal: all columns are N(0, X* X*^T). While there
    are few vectors, L is X itself; later it is (d, d), and Z has d x s numbers in place of n x s.
    products: precision of the products; what they add up to, a few thousand vectors at a time, is float64.
    """

    def __init__(self, basis: Tensor, columns: int | None, key: int, products: torch.dtype = torch.float64) -> None:
        super().__init__(basis)
        self.columns, self.key, self.products = columns, key, products
        d = len(basis)
        self._most = d if columns and columns > d else 2 * d  # from there on a factor of X X^T costs less than X itself
        self._few: list[Tensor] | None = [basis.new_zeros(0, d)]  # the vectors, while they are fewer
        self._sum: Tensor | None = None

    @property
    def few(self) -> Tensor | None:
        """The vectors (n, d), while all are kept."""
        if self._few and len(self._few) > 1:
            self._few = [torch.cat(self._few)]
        return self._few[0] if self._few else None

    def add(self, inputs: Tensor, ids: Tensor) -> None:
        """As in `Energies`: vectors are kept while they are few."""
        rows = inputs.flatten(0, 1)
        if self._few is not None and sum(map(len, self._few)) + len(rows) < self._most:
            self._few.append(rows.to(self.basis))
            return
        for part in rows.split(VECTORS):
            self.add_gram(bases.outer(part.T, self.products))

    def add_gram(self, gram: Tensor) -> None:
        """Take in vectors of which the Gram matrix (d, d) is known."""
        if self.few is not None and len(self.few):
            gram = gram + bases.outer(self.few.T, self.products)
        self._few, self._sum = None, gram if self._sum is None else self._sum.add_(gram)

    @property
    def energies(self) -> Tensor:
        if self.few is not None:
            whole = self.few.square().sum(dtype=torch.float64)
            rest = bases.remove(self.few, self.basis)
            return torch.stack([whole, whole if rest is self.few else rest.square().sum(dtype=torch.float64)])
        whole, basis = self._whole(), self.basis.double()
        inside = whole @ basis
        known = (2 * basis * inside).sum() - ((basis.T @ basis) * (basis.T @ inside)).sum()
        return torch.stack([whole.trace(), (whole.trace() - known).clamp(min=0)])

    @property
    def matrix(self) -> Tensor:
        """X* X*^T (d, d), float64."""
        return bases.remove(bases.remove(self._whole(), self.basis).T, self.basis)

    def release(self) -> Tensor:
        """The packed Gram matrix (d (d + 1) / 2,), or a sketch (d, s)."""
        if self.columns is None:
            return pack(self.matrix)
        root, lower = (self.few.T, False) if self.few is not None else self._root()
        if self.basis.shape[1]:
            root, lower = bases.remove(root.T, self.basis).T, False
        source = rng.generator(self.key)
        draws = torch.randn(root.shape[1], self.columns, dtype=self.basis.dtype, generator=source).to(root.device)
        root = root.to(draws.dtype)
        if not lower:
            return root @ draws
        for stop in range(len(root), 0, -BLOCK):  # in place, from below: a row needs those above it as they were
            rows = slice(max(stop - BLOCK, 0), stop)
            draws[rows] = root[rows, :stop] @ draws[:stop]
        return draws

    def _whole(self) -> Tensor:
        if self.few is not None:
            return bases.outer(self.few.T)
        assert self._sum is not None
        return self._sum

    def _root(self) -> tuple[Tensor, bool]:
        """L (d, d), float64, with L L^T = X X^T up to what a sketch can hold of it, and whether it is triangular."""
        gram = self._whole()
        noise = len(gram) * torch.finfo(gram.dtype).eps
        shifts = [noise * float(gram.diagonal().max())]  # in float32 nobody sees 1e-13 of an energy
        if self.products != gram.dtype:  # what it rounded off may have made an eigenvalue negative
            noise = torch.finfo(self.products).eps
            shifts.append(noise * float(gram.trace()))
        for shift in shifts if self.basis.dtype != gram.dtype else []:  # a Cholesky factor takes d^3 / 3
            factor, failed = torch.linalg.cholesky_ex(gram.diagonal_scatter(gram.diagonal() + shift))
            if not failed:
                return factor, True
        values, vectors = torch.linalg.eigh(gram)
        roots = torch.where(values > noise * values[-1], values, 0.0).sqrt()  # it would turn 1e-16 into 1e-8
        return vectors * roots, False


class Direct(Energies):
    """Running A = X* G (d, s) with the rows of G drawn one by one (eq. 9).

    by_sample: rows keyed by (key, sample), so that the sum over clients is the same however samples are dealt to them;
    else one generator for the client. distribution: entries "normal" (0, 1), or "uniform" on (-1, 1) (FOT's code).
    """

    def __init__(self, basis: Tensor, columns: int, key: int, *, by_sample: bool, distribution: str = "normal") -> None:
        super().__init__(basis)
        self.matrix = torch.zeros(basis.shape[0], columns, dtype=torch.float64, device=basis.device)
        self.key, self.by_sample, self.uniform = key, by_sample, distribution == "uniform"
        self.source = rng.generator(key)
        self._calls: Counter[int] = Counter()  # by sample: a layer may be called more than once in a pass
        self._waiting: list[Tensor] = []  # vectors not yet multiplied, while fewer than d: one large product is faster

    def add(self, inputs: Tensor, ids: Tensor) -> None:
        if self.by_sample:
            for sample, rows in zip(ids.tolist(), inputs, strict=True):
                calls = (self._calls[sample],) if sample in self._calls else ()
                self._multiply(rows, rng.generator(rng.key(self.key, sample, *calls)))
                self._calls[sample] += 1
            return
        self._waiting.append(inputs.flatten(0, 1))
        if sum(map(len, self._waiting)) >= len(self.basis):
            self._finish()

    @property
    def energies(self) -> Tensor:
        self._finish()
        return self._energies

    def release(self) -> Tensor:
        """The sketch (d, s)."""
        self._finish()
        return self.matrix

    def _finish(self) -> None:
        if self._waiting:
            self._multiply(torch.cat(self._waiting), self.source)
            self._waiting.clear()

    def _multiply(self, rows: Tensor, source: torch.Generator) -> None:
        draw = torch.rand if self.uniform else torch.randn
        g = draw(len(rows), self.matrix.shape[1], dtype=self.basis.dtype, generator=source).to(rows.device)
        self.matrix += self._residual(rows).T @ (g.mul_(2).sub_(1) if self.uniform else g)


def pack(gram: Tensor) -> Tensor:
    """The upper triangle of a symmetric (d, d) matrix as a vector (d (d + 1) / 2,)."""
    return torch.cat([row[i:] for i, row in enumerate(gram)])


def unpack(vector: Tensor, size: int) -> Tensor:
    """The inverse of `pack`."""
    rows, columns = torch.triu_indices(size, size)
    gram = vector.new_zeros(size, size)
    gram[rows, columns] = vector
    gram[columns, rows] = vector
    return gram
