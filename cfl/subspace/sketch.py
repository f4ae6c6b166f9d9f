"""Sums over a layer's input vectors, taken batch by batch: energies, Gram matrices, Gaussian sketches (FOT, eq. 8-11).

X (d, n) has one column for each input vector and is never stored; X* = X - O O^T X is its residual to a basis O (d, k).
"""

import torch
from torch import Tensor

from cfl import rng


class Energies:
    """Running energies: `energies` = (|X|^2, |X*|^2), float64."""

    def __init__(self, basis: Tensor) -> None:
        self.basis = basis.double()
        self.energies = torch.zeros(2, dtype=torch.float64, device=basis.device)

    def add(self, inputs: Tensor, ids: Tensor) -> None:
        """Take in inputs (batch, positions, d) of the samples `ids` (batch,)."""
        self._residual(inputs.flatten(0, 1))

    def release(self) -> Tensor | None:
        """What goes up beside the energies: nothing."""
        return None

    def _residual(self, rows: Tensor) -> Tensor:
        rows = rows.double()
        residual = rows - (rows @ self.basis) @ self.basis.T  # eq. 8
        self.energies += torch.stack([rows.square().sum(), residual.square().sum()])
        return residual


class Gram(Energies):
    """Running X* X*^T: memory d^2 however many vectors there are.

    columns: None to release the Gram matrix itself, packed; else the sketch's s. A sketch A = X* G with G normal has
    the law of L Z, where L L^T = X* X*^T and Z (d, s) is normal: each column of either is N(0, X* X*^T). Drawing Z
    takes d x s numbers in place of n x s.
    """

    def __init__(self, basis: Tensor, columns: int | None, key: int) -> None:
        super().__init__(basis)
        self.columns, self.key = columns, key
        self.matrix = torch.zeros(basis.shape[0], basis.shape[0], dtype=torch.float64, device=basis.device)

    def add(self, inputs: Tensor, ids: Tensor) -> None:
        residual = self._residual(inputs.flatten(0, 1))
        self.matrix += residual.T @ residual

    def release(self) -> Tensor:
        """The packed Gram matrix (d (d + 1) / 2,), or a sketch (d, s)."""
        if self.columns is None:
            return pack(self.matrix)
        values, vectors = torch.linalg.eigh(self.matrix)
        noise = len(values) * torch.finfo(values.dtype).eps * values[-1]  # the root would turn 1e-16 of it into 1e-8
        roots = torch.where(values > noise, values, 0.0).sqrt()
        draws = torch.randn(len(values), self.columns, dtype=torch.float64, generator=rng.generator(self.key))
        return (vectors * roots) @ draws.to(vectors.device)


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
        for sample, rows in parts:
            source = rng.generator(rng.key(self.key, sample)) if self.by_sample else self.source
            shape = (rows.shape[0], self.matrix.shape[1])
            draw = torch.rand if self.uniform else torch.randn
            g = draw(shape, dtype=torch.float64, generator=source).to(rows.device)
            self.matrix += self._residual(rows).T @ (2 * g - 1 if self.uniform else g)

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
