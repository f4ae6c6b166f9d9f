"""Fixed-point integers modulo 2^bits: masks cancel exactly, and a sum does not depend on its order."""

from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from cfl.core import ConfigError

MANTISSA = 53  # bits of a float64


@dataclass(frozen=True)
class FixedPoint:
    """Encoding round(x 2^fraction_bits) modulo 2^bits; a sum of at most `clients` entries never wraps.

    The error of a sum of C unclipped entries is at most C 2^-(fraction_bits + 1) if the sum is below
    2^(53 - fraction_bits); float64 rounds larger sums in addition. Raises ConfigError if the range holds no entry.
    """

    bits: int  # 16, 32 or 64
    fraction_bits: int  # at least 0, below `bits`
    clients: int  # maximal number of entries in a sum, at least 1

    def __post_init__(self) -> None:
        if not self._limit:
            raise ConfigError(f"a sum of {self.clients} clients does not fit in {self.bits} bits; use more bits")

    @property
    def _limit(self) -> int:
        """`largest` in units of 2^-fraction_bits, with at most 53 significant bits, so that float64 is exact."""
        limit = (2 ** (self.bits - 1) - 1) // self.clients
        spare = max(0, limit.bit_length() - MANTISSA)
        return limit >> spare << spare

    @property
    def largest(self) -> float:
        """Largest magnitude that is not clipped."""
        return self._limit * 2.0**-self.fraction_bits

    def encode(self, x: Tensor) -> tuple[np.ndarray, int]:
        """Return x (n,) as unsigned integers (n,), and the number of entries clipped to +-largest.

        Raises ValueError if an entry is NaN or infinite.
        """
        if not torch.isfinite(x).all():
            raise ValueError(f"{int((~torch.isfinite(x)).sum())} of {x.numel()} entries are NaN or infinite")
        with np.errstate(over="ignore"):  # an overflow to infinity is clipped below
            scaled = np.rint(x.double().numpy(force=True) * 2.0**self.fraction_bits)
        clipped = int(np.count_nonzero(np.abs(scaled) > self._limit))
        np.clip(scaled, -self._limit, self._limit, out=scaled)
        return scaled.astype(np.int64).astype(f"u{self.bits // 8}"), clipped

    def decode(self, total: np.ndarray) -> Tensor:
        """Return a sum (n,) of encoded vectors modulo 2^bits as float64 (n,)."""
        signed = total.view(f"i{self.bits // 8}").astype(np.float64)
        return torch.from_numpy(signed * 2.0**-self.fraction_bits)
