"""Sums over a layer's input vectors, taken batch by batch: energies, Gram matrices, Gaussian sketches (FOT, eq. 8-11).

X (d, n) has one column for each input vector and is never stored; X* = X - O O^T X is its residual to a basis O (d, k).
"""

import torch
from torch import Tensor

from cfl import rng
from cfl.subspace import basis as bases

BLOCK = 256  # rows of a triangular product that are taken at a time


class Energies:
    """Running energies. basis: O (d, k); what is released has its precision, and sums are kept in float64."""

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

    def release(self) -> Tensor | None:
        """What goes up beside the energies: nothing."""
        return None

    def _residual(self, rows: Tensor) -> Tensor:
        rows = rows.to(self.basis.dtype)
        residual = bases.remove(rows, self.basis)  # eq. 8
        self._energies += torch.stack([part.square().sum(dtype=torch.float64) for part in (rows, residual)])
        return residual


class Gram(Energies):
    """Running X X^T: memory d^2 however many vectors there are; the residual's is P X X^T P with P = I - O O^T.

    columns: None to release the residual's Gram matrix itself, packed; else the sketch's s. A sketch A = X* G with
    normal G has the law of P L Z, where L L^T = X X^T and Z is normal: all columns are N(0, X* X*^T). While there
    are fewer vectors than dimensions, L is X itself; later it is (d, d), and Z has d x s numbers in place of n x s.
    """

    def __init__(self, basis: Tensor, columns: int | None, key: int) -> None:
        super().__init__(basis)
        self.columns, self.key = columns, key
        self.few: Tensor | None = basis.new_zeros(0, len(basis))  # the vectors (n, d), while n < d
        self._sum: Tensor | None = None

    def add(self, inputs: Tensor, ids: Tensor) -> None:
        """As in `Energies`: vectors are kept while they are fewer than dimensions."""
        rows = inputs.flatten(0, 1)
        if self.few is not None and len(self.few) + len(rows) < len(self.basis):
            self.few = torch.cat([self.few, rows.to(self.few)])
        else:
            self.add_gram(bases.outer(rows.T))

    def add_gram(self, gram: Tensor) -> None:
        """Take in vectors of which the Gram matrix (d, d) is known."""
        if self.few is not None and len(self.few):
            gram = gram + bases.outer(self.few.T)
        self.few, self._sum = None, gram if self._sum is None else self._sum.add_(gram)

    @property
    def energies(self) -> Tensor:
        if self.few is not None:
            rest = bases.remove(self.few, self.basis)
            return torch.stack([part.square().sum(dtype=torch.float64) for part in (self.few, rest)])
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
        root, lower = (self.few.T, False) if self.few is not None else _root(self._whole(), self.basis.dtype)
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


def _root(gram: Tensor, dtype: torch.dtype) -> tuple[Tensor, bool]:
    """L (d, d), float64, with L L^T = gram up to what a sketch of that precision can hold; whether it is triangular."""
    noise = len(gram) * torch.finfo(gram.dtype).eps
    if dtype != gram.dtype:  # in float32 nobody sees 1e-13 of an energy, and a Cholesky factor takes d^3 / 3
        diagonal = gram.diagonal()
        factor, failed = torch.linalg.cholesky_ex(gram + torch.diag(noise * diagonal.max().expand_as(diagonal)))
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

    def add(self, inputs: Tensor, ids: Tensor) -> None:
        parts = zip(ids.tolist(), inputs, strict=True) if self.by_sample else [(-1, inputs.flatten(0, 1))]
        draw = torch.rand if self.uniform else torch.randn
        for sample, rows in parts:
            source = rng.generator(rng.key(self.key, sample)) if self.by_sample else self.source
            g = draw(len(rows), self.matrix.shape[1], dtype=self.basis.dtype, generator=source).to(rows.device)
            self.matrix += self._residual(rows).T @ (g.mul_(2).sub_(1) if self.uniform else g)

    def release(self) -> Tensor:
        """The sketch (d, s)."""
        return self.matrix


def some_patches(inputs: Tensor, ids: Tensor, most: int, key: int) -> Tensor:
    """At most `most` of the positions (batch, positions, d) of each sample, drawn by (key, sample); 0 takes all."""
    positions = inputs.shape[1]
    if not 0 < most < positions:
        return inputs
    drawn = [torch.randperm(positions, generator=rng.generator(rng.key(key, sample)))[:most] for sample in ids.tolist()]
    return inputs.gather(1, torch.stack(drawn).to(inputs.device)[:, :, None].expand(-1, -1, inputs.shape[2]))


def pack(gram: Tensor) -> Tensor:
    """The upper triangle of a symmetric (d, d) matrix as a vector (d (d + 1) / 2,)."""
    rows, columns = torch.triu_indices(*gram.shape)
    return gram[rows, columns]


def unpack(vector: Tensor, size: int) -> Tensor:
    """The inverse of `pack`."""
    rows, columns = torch.triu_indices(size, size)
    gram = vector.new_zeros(size, size)
    gram[rows, columns] = vector
    gram[columns, rows] = vector
    return gram
