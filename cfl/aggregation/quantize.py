"""Real vectors as whole numbers modulo 2^bits, so that masks cancel exactly and a sum does not depend on its order."""

from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from cfl.core.errors import ConfigError

MANTISSA = 53  # bits of a float64


@dataclass(frozen=True)
class FixedPoint:
    """round(x 2^fraction_bits) modulo 2^bits; a sum of at most `clients` entries never wraps.

    The sum of C unclipped entries is off by at most C 2^-(fraction_bits + 1), as long as it is below
    2^(53 - fraction_bits); beyond, float64 rounds it on top. ConfigError where no entry would fit.
    """

    bits: int  # 16, 32 or 64
    fraction_bits: int
    clients: int  # the most that a sum has

    def __post_init__(self) -> None:
        if self.bits not in (16, 32, 64):
            raise ConfigError(f"bits={self.bits} of a fixed-point number; use 16, 32 or 64")
        if not 0 <= self.fraction_bits < self.bits or self.clients < 1:
            raise ConfigError(f"fixed point needs 0 <= fraction_bits < bits and clients >= 1, not {self}")
        if not self._limit:
            raise ConfigError(f"a sum of {self.clients} clients does not fit in {self.bits} bits; use more bits")

    @property
    def _limit(self) -> int:
        """`largest` in units of 2^-fraction_bits: at most 53 bits long, so that float64 has it exactly."""
        limit = (2 ** (self.bits - 1) - 1) // self.clients
        spare = max(0, limit.bit_length() - MANTISSA)
        return limit >> spare << spare

    @property
    def largest(self) -> float:
        """The magnitude up to which an entry is not clipped."""
        return self._limit * 2.0**-self.fraction_bits

    def encode(self, x: Tensor) -> tuple[np.ndarray, int]:
        """x (n,) float64 -> unsigned integers (n,), and how many were clipped to +-largest.

        ValueError: an entry is NaN or infinite.
        """
        if not torch.isfinite(x).all():
            raise ValueError(f"{int((~torch.isfinite(x)).sum())} of {x.numel()} entries are NaN or infinite")
        with np.errstate(over="ignore"):  # infinite is clipped like all that is too large
            scaled = np.rint(x.double().numpy(force=True) * 2.0**self.fraction_bits)
        clipped = int(np.count_nonzero(np.abs(scaled) > self._limit))
        np.clip(scaled, -self._limit, self._limit, out=scaled)
        return scaled.astype(np.int64).astype(f"u{self.bits // 8}"), clipped

    def decode(self, total: np.ndarray) -> Tensor:
        """A sum (n,) of encoded vectors, modulo 2^bits -> float64 (n,)."""
        signed = total.view(f"i{self.bits // 8}").astype(np.float64)
        return torch.from_numpy(signed * 2.0**-self.fraction_bits)
